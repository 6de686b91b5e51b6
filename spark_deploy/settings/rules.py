"""Rules between settings, which a schema cannot express: how sections state them.

A section that has some yields them from ``broken()``, beside the settings they are about; those
between sections stand in ``between.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from spark_deploy.documents.plain_data import KeyPath


class Broken(NamedTuple):
    """One broken rule: about which key, what is wrong, how to fix it.

    ``set_by`` is the key whose file is named, where that is not the key itself.
    """

    key: KeyPath
    what: str
    fix: str
    set_by: KeyPath | None = None


def broken_in_sections(settings: Any) -> Iterator[Broken]:
    """Yield every broken rule that stands in a section, with the keys seen from the top."""
    for field in dataclasses.fields(settings):
        section = getattr(settings, field.name)
        if hasattr(section, "broken"):
            for one in section.broken():
                set_by = None if one.set_by is None else (field.name, *one.set_by)
                yield one._replace(key=(field.name, *one.key), set_by=set_by)
