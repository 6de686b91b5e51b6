"""Base classes for facts, a cache of their values, and parallel prefetching."""

import functools
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
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

# Parsers raise these on malformed output. A bug in a parser raises them too, so print the type.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class HostFact(FactBase[T]):
    """A fact whose malformed output fails only this host, not the run."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make ``process`` raise FactProcessError for malformed output."""
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
                message = f"{cls.__name__}: cannot read the host's output ({detail}); retry"
                raise FactProcessError(message) from error
            return value

        cls.process = process  # type: ignore[method-assign,assignment]


class LineFact(HostFact[str]):
    default = str

    def process(self, output: Iterable[str]) -> str:
        return next((line.strip() for line in output if line.strip()), "")


# Each fact costs an SSH round trip, so a role reads everything with a single script. Scripts are
# POSIX sh, print sections and exit 0.
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
    sections = Sections()
    current: list[str] | None = None
    for line in output:
        if line.startswith(MARKER):
            current = sections.setdefault(line.removeprefix(MARKER).strip(), [])
        elif current is not None:
            current.append(line)
    return sections


def parse_sections(output: Iterable[str]) -> Sections:
    """Split the output of ``build_script``. Raises FactProcessError if the output is incomplete."""
    sections = split_sections(output)
    if "end" not in sections:
        raise FactProcessError("the host's output was cut off; retry")
    return sections


def build_script(*parts: str, parallel: Sequence[str] = ()) -> str:
    """Join snippets into a script that prints English, never fails and marks its end.

    The ``parallel`` snippets run in sequence while ``parts`` run; their output comes last.
    """
    english = "LC_ALL=C; export LC_ALL"
    main = [part.strip() for part in parts]
    end = f"echo '{MARKER}end'"
    if not parallel:
        return "\n".join([english, *main, f"{end}; exit 0"])
    # `cat` prints the parallel output last, so its end marks the end of all output.
    background = [part.strip() for part in parallel]
    return "\n".join([english, "{", *background, end, "} | {", *main, "cat", "}", ":; exit 0"])


def as_root(script: str) -> str:
    """Wrap a script so that it runs as root if sudo needs no password.

    Section ``sudo`` of the output says whether it ran as root. Run the result without pyinfra's
    sudo, which would stop at a password prompt.
    """
    # -k: ignore a recently typed password. A separate test of sudo would cost another PAM session.
    quoted = shlex.quote(script)
    quoted_with_report = shlex.quote(f"echo yes\n{script}")
    return (
        "exec 2>/dev/null; echo '== sudo'; "
        f'if [ "$(id -u)" = 0 ]; then echo root; sh -c {quoted}; '
        f"elif sudo -k -n sh -c {quoted_with_report} || sudo -k -n true; then :; "
        f"else echo no; id -un; sh -c {quoted}; fi; exit 0"
    )


def parse_key_values(lines: Iterable[str]) -> dict[str, str]:
    """Parse KEY=VALUE lines; values may be quoted, and the last value of a key wins."""
    values: dict[str, str] = {}
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and not key.startswith("#"):
            values[key.strip()] = value.strip().strip('"')
    return values


def parse_document(kind: type[T], text: str) -> T | None:
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
        modes_and_owners: dict[str, tuple[int, str]] = {}
        hashes: dict[str, str] = {}
        for line in output:
            if line.startswith("stat "):
                kind, mode, owner, path = line.removeprefix("stat ").split("|", 3)
                if kind.startswith("regular"):
                    modes_and_owners[path] = (int(mode, 8), owner)
            elif "  " in line:  # from sha256sum
                digest, path = line.split("  ", 1)
                hashes[path] = digest
        return {
            path: FileState(mode, owner, hashes[path])
            for path, (mode, owner) in modes_and_owners.items()
            if path in hashes
        }


# Other projects have units such as "spark-vllm.service".
_MANAGED_UNITS = re.compile(
    r"/spark-(serve|switch|watch|gateway|return|job|share)(@|\\x40)|/spark-(daily|on-request)\.service"
)


def container_id(cgroup: str) -> str:
    """Return the id of the container that a cgroup (v1 or v2) belongs to; "" if there is none."""
    match = re.search(SHA256, cgroup)
    return match[0] if match else ""


def is_managed(cgroup: str) -> bool:
    return bool(_MANAGED_UNITS.search(cgroup))


# pyinfra runs a command for every ``get_fact``, and a role reads the same fact often. A cached
# value is valid until a command runs on the host. Values from the prepare stage also expire after
# some seconds, because the user may take long to confirm.
MAX_AGE_S = 10.0
_PREFETCHED = "prefetched"
_Key = tuple[Any, ...]  # stage, fact, arguments


class _CachedValue(NamedTuple):
    commands_before: int  # run on the host before the value was read
    read_at_s: float
    value: Any


_cache: WeakKeyDictionary[Host, dict[_Key, _CachedValue]] = WeakKeyDictionary()


