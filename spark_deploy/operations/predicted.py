"""What earlier operations of a prediction will have done, so that later ones do not count it too.

A dry run executes nothing: two roles that need the same repository would both predict to add it,
while in the run only the first one does. Nothing here has any effect while executing.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from pyinfra.api.host import Host
from pyinfra.context import host, state

_predicted: WeakKeyDictionary[Host, set[str]] = WeakKeyDictionary()


def predict(thing: str) -> None:
    """Note that this operation would bring ``thing`` about."""
    if not state.is_executing:
        _of_current_host().add(thing)


def is_predicted(thing: str) -> bool:
    """Whether an earlier operation of this prediction would bring ``thing`` about."""
    return not state.is_executing and thing in _of_current_host()


def _of_current_host() -> set[str]:
    return _predicted.setdefault(state.inventory.get_host(host.name), set())
