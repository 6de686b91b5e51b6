"""What hosts say is read here, or it is one error about that host.

A broken or hostile host may print anything: whatever a parser does not expect ends the look at that
host, never the run of the others with a traceback.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase

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
