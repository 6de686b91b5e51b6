"""Read a fact once for several operations, as long as nothing has happened on the host.

pyinfra runs one SSH command for every ``get_fact``. The operations of a role mostly ask the same
question, and on a run that changes nothing the answer stays true. A remembered answer is dropped
as soon as any operation has executed a command on that host. From the prepare stage (which only
predicts) it crosses to the execute stage while it is some seconds old: who thinks about a plan for
longer gets what the host says then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.context import host, state

T = TypeVar("T")

CROSSES_S = 10.0
_AHEAD = "ahead"  # in place of a stage
_Key = tuple[Any, ...]
# Of each question of a stage: after how many commands it was asked, when, and the answer.
_answers: WeakKeyDictionary[Host, dict[_Key, tuple[int, float, Any]]] = WeakKeyDictionary()


class FactUnavailable(Exception):  # noqa: N818 - reads better at the call site
    """A fact could not be read; "could not tell" must never be taken for "absent"."""


def read(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Return ``fact`` of the current host, from memory when nothing happened since.

    Raises:
        FactUnavailable: the command failed, so there is no state to decide from.
    """
    current = state.inventory.get_host(host.name)  # `host` itself is a proxy, the same for all
    question = (fact, tuple(sorted(arguments.items())))
    done = commands_executed(current)
    answers = _answers.setdefault(current, {})
    key = (state.current_stage, *question)
    known = answers.get(key) or _crossing(answers, question)
    if known is not None and known[0] == done:
        answers[key] = known
        remembered: T = known[2]
        return remembered
    return read_now(fact, **arguments)


def read_now(fact: type[FactBase[T]], **arguments: Any) -> T:
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


def keep(current: Host, fact: type[FactBase[T]], arguments: Mapping[str, Any], value: T) -> None:
    """Remember what a host was asked before anybody needed it."""
    key = (_AHEAD, fact, tuple(sorted(arguments.items())))
    known = (commands_executed(current), time.monotonic(), value)
    _answers.setdefault(current, {})[key] = known


def _crossing(
    answers: dict[_Key, tuple[int, float, Any]], question: _Key
) -> tuple[int, float, Any] | None:
    """Return an answer of the stage before, or one asked for ahead, that is young enough."""
    oldest = time.monotonic() - CROSSES_S
    before = (answers.get((stage, *question)) for stage in (_AHEAD, StateStage.Prepare))
    return next((known for known in before if known and known[1] >= oldest), None)


def remembered(fact: type[FactBase[T]]) -> T | None:
    """Return an answer to any question of this fact that is still true; ``None``: ask for one."""
    current = state.inventory.get_host(host.name)
    done = commands_executed(current)
    for (stage, asked, _), (when, _at, value) in _answers.get(current, {}).items():
        if asked is fact and stage == state.current_stage and when == done:
            found: T = value
            return found
    return None


def answers_of(fact: type[FactBase[T]]) -> dict[str, T]:
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
