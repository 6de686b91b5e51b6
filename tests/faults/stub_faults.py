"""Every misbehaviour of the stub engine, read from its source, so that none can be forgotten."""

from __future__ import annotations

import re

from tests.labkit import CHECKOUT

SOURCES = sorted((CHECKOUT / "lab" / "stub_engine").glob("*.c"))
_ASKED = re.compile(r"\bfault\(([^)]*)\)")
_NAME = re.compile(r'"([a-z0-9-]+)"')
# A table of faults with the line each prints; asked for as ``fault(ends[i].name)``.
_TABLE = re.compile(r"\bends\[\] = \{(.*?)\};", re.DOTALL)
_ROW = re.compile(r'\{"([a-z0-9-]+)",')
_NOT_ASKED = ("const char *name", "ends[i].name")


def stub_faults() -> list[str]:
    """Return the names of all faults.

    Raises:
        ValueError: the source asks for a fault in a way that is not known here.
    """
    found = set()
    for path in SOURCES:
        text = path.read_text()
        for argument in _ASKED.findall(text):
            name = _NAME.fullmatch(argument)
            if name:
                found.add(name[1])
            elif argument not in _NOT_ASKED:
                raise ValueError(f"{path.name}: fault({argument}): teach {__name__} to read it")
        for table in _TABLE.findall(text):
            found |= set(_ROW.findall(table))
    return sorted(found)
