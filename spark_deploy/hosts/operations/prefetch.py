"""Ask a host side by side what the roles of a run will each ask it.

Roles say at the top of a deploy what they are going to read. A host that fits is then asked all of
it at once, over one connection, instead of once per role; answers are remembered as any others are,
for a few seconds and until a command ran on the host.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from gevent.pool import Pool
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.context import host, state

from spark_deploy.hosts.facts.fact_cache import keep
from spark_deploy.hosts.operations.commands import run

_AT_ONCE = 8  # sshd lets a connection have ten sessions, unless it is told otherwise


@dataclass(frozen=True, slots=True)
class _Question:
    fact: type[FactBase[Any]]
    arguments: Callable[[], Mapping[str, Any]]
    long: bool


_expected: WeakKeyDictionary[Host, dict[type[FactBase[Any]], _Question]] = WeakKeyDictionary()


def expect(
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
    _expected.setdefault(this, {})[fact] = _Question(fact, arguments, long)


def ask() -> None:
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
        pool.spawn(_ask, this, together)
    try:
        pool.join()
    finally:
        pool.kill(block=False)


def _ask(this: Host, questions: Sequence[_Question]) -> None:
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
                keep(this, fact, arguments, fact().process(answer) if answer else fact.default())
            answer = []
    except Exception:  # whatever it is, the host did not answer
        return
