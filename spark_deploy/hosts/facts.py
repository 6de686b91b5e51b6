"""Base classes of facts, a cache of values, and prefetch."""

import functools
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from gevent.pool import Pool
from pyinfra import host, state
from pyinfra.api import FactBase, FactProcessError, Host
from pyinfra.api.state import StateStage
from spark_contract import documents
from spark_contract.units import SERVE, SHA256

from spark_deploy.hosts.commands import current_host, run
from spark_deploy.plan.types import FileState

T = TypeVar("T")

# Raised by parsers on malformed output. Our defects look the same, so the type is printed.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class HostFact(FactBase[T]):
    """A fact that fails only this host if the output is malformed."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        parse = cls.__dict__.get("process")
        if parse is None:
            return

        @functools.wraps(parse)
        def process(self: HostFact[T], output: Iterable[str]) -> T:
            try:
                value: T = parse(self, output)
            except _MALFORMED as error:
                detail = f"{type(error).__name__}: {str(error)[:200]!r}"
                message = f"{cls.__name__}: cannot read the host's output ({detail}); run again"
                raise FactProcessError(message) from error
            return value

        cls.process = process  # type: ignore[method-assign,assignment]


class LineFact(HostFact[str]):
    """The first non-blank line, stripped; "" if there is none."""

    default = str

    def process(self, output: Iterable[str]) -> str:
        return next((line.strip() for line in output if line.strip()), "")


# A fact costs an SSH round trip, so a role reads everything with a single script. Scripts are POSIX
# sh, print sections and exit 0: a missing tool is a result too.
MARKER = "== "

SERVING_SCRIPT = (
    "echo '== serving'\n"
    "systemctl list-units --plain --no-legend --state=active,activating "
    f"'{SERVE.unit('*')}' | cut -d' ' -f1"
)


class Sections(dict[str, list[str]]):
    """Lines of output by section; a missing section is empty."""

    def __missing__(self, name: str) -> list[str]:
        return []

    def first(self, name: str) -> str:
        return next(iter(self[name]), "").strip()

    def text(self, name: str) -> str:
        return "\n".join(self[name])


def split_sections(output: Iterable[str]) -> Sections:
    """Group lines by the marker above them; drop lines before the first."""
    sections = Sections()
    current: list[str] | None = None
    for line in output:
        if line.startswith(MARKER):
            current = sections.setdefault(line.removeprefix(MARKER).strip(), [])
        elif current is not None:
            current.append(line)
    return sections


def parse_sections(output: Iterable[str]) -> Sections:
    """Raises FactProcessError if the end of ``build_script`` is missing."""
    sections = split_sections(output)
    if "end" not in sections:
        raise FactProcessError("the host's output was cut off; run again")
    return sections


def build_script(*parts: str, parallel: Sequence[str] = ()) -> str:
    """Join snippets into a script that prints English, never fails and marks the end.

    ``parallel`` snippets run at the same time, in order; their output comes last.
    """
    lines = ["LC_ALL=C; export LC_ALL", *(part.strip() for part in parts)]
    end = f"echo '{MARKER}end'"
    if parallel:
        # Read last, so it marks the end of both.
        others = (part.strip() for part in parallel)
        lines = [lines[0], "{", *others, end, "} | {", *lines[1:], "cat", "}"]
        end = ":"
    return "\n".join([*lines, f"{end}; exit 0"])


def as_root(script: str) -> str:
    """Run a script as root if sudo needs no password; section ``sudo`` is the outcome.

    Run it without pyinfra's sudo, which stops at a password prompt.
    """
    # Testing sudo separately would cost another PAM session. -k: ignore a password typed on this
    # machine minutes ago.
    quoted, with_sudo = shlex.quote(script), shlex.quote(f"echo yes\n{script}")
    return (
        "exec 2>/dev/null; echo '== sudo'; "
        f'if [ "$(id -u)" = 0 ]; then echo root; sh -c {quoted}; '
        f"elif sudo -k -n sh -c {with_sudo} || sudo -k -n true; then :; "
        f"else echo no; id -un; sh -c {quoted}; fi; exit 0"
    )


def parse_key_values(lines: Iterable[str]) -> dict[str, str]:
    """Values may be quoted; if a key is repeated, the last value wins."""
    values: dict[str, str] = {}
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and not key.startswith("#"):
            values[key.strip()] = value.strip().strip('"')
    return values


def parse_document(kind: type[T], text: str) -> T | None:
    """Return ``None`` if the document is absent or damaged."""
    try:
        return documents.parse(kind, text)
    except documents.DocumentError:
        return None


class FileStates(HostFact[dict[str, FileState]]):
    """Mode, owner and sha256 of regular files, by GNU stat and sha256sum."""

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


# Other projects have units such as "spark-vllm.service".
_MANAGED_UNITS = re.compile(
    r"/spark-(serve|switch|watch|gateway|return|job|share)(@|\\x40)|/spark-daily\.service"
)


def container_id(cgroup: str) -> str:
    """Cgroups v1 and v2, both drivers of docker."""
    match = re.search(SHA256, cgroup)
    return match[0] if match else ""


def is_managed(cgroup: str) -> bool:
    return bool(_MANAGED_UNITS.search(cgroup))


# pyinfra runs a command for every ``get_fact``, and a role reads the same fact often. A value is
# dropped after a command on the host, or some seconds after the prepare stage: the user may have
# to confirm first.
MAX_AGE_S = 10.0
_PREFETCHED = "prefetched"
_Key = tuple[Any, ...]
# (stage, fact, arguments) -> commands run before, time, value
_answers: WeakKeyDictionary[Host, dict[_Key, tuple[int, float, Any]]] = WeakKeyDictionary()


class FactUnavailableError(Exception):
    """Unreadable, which must never count as "absent"."""


def _arguments_key(arguments: Mapping[str, Any]) -> _Key:
    return tuple(sorted(arguments.items()))


def read_fact(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Return ``fact``, from the cache while valid. Raises FactUnavailableError."""
    current = current_host()
    answers = _answers.setdefault(current, {})
    key = (fact, _arguments_key(arguments))
    now = (state.current_stage, *key)
    cached = answers.get(now)
    if cached is None:  # prefetched, or read in the prepare stage
        oldest = time.monotonic() - MAX_AGE_S
        older = (answers.get((stage, *key)) for stage in (_PREFETCHED, StateStage.Prepare))
        cached = next((answer for answer in older if answer and answer[1] >= oldest), None)
    if cached is not None and cached[0] == commands_executed(current):
        answers[now] = cached
        value: T = cached[2]
        return value
    return read_fact_now(fact, **arguments)


