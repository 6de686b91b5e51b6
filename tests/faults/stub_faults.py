"""All faults of the stub engine, read from its source code."""

import re

from tests.labkit import CHECKOUT

SOURCES = sorted((CHECKOUT / "lab" / "stub_engine").glob("*.c"))
_CALL = re.compile(r"\bfault\(([^)]*)\)")
_NAME = re.compile(r'"([a-z0-9-]+)"')
# A table of faults and the line that each prints, used as ``fault(ends[i].name)``.
_TABLE = re.compile(r"\bends\[\] = \{(.*?)\};", re.DOTALL)
_ROW = re.compile(r'\{"([a-z0-9-]+)",')
_NOT_A_NAME = ("const char *name", "ends[i].name")


def stub_faults() -> list[str]:
    names = set()
    for path in SOURCES:
        text = path.read_text()
        for argument in _CALL.findall(text):
            name = _NAME.fullmatch(argument)
            if name:
                names.add(name[1])
            elif argument not in _NOT_A_NAME:
                raise ValueError(f"{path.name}: fault({argument}): unknown form; extend {__name__}")
        for table in _TABLE.findall(text):
            names |= set(_ROW.findall(table))
    return sorted(names)
