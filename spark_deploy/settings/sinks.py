r"""The form of text that leaves the controller, one for each place where it ends.

What reaches a shell, a unit, apt, docker's ``--mount`` or nginx is a plain word there: nothing that
ends a line, begins an option, or separates one value from the next. Matched as a whole: a ``$`` in
these patterns is the end of the text, not a newline before it (documents/schema_check.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from spark_deploy.documents.declare import about

_PART = r"(?!\.{1,2}(/|$))[A-Za-z0-9._+@-]+"
FOLDER = rf"^(/{_PART})+$"
"""A folder on a host: in unit files, ``--mount`` and shells, so no blank, comma, colon or ``%``."""
GLOB = r"^(/(?!\.{1,2}(/|$))[A-Za-z0-9._+@*?\[\]-]+)+$"
"""The same with the wildcards of a shell."""
BELOW = rf"^{_PART}(/{_PART})*$"
"""A file below a folder of the controller: neither absolute nor upwards."""
PACKAGE = r"^[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?$"
"""A package of apt, with architecture or version; no option, no file."""
SUITE = r"^(\./|[A-Za-z0-9][A-Za-z0-9._/-]*)$"
COMPONENT = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
URL = r"^https?://(?![^/]*@)[A-Za-z0-9\[]([A-Za-z0-9._~:/?%&=+@,\[\]-]*[A-Za-z0-9._~%&=+@,\]-])?$"
"""No login: it stands in jobs, locks and lists of apt, which everybody on a host may read."""
CONTAINER = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
LOGIN = r"^[A-Za-z_][A-Za-z0-9_.@-]*\$?$"
ADDRESS = r"^[A-Za-z0-9\[:][A-Za-z0-9._:%\]-]*$"
FROM = r"^[A-Za-z0-9*?:][A-Za-z0-9.:*?/_-]*$"
"""An address, network or name of ``from=`` in authorized_keys; no ``!``, comma or quote."""

Packages = tuple[Annotated[str, about(pattern=PACKAGE)], ...]

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
# Where the system keeps what is not ours, and where others than root may write.
_BELOW_REFUSED = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr"),
    *("/home", "/root", "/tmp", "/var/cache", "/var/log", "/var/run", "/var/spool", "/var/tmp"),
    *("/var/lib/apt", "/var/lib/dpkg", "/var/lib/docker", "/var/lib/spark", "/var/lib/systemd"),
)
_REFUSED = ("/media", "/mnt", "/opt", "/srv", "/var", "/var/lib", "/lost+found")


def control_characters(
    data: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each text in plain data, keys included, with a control character."""
    if isinstance(data, str):
        if _CONTROL.search(data):
            yield path
    elif isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(key, str) and _CONTROL.search(key):
                yield path
            yield from control_characters(value, (*path, str(key)))
    elif isinstance(data, Sequence):
        for number, value in enumerate(data):
            yield from control_characters(value, (*path, number))


def is_the_system_s(folder: str) -> bool:
    """Return whether a folder is the system's, or one in which others than root may write."""
    inside = any(folder == one or folder.startswith(f"{one}/") for one in _BELOW_REFUSED)
    return inside or folder in _REFUSED
