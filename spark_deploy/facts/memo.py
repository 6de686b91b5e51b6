"""Read a fact once for several operations, as long as nothing has happened on the host.

pyinfra runs one SSH command for every ``get_fact``. The operations of a role mostly ask the same
question, and on a run that changes nothing the answer stays true. A remembered answer is dropped
as soon as any operation has executed a command on that host, and never crosses from the prepare
stage (which only predicts) to the execute stage.
"""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.context import host, state

T = TypeVar("T")

_Key = tuple[Any, ...]
_answers: WeakKeyDictionary[Host, dict[_Key, tuple[int, Any]]] = WeakKeyDictionary()


class FactUnavailable(Exception):  # noqa: N818 - reads better at the call site
    """A fact could not be read; "could not tell" must never be taken for "absent"."""


def read(fact: type[FactBase[T]], **arguments: Any) -> T:
    """Return ``fact`` of the current host, from memory when nothing happened since.

    Raises:
        FactUnavailable: the command failed, so there is no state to decide from.
    """
    current = state.inventory.get_host(host.name)  # `host` itself is a proxy, the same for all
    key = (state.current_stage, fact, tuple(sorted(arguments.items())))
    done = commands_executed(current)
    answers = _answers.setdefault(current, {})
    if key in answers and answers[key][0] == done:
        remembered: T = answers[key][1]
        return remembered
    value = host.get_fact(fact, **arguments)
    if value is None:
        raise FactUnavailable(f"could not read the state of the host ({fact.__name__})")
    answers[key] = (done, value)
    return value


def remembered(fact: type[FactBase[T]]) -> T | None:
    """Return an answer to any question of this fact that is still true; ``None``: ask for one."""
    current = state.inventory.get_host(host.name)
    done = commands_executed(current)
    for (stage, asked, _), (when, value) in _answers.get(current, {}).items():
        if asked is fact and stage == state.current_stage and when == done:
            found: T = value
            return found
    return None


def answers_of(fact: type[FactBase[T]]) -> dict[str, T]:
    """Return what the hosts of this run have said so far in this stage, by name."""
    return {
        one.name: value
        for one, answers in _answers.items()
        for (stage, asked, _), (_, value) in answers.items()
        if asked is fact and stage == state.current_stage
    }


def commands_executed(on: Host) -> int:
    """Count the operations that ran a command on this host so far."""
    operations = state.ops[on].values()
    return sum(1 for data in operations if data.operation_meta.executed)
