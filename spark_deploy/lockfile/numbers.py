"""Numbers of a ``config.json`` that others wrote: used where they can be true, else refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_contract.documents import shown

from spark_deploy.errors import LockError

_LARGEST = 1 << 32
# Where configurations of models that take more than text keep those of the language model.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")


class Missing(Exception):  # noqa: N818 - nothing is wrong: a number is not there
    """A number that the cache depends on is not in the configuration."""


class Numbers:
    """A configuration, the language model's part first."""

    def __init__(self, where: str, config: Mapping[str, Any]) -> None:
        self.where = where
        inner: Mapping[str, Any] = next(
            (config[key] for key in _INNER if isinstance(config.get(key), dict)), {}
        )
        self._parts = (inner, config)

    def get(self, name: str) -> Any:
        """Return what is said under a name, whatever it is; null is not there."""
        return next((part[name] for part in self._parts if part.get(name) is not None), None)

    def outer(self, name: str) -> Any:
        """Return what the whole configuration says, past the language model's part."""
        return self._parts[1].get(name)

    def count(self, *names: str) -> int | None:
        """Return the first of the numbers that is there.

        Raises:
            LockError: It is no number that a model could have.
        """
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value < _LARGEST:
                what = f"{name} is {shown(value)}, which no model has"
                raise LockError.one(self.where, what, "choose another commit of the repository")
            return value
        return None

    def needed(self, *names: str) -> int:
        """Return the first of the numbers that is there; ``Missing`` when none is."""
        value = self.count(*names)
        if not value:
            raise Missing(f"config.json says no {names[0]}")
        return value

    def text(self, name: str) -> str:
        """Return a short word; empty when it is not there, or none."""
        value = self.get(name)
        fits = isinstance(value, str) and len(value) <= 100 and value.isprintable()
        return str(value) if fits else ""

    def words(self, name: str) -> tuple[str, ...]:
        """Return a list of words; empty when it is not there, or none."""
        value = self.get(name)
        return tuple(map(str, value)) if isinstance(value, list) and len(value) < 4096 else ()
