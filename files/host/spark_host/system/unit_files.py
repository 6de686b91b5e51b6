"""Files that change our systemd units, but were not written by a deploy."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from spark_contract.paths import Paths
from spark_contract.units import JOB, PREPARE, SERVE, UNITS_DIR, WATCH

# systemd.unit(5), by priority; packages write only below /usr/lib.
_SEARCHED = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system.attached",
    "/run/systemd/system.attached",
    UNITS_DIR,
    "/run/systemd/system",
    "/run/systemd/generator",
    "/run/systemd/generator.late",
    "/usr/local/lib/systemd/system",
)
_UNIT = r"spark-(?:daily|gateway|hours|job|prepare|return|serve|share|switch|watch)"
_UNIT_FILE = re.compile(rf"{_UNIT}(?:@[^/]*)?\.(?:service|timer|target)\Z")
# Drop-ins of a unit, of its template, of units with the same prefix, and of all units of a type.
_DROP_IN_DIR = re.compile(
    rf"(?:{_UNIT}(?:@[^/]*)?\.|spark-\.|)(?:service|timer|target)\.d\Z"
)  # fmt: skip
_OUR_DROP_IN = re.compile(
    rf"(?:{SERVE.name}|{WATCH.name})@[^/]+\.service\.d/50-(?:release|cluster)\.conf\Z"
    rf"|{JOB.name}@[^/]+\.service\.d/order\.conf\Z"
    rf"|{PREPARE.name}@[^/]+\.target\.d/[0-9a-f]{{12}}\.conf\Z"
)


def overrides(paths: Paths) -> tuple[str, ...]:
    """Return the drop-ins, masks and unit files that change our units and are not ours."""
    return tuple(
        sorted(path for directory in _SEARCHED for path in _overrides_in(directory, paths))
    )


def _overrides_in(directory: str, paths: Paths) -> Iterator[str]:
    try:
        names = os.listdir(paths.below(directory))
    except FileNotFoundError:
        return
    for name in names:
        path = paths.below(directory) / name
        if _UNIT_FILE.match(name):
            # Our units are templates and single units; an instance would replace its template.
            instance = re.search("@[^.]", name) and not name.startswith("spark-hours@")
            if directory != UNITS_DIR or instance or path.is_symlink():
                yield f"{directory}/{name}"
        elif _DROP_IN_DIR.match(name):
            with contextlib.suppress(OSError):  # removed meanwhile, or no folder
                for entry in os.listdir(path):
                    ours = directory == UNITS_DIR and _OUR_DROP_IN.match(f"{name}/{entry}")
                    if entry.endswith(".conf") and (not ours or (path / entry).is_symlink()):
                        yield f"{directory}/{name}/{entry}"
