"""One shell script, many answers: `== name` markers split its output again.

Every fact command costs one SSH round trip, so a role asks everything in one script. Scripts are
POSIX sh, print sections and always exit 0: a tool that is missing or fails is an answer too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from pyinfra.api.exceptions import FactProcessError
from spark_contract.host.units import SERVE

Sections = Mapping[str, Sequence[str]]

# Which of our engines are up, as a section of a script.
SERVING = (
    "echo '== serving'\n"
    "systemctl list-units --plain --no-legend --state=active,activating "
    f"'{SERVE.of('*')}' | cut -d' ' -f1"
)
MARKER = "== "


def split(output: Iterable[str]) -> dict[str, list[str]]:
    """Group the lines of a script by the marker above them; lines before any are dropped."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in output:
        if line.startswith(MARKER):
            current = sections.setdefault(line.removeprefix(MARKER).strip(), [])
        elif current is not None:
            current.append(line)
    return sections


def whole(output: Iterable[str]) -> dict[str, list[str]]:
    """Split the output of a ``script``.

    Raises:
        FactProcessError: it did not reach its end, so nothing here can be trusted.
    """
    sections = split(output)
    if "end" not in sections:
        raise FactProcessError("the answer of the host was cut off; run again")
    return sections


def first(sections: Sections, name: str) -> str:
    """Return the first line of a section, without blanks around it; "" when there is none."""
    return next(iter(sections.get(name, ())), "").strip()


def script(*parts: str, beside: Sequence[str] = ()) -> str:
    """Join snippets into one script that prints English, never fails and marks its end.

    Args:
        parts: snippets, one after the other.
        beside: others, that run at the same time; their answers come last.
    """
    lines = ["LC_ALL=C; export LC_ALL", *(part.strip() for part in parts)]
    end = f"echo '{MARKER}end'"
    if beside:
        # The end is marked by the side that is read last: it comes only when both have come to it.
        others = (part.strip() for part in beside)
        lines = [lines[0], "{", *others, end, "} | {", *lines[1:], "cat", "}"]
        end = ":"
    return "\n".join([*lines, f"{end}; exit 0"])


def as_root(text: str) -> str:
    """Wrap a script so that it runs as root when sudo needs no password, and says which it was.

    The command must be run without pyinfra's own sudo: where sudo asks for a password, pyinfra
    would stop and prompt, and we want to report that host and go on.
    """
    # sudo itself says whether it works: asking it before would be one more session of PAM.
    # -k: at this machine a password typed minutes ago would pass for a rule.
    quoted, as_sudo = shlex.quote(text), shlex.quote(f"echo yes\n{text}")
    return (
        "exec 2>/dev/null; echo '== sudo'; "
        f'if [ "$(id -u)" = 0 ]; then echo root; sh -c {quoted}; '
        f"elif sudo -k -n sh -c {as_sudo} || sudo -k -n true; then :; "
        f"else echo no; id -un; sh -c {quoted}; fi; exit 0"
    )


def key_values(lines: Iterable[str]) -> dict[str, str]:
    """Read `KEY=value` lines with optional double quotes; the last of equal keys counts."""
    values: dict[str, str] = {}
    for line in lines:
        key, found, value = line.partition("=")
        if found and not key.startswith("#"):
            values[key.strip()] = value.strip().strip('"')
    return values