class FactUnavailableError(Exception):
    """The state of the host cannot be read, so it is unknown."""


def _arguments_key(arguments: Mapping[str, Any]) -> _Key:
    return tuple(sorted(arguments.items()))


def read_fact(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Return a fact, from the cache if it is still valid. Raises FactUnavailableError."""
    current = current_host()
    cache = _cache.setdefault(current, {})
    key = (fact, _arguments_key(arguments))
    cached = cache.get((state.current_stage, *key))
    if cached is None:  # use a recent value from an earlier stage
        oldest_s = time.monotonic() - MAX_AGE_S
        for stage in (_PREFETCHED, StateStage.Prepare):
            candidate = cache.get((stage, *key))
            if candidate is not None and candidate.read_at_s >= oldest_s:
                cached = candidate
                break
    if cached is None or cached.commands_before != commands_executed(current):
        return read_fact_now(fact, **arguments)
    cache[(state.current_stage, *key)] = cached
    value: T = cached.value
    return value


def read_fact_now(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Read a fact from the host, ignoring cached values."""
    current = current_host()
    commands_before = commands_executed(current)
    value = host.get_fact(fact, **arguments)
    if value is None:
        raise FactUnavailableError(f"could not read the state of the host ({fact.__name__})")
    key = (state.current_stage, fact, _arguments_key(arguments))
    _cache.setdefault(current, {})[key] = _CachedValue(commands_before, time.monotonic(), value)
    return value


def run_fact(target: Host, fact: type[FactBase[T]], *, timeout_s: int, **arguments: Any) -> T:
    """Read a fact inside a command, where ``get_fact`` does not work."""
    value: T = fact().process(run(target, fact().command(**arguments), timeout_s=timeout_s))
    return value


def find_cached_value(fact: type[FactBase[T]]) -> T | None:
    """Return any valid cached value of a fact, whatever its arguments."""
    current = current_host()
    commands_now = commands_executed(current)
    for (stage, cached_fact, _), cached in _cache.get(current, {}).items():
        is_valid = stage == state.current_stage and cached.commands_before == commands_now
        if cached_fact is fact and is_valid:
            value: T = cached.value
            return value
    return None


def values_by_host(fact: type[FactBase[T]]) -> dict[str, T]:
    """Return the values that were read in this stage, by host name."""
    return {
        target.name: cached.value
        for target, cache in _cache.items()
        for (stage, cached_fact, _), cached in cache.items()
        if cached_fact is fact and stage == state.current_stage
    }


def commands_executed(target: Host) -> int:
    return sum(1 for data in state.ops[target].values() if data.operation_meta.executed)


# Roles declare their facts first; `prefetch` reads them in parallel over one connection.
_PARALLEL = 8  # sshd's default allows ten sessions per connection
_GetArguments = Callable[[], Mapping[str, Any]]
_expected: WeakKeyDictionary[Host, dict[type[FactBase[Any]], tuple[_GetArguments, bool]]] = (
    WeakKeyDictionary()
)


def expect_fact(
    fact: type[FactBase[Any]], get_arguments: _GetArguments = dict, *, slow: bool = False
) -> None:
    """Declare a fact to prefetch; ``get_arguments`` is called just before the fact is read.

    A ``slow`` fact is read with its own command; all others share one.
    """
    _expected.setdefault(current_host(), {})[fact] = (get_arguments, slow)


def prefetch() -> None:
    """Read the declared facts in the execute stage; operations retry facts that cannot be read."""
    if not state.is_executing:
        return
    current = current_host()
    expected = _expected.pop(current, {})
    groups = [[(fact, get)] for fact, (get, slow) in expected.items() if slow]
    if shared := [(fact, get) for fact, (get, slow) in expected.items() if not slow]:
        groups.append(shared)
    pool = Pool(_PARALLEL)
    for group in groups:
        pool.spawn(_fetch, current, group)
    try:
        pool.join()
    finally:
        pool.kill(block=False)


def _fetch(target: Host, group: Sequence[tuple[type[FactBase[Any]], _GetArguments]]) -> None:
    """Read several facts with a single script, and cache their values."""
    separator = secrets.token_hex()
    pending = [(fact, get_arguments()) for fact, get_arguments in group]
    script = "\n".join(
        f"(\n{fact().command(**arguments)}\n); printf '\\n{separator} %s\\n' $?"
        for fact, arguments in pending
    )
    output: list[str] = []
    try:
        for line in run(target, script):
            if not line.startswith(separator):
                output.append(line)
                continue
            fact, arguments = pending.pop(0)
            if output[-1:] == [""]:
                output.pop()
            if line == f"{separator} 0":
                value = fact().process(output) if output else fact.default()
                cached = _CachedValue(commands_executed(target), time.monotonic(), value)
                key = (_PREFETCHED, fact, _arguments_key(arguments))
                _cache.setdefault(target, {})[key] = cached
            output = []
    except Exception:  # the operation reads the fact again and reports the failure
        return