def read_fact_now(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Return ``fact`` read now, where an older value proves nothing."""
    current = current_host()
    executed = commands_executed(current)
    value = host.get_fact(fact, **arguments)
    if value is None:
        raise FactUnavailableError(f"could not read the state of the host ({fact.__name__})")
    key = (state.current_stage, fact, _arguments_key(arguments))
    _answers.setdefault(current, {})[key] = (executed, time.monotonic(), value)
    return value


def run_fact(on: Host, fact: type[FactBase[T]], *, timeout_s: int, **arguments: Any) -> T:
    """Read a fact inside a command; there ``get_fact`` does not work."""
    value: T = fact().process(run(on, fact().command(**arguments), timeout_s=timeout_s))
    return value


def find_cached_value(fact: type[FactBase[T]]) -> T | None:
    """Return a valid cached value for any arguments."""
    current = current_host()
    executed = commands_executed(current)
    for (stage, cached_fact, _), (before, _at, answer) in _answers.get(current, {}).items():
        if (cached_fact, stage, before) == (fact, state.current_stage, executed):
            value: T = answer
            return value
    return None


def values_by_host(fact: type[FactBase[T]]) -> dict[str, T]:
    """Return values read so far in this stage, by host name."""
    return {
        answered.name: value
        for answered, answers in _answers.items()
        for (stage, cached_fact, _), (*_, value) in answers.items()
        if cached_fact is fact and stage == state.current_stage
    }


def commands_executed(on: Host) -> int:
    """Count operations that ran a command on this host."""
    return sum(1 for data in state.ops[on].values() if data.operation_meta.executed)


# Roles declare facts first; `prefetch` reads them in parallel over a single connection.
_PARALLEL = 8  # sshd's default allows ten sessions per connection
_Arguments = Callable[[], Mapping[str, Any]]
_expected: WeakKeyDictionary[Host, dict[type[FactBase[Any]], tuple[_Arguments, bool]]] = (
    WeakKeyDictionary()
)


def expect_fact(
    fact: type[FactBase[Any]], arguments: _Arguments = dict, *, slow: bool = False
) -> None:
    """Declare a fact to prefetch; ``arguments`` is called then.

    A ``slow`` fact gets a separate command.
    """
    _expected.setdefault(current_host(), {})[fact] = (arguments, slow)


def prefetch() -> None:
    """Read declared facts while executing; failed facts are read again later."""
    if not state.is_executing:
        return
    current = current_host()
    expected = _expected.pop(current, {})
    shared = [(fact, arguments) for fact, (arguments, slow) in expected.items() if not slow]
    groups = [[(fact, arguments)] for fact, (arguments, slow) in expected.items() if slow]
    pool = Pool(_PARALLEL)
    for group in (*groups, *([shared] if shared else ())):
        pool.spawn(_fetch, current, group)
    try:
        pool.join()
    finally:
        pool.kill(block=False)


def _fetch(current: Host, group: Sequence[tuple[type[FactBase[Any]], _Arguments]]) -> None:
    """Read facts with a single command; a random line follows each output."""
    mark = secrets.token_hex()
    pending = [(fact, arguments()) for fact, arguments in group]
    script = "\n".join(
        f"(\n{fact().command(**arguments)}\n); printf '\\n{mark} %s\\n' $?"
        for fact, arguments in pending
    )
    output: list[str] = []
    try:
        for line in run(current, script):
            if not line.startswith(mark):
                output.append(line)
                continue
            fact, arguments = pending.pop(0)
            if output[-1:] == [""]:
                output.pop()
            if line == f"{mark} 0":
                value = fact().process(output) if output else fact.default()
                answer = (commands_executed(current), time.monotonic(), value)
                key = (_PREFETCHED, fact, _arguments_key(arguments))
                _answers.setdefault(current, {})[key] = answer
            output = []
    except Exception:  # the operation reads it again and reports the failure
        return
