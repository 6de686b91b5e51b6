"""Rules between settings, which a schema cannot express: how sections state them.

A section that has some yields them from ``broken()``, beside the settings they are about; those
between sections stand in ``between.py``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from spark_deploy.config.documents.declare import about, form
from spark_deploy.config.documents.plain_data import KeyPath

# What reaches a shell, a unit, apt, docker's ``--mount`` or nginx is a plain word there: nothing
# that ends a line, begins an option, or separates one value from the next. Matched as a whole: a
# ``$`` in these patterns is the end of the text, not a newline before it
# (documents/schema_check.py).


_PART = r"(?!\.{1,2}(/|$))[A-Za-z0-9._+@-]+"
FOLDER = form(
    rf"^(/{_PART})+$",
    "an absolute path of letters, digits and . _ + @ - between its slashes", "/data/models",
)  # fmt: skip
"""A folder on a host: in unit files, ``--mount`` and shells, so no blank, comma, colon or ``%``."""
GLOB = form(
    r"^(/(?!\.{1,2}(/|$))[A-Za-z0-9._+@*?\[\]-]+)+$",
    "an absolute path without blanks; * and ? stand for more", "/home/*/.cache/huggingface/hub",
)  # fmt: skip
"""The same with the wildcards of a shell."""
BELOW = form(
    rf"^{_PART}(/{_PART})*$",
    "a relative path that does not lead upwards", "locks/spark.lock.yml",
)  # fmt: skip
"""A file below a folder of the controller: neither absolute nor upwards."""
PACKAGE = form(
    r"^[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?$",
    "one package as apt names it, with =VERSION if you like", "docker-ce=5:28.5.1-1",
)  # fmt: skip
"""A package of apt, with architecture or version; no option, no file."""
SUITE = form(
    r"^(\./|[A-Za-z0-9][A-Za-z0-9._/-]*)$", "one word, or ./ for a flat repository", "noble"
)
COMPONENT = form(r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", "one word", "main")
URL = form(
    r"^https?://(?![^/]*@)[A-Za-z0-9\[]([A-Za-z0-9._~:/?%&=+@,\[\]-]*[A-Za-z0-9._~%&=+@,\]-])?$",
    "http:// or https:// and a host, without a login, blanks, or a slash at the end",
    "https://hub.example/mirror",
)
"""No login: it stands in jobs, locks and lists of apt, which everybody on a host may read."""
INTERFACE = form(
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$", "one interface, as `ip link` names it", "enp1s0f0np0"
)
"""A network interface, in shells and in netplan's file."""
CONTAINER = form(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", "the name that `docker ps` shows", "ollama")
LOGIN = form(r"^[A-Za-z_][A-Za-z0-9_.@-]*\$?$", "the name that one logs in with, alone", "spark")
ADDRESS = form(
    r"^[A-Za-z0-9\[:][A-Za-z0-9._:%\]-]*$",
    "a host's name or address, without a user and without blanks", "192.168.1.20",
)  # fmt: skip
FROM = form(
    r"^[A-Za-z0-9*?:][A-Za-z0-9.:*?/_-]*$",
    "one address, network or name a line; * and ? stand for more", "192.168.1.0/24",
)  # fmt: skip
"""An address, network or name of ``from=`` in authorized_keys; no ``!``, comma or quote."""

IP_ADDRESS = form("^[0-9a-fA-F.:]+$", "an IP address, no name", "192.168.100.11")
IMAGE = form(
    "^[a-z0-9][A-Za-z0-9._/:@-]*$", "an image as `docker pull` takes it", "vllm/vllm-openai:v0.11.0"
)
IMAGE_ROLE = form("^[a-z][a-z0-9_]*$", "a name of small letters, digits and _", "engine")
RAIL_NAME = form("^[a-z0-9-]+$", "the rule as the error named it", "turboquant-with-drafts")

Packages = tuple[Annotated[str, about(**PACKAGE)], ...]

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


class Broken(NamedTuple):
    """One broken rule: about which key, what is wrong, how to fix it.

    ``set_by`` is the key whose file is named, where that is not the key itself.
    """

    key: KeyPath
    what: str
    fix: str
    set_by: KeyPath | None = None


def broken_in_sections(settings: Any) -> Iterator[Broken]:
    """Yield every broken rule that stands in a section, with the keys seen from the top."""
    for field in dataclasses.fields(settings):
        section = getattr(settings, field.name)
        if hasattr(section, "broken"):
            for one in section.broken():
                set_by = None if one.set_by is None else (field.name, *one.set_by)
                yield one._replace(key=(field.name, *one.key), set_by=set_by)
