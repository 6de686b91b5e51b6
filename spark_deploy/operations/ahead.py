"""Ask a host side by side what the roles of a run will each ask it.

Roles say at the top of a deploy what they are going to read. A host that fits is then asked all of
it at once, over one connection, instead of once per role; answers are remembered as any others are,
for a few seconds and until a command ran on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from gevent.pool import Pool
from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.context import host, state

from spark_deploy.facts.memo import keep
from spark_deploy.operations.commands import run

_AT_ONCE = 8  # sshd lets a connection have ten sessions, unless it is told otherwise
_Arguments = Callable[[], Mapping[str, Any]]
_expected: WeakKeyDictionary[Host, dict[type[FactBase[Any]], _Arguments]] = WeakKeyDictionary()


def expect(fact: type[FactBase[Any]], arguments: _Arguments = dict) -> None:
    """Note a question that operations of this run will ask the current host.

    Args:
        fact: the question.
        arguments: says what exactly is asked, once all roles have said theirs.
    """
    this = state.inventory.get_host(host.name)
    _expected.setdefault(this, {})[fact] = arguments


def ask() -> None:
    """Ask the current host what was expected, where this is a run and no prediction.

    What cannot be answered now is left to who needs it: that one asks again, and says what is
    wrong.
    """
    if not state.is_executing:
        return
    this = state.inventory.get_host(host.name)
    pool = Pool(_AT_ONCE)
    for fact, arguments in _expected.pop(this, {}).items():
        pool.spawn(_ask, this, fact, arguments())
    try:
        pool.join()
    finally:
        pool.kill(block=False)


def _ask(this: Host, fact: type[FactBase[Any]], arguments: Mapping[str, Any]) -> None:
    try:
        lines = run(this, StringCommand(fact().command(**arguments)))
        keep(this, fact, arguments, fact().process(lines) if lines else fact.default())
    except Exception:  # whatever it is, the host did not answer
        return
