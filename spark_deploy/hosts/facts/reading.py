"""What hosts say is read here, or it is one error about that host.

A broken or hostile host may print anything: whatever a parser does not expect ends the look at that
host, never the run of the others with a traceback.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase
from spark_contract.units import SERVE

from spark_deploy.plan.managed_files import FileState

T = TypeVar("T")

# Of text, JSON and numbers that are not what was asked for; defects of ours look the same, and are
# told with their type.
_NOT_UNDERSTOOD = (
    *(ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)


class HostFact(FactBase[T]):
    """A fact whose parser may trust nothing."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Have what the parser stumbles over told as an error of the host."""
        super().__init_subclass__(**keywords)
        parse = cls.__dict__.get("process")
        if parse is None:
            return

        @functools.wraps(parse)
        def process(self: HostFact[T], output: Iterable[str]) -> T:
            try:
                found: T = parse(self, output)
            except _NOT_UNDERSTOOD as error:
                what = f"{type(error).__name__}: {str(error)[:200]!r}"
                text = f"{cls.__name__}: the answer of the host cannot be read ({what}); run again"
                raise FactProcessError(text) from error
            return found

        cls.process = process  # type: ignore[method-assign,assignment]


# Every fact command costs one SSH round trip, so a role asks everything in one script. Scripts
# are POSIX sh, print sections and always exit 0: a tool that is missing or fails is an answer
# too.


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


class FileStates(HostFact[dict[str, FileState]]):
    """Mode, owner and sha256 of each regular file among ``paths``; others are left out.

    Two processes whatever the number of files (GNU coreutils' ``stat`` and ``sha256sum``).
    """

    default = dict

    def command(self, paths: Sequence[str]) -> str:
        names = " ".join(shlex.quote(path) for path in paths)
        return (
            f"LC_ALL=C stat -c 'stat %F|%a|%U:%G|%n' -- {names} 2>/dev/null; "
            f"LC_ALL=C sha256sum -- {names} 2>/dev/null; true"
        )

    def process(self, output: Iterable[str]) -> dict[str, FileState]:
        modes: dict[str, tuple[int, str]] = {}
        hashes: dict[str, str] = {}
        for line in output:
            if line.startswith("stat "):
                kind, mode, owner, path = line[5:].split("|", 3)
                if kind.startswith("regular"):
                    modes[path] = (int(mode, 8), owner)
            elif "  " in line:
                digest, path = line.split("  ", 1)
                hashes[path] = digest
        return {
            path: FileState(mode, owner, hashes[path])
            for path, (mode, owner) in modes.items()
            if path in hashes
        }
