"""Base class of our facts, the cache of answers, and the prefetch of facts over one connection."""

from __future__ import annotations

import functools
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from gevent.pool import Pool
from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.context import host, state
from spark_contract.units import SERVE, SHA256

from spark_deploy.hosts.commands import run
from spark_deploy.plan.managed_files import FileState

T = TypeVar("T")


# Of text, JSON and numbers that are not what was asked for; defects of ours look the same, and are
# told with their type.
_PARSE_ERRORS = (
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
            except _PARSE_ERRORS as error:
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
SERVING_SCRIPT = (
    "echo '== serving'\n"
    "systemctl list-units --plain --no-legend --state=active,activating "
    f"'{SERVE.of('*')}' | cut -d' ' -f1"
)


MARKER = "== "


def split_sections(output: Iterable[str]) -> dict[str, list[str]]:
    """Group the lines of a script by the marker above them; lines before any are dropped."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in output:
        if line.startswith(MARKER):
            current = sections.setdefault(line.removeprefix(MARKER).strip(), [])
        elif current is not None:
            current.append(line)
    return sections


def parse_sections(output: Iterable[str]) -> dict[str, list[str]]:
    """Split the output of a ``script``.

    Raises:
        FactProcessError: it did not reach its end, so nothing here can be trusted.
    """
    sections = split_sections(output)
    if "end" not in sections:
        raise FactProcessError("the answer of the host was cut off; run again")
    return sections


def first_line(sections: Sections, name: str) -> str:
    """Return the first line of a section, without blanks around it; "" when there is none."""
    return next(iter(sections.get(name, ())), "").strip()


def build_script(*parts: str, beside: Sequence[str] = ()) -> str:
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


def parse_key_values(lines: Iterable[str]) -> dict[str, str]:
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


# Others name units and containers after this machine, too: "spark-vllm.service" is not ours.
_MANAGED_UNITS = re.compile(
    r"/spark-(serve|switch|watch|gateway|return|job|share)(@|\\x40)|/spark-daily\.service"
)


def container_id(cgroup: str) -> str:
    """Find a container's id in a cgroup path (docker, cgroup v1 or v2, both drivers)."""
    found = re.search(SHA256, cgroup)
    return found.group(0) if found else ""


def is_managed(cgroup: str) -> bool:
    """Tell whether a cgroup path belongs to a unit of ours, by its template."""
    return bool(_MANAGED_UNITS.search(cgroup))


MAX_AGE_S = 10.0


_PREFETCHED = "ahead"  # in place of a stage


_Key = tuple[Any, ...]


# Of each question of a stage: after how many commands it was asked, when, and the answer.
_answers: WeakKeyDictionary[Host, dict[_Key, tuple[int, float, Any]]] = WeakKeyDictionary()


class FactUnavailable(Exception):  # noqa: N818 - reads better at the call site
    """A fact could not be read; "could not tell" must never be taken for "absent"."""


def read_fact(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Return ``fact`` of the current host, from memory when nothing happened since.

    Raises:
        FactUnavailable: the command failed, so there is no state to decide from.
    """
    current = state.inventory.get_host(host.name)  # `host` itself is a proxy, the same for all
    question = (fact, tuple(sorted(arguments.items())))
    done = commands_executed(current)
    answers = _answers.setdefault(current, {})
    key = (state.current_stage, *question)
    known = answers.get(key) or _recent_answer(answers, question)
    if known is not None and known[0] == done:
        answers[key] = known
        remembered: T = known[2]
        return remembered
    return read_fact_now(fact, **arguments)


def read_fact_now(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Return ``fact`` of the current host, asked now: where an older answer would prove nothing.

    Raises:
        FactUnavailable: the command failed, so there is no state to decide from.
    """
    current = state.inventory.get_host(host.name)
    done = commands_executed(current)
    value = host.get_fact(fact, **arguments)
    if value is None:
        raise FactUnavailable(f"could not read the state of the host ({fact.__name__})")
    key = (state.current_stage, fact, tuple(sorted(arguments.items())))
    _answers.setdefault(current, {})[key] = (done, time.monotonic(), value)
    return value


def remember_fact(
    current: Host, fact: type[FactBase[T]], arguments: Mapping[str, Any], value: T
) -> None:
    """Remember what a host was asked before anybody needed it."""
    key = (_PREFETCHED, fact, tuple(sorted(arguments.items())))
    known = (commands_executed(current), time.monotonic(), value)
    _answers.setdefault(current, {})[key] = known


def _recent_answer(
    answers: dict[_Key, tuple[int, float, Any]], question: _Key
) -> tuple[int, float, Any] | None:
    """Return an answer of the stage before, or one asked for ahead, that is young enough."""
    oldest = time.monotonic() - MAX_AGE_S
    before = (answers.get((stage, *question)) for stage in (_PREFETCHED, StateStage.Prepare))
    return next((known for known in before if known and known[1] >= oldest), None)


def find_answer(fact: type[FactBase[T]]) -> T | None:
    """Return an answer to any question of this fact that is still true; ``None``: ask for one."""
    current = state.inventory.get_host(host.name)
    done = commands_executed(current)
    for (stage, asked, _), (when, _at, value) in _answers.get(current, {}).items():
        if asked is fact and stage == state.current_stage and when == done:
            found: T = value
            return found
    return None


def answers_by_host(fact: type[FactBase[T]]) -> dict[str, T]:
    """Return what the hosts of this run have said so far in this stage, by name."""
    return {
        one.name: value
        for one, answers in _answers.items()
        for (stage, asked, _), (*_, value) in answers.items()
        if asked is fact and stage == state.current_stage
    }


def commands_executed(on: Host) -> int:
    """Count the operations that ran a command on this host so far."""
    operations = state.ops[on].values()
    return sum(1 for data in operations if data.operation_meta.executed)


_AT_ONCE = 8  # sshd lets a connection have ten sessions, unless it is told otherwise


@dataclass(frozen=True, slots=True)
class _Expected:
    fact: type[FactBase[Any]]
    arguments: Callable[[], Mapping[str, Any]]
    long: bool


_expected: WeakKeyDictionary[Host, dict[type[FactBase[Any]], _Expected]] = WeakKeyDictionary()


def expect_fact(
    fact: type[FactBase[Any]],
    arguments: Callable[[], Mapping[str, Any]] = dict,
    *,
    long: bool = False,
) -> None:
    """Note a question that operations of this run will ask the current host.

    Args:
        fact: the question.
        arguments: says what exactly is asked, once all roles have said theirs.
        long: the answer takes its time, so it gets a command of its own; others share one.
    """
    this = state.inventory.get_host(host.name)
    _expected.setdefault(this, {})[fact] = _Expected(fact, arguments, long)


def prefetch() -> None:
    """Ask the current host what was expected, where this is a run and no prediction.

    What cannot be answered now is left to who needs it: that one asks again, and says what is
    wrong.
    """
    if not state.is_executing:
        return
    this = state.inventory.get_host(host.name)
    asked = _expected.pop(this, {}).values()
    short = [one for one in asked if not one.long]
    pool = Pool(_AT_ONCE)
    for together in (*([one] for one in asked if one.long), *([short] if short else ())):
        pool.spawn(_fetch, this, together)
    try:
        pool.join()
    finally:
        pool.kill(block=False)


def _fetch(this: Host, questions: Sequence[_Expected]) -> None:
    """Ask several questions in one command; an answer ends with a line that nobody foresees."""
    mark = secrets.token_hex()
    given = [(one.fact, one.arguments()) for one in questions]
    script = "\n".join(
        f"(\n{fact().command(**arguments)}\n); printf '\\n{mark} %s\\n' $?"
        for fact, arguments in given
    )
    answer: list[str] = []
    try:
        for line in run(this, script):
            if not line.startswith(mark):
                answer.append(line)
                continue
            fact, arguments = given.pop(0)
            if answer[-1:] == [""]:  # ours, which ends a last line that was not ended
                answer.pop()
            if line == f"{mark} 0":
                remember_fact(
                    this, fact, arguments, fact().process(answer) if answer else fact.default()
                )
            answer = []
    except Exception:  # whatever it is, the host did not answer
        return
