"""Find files that change our systemd units, but were not written by a deploy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from spark_contract.units import HOURS, JOB, PREPARE, SERVE, UNITS_DIR, WATCH

_PACKAGED = "/usr/lib/systemd/system"
# systemd.unit(5), by priority
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
    _PACKAGED,
)
_UNIT = r"spark-(?:daily|gateway|hours|job|prepare|return|serve|share|switch|watch)"
# systemd-escape --path of /run/spark/engines/SERVICE
_MOUNT = r"run-spark-engines-[^/]+\.mount"
_UNIT_FILE = re.compile(rf"(?:{_UNIT}(?:@[^/]*)?\.(?:service|timer|target)|{_MOUNT})\Z")
# Drop-ins of a unit, of its template, of units with the same prefix, and of all units of a type.
_DROP_IN_DIR = re.compile(
    rf"(?:(?:(?:{_UNIT}|spark-)(?:@[^/]*)?\.)?(?:service|timer|target)"
    rf"|{_MOUNT}|(?:run-(?:spark-(?:engines-)?)?\.)?mount)\.d\Z"
)
_OUR_DROP_IN = re.compile(
    rf"(?:{SERVE.name}|{WATCH.name})@[^/]+\.service\.d/50-(?:release|cluster)\.conf\Z"
    rf"|{JOB.name}@[^/]+\.service\.d/order\.conf\Z"
    rf"|{PREPARE.name}@[^/]+\.target\.d/[0-9a-f]{{12}}\.conf\Z"
)


def list_command(root: str = "") -> str:
    directories = " ".join(shlex.quote(f"{root}{directory}") for directory in _SEARCHED)
    files = "-name 'spark-*' -o -name 'run-spark-*' -o -path '*.d/*.conf' -o -type l -name '*.d'"
    return (
        f"find {directories} -mindepth 1 -maxdepth 2 '(' {files} ')' "
        "-printf '%y %H/ %P\\n' 2>/dev/null || true"
    )


def find_overrides(lines: Iterable[str], root: str = "") -> tuple[str, ...]:
    """Return the drop-ins, masks and unit files that change our units and are not ours."""
    paths = []
    for line in lines:
        kind, _, path = line.partition(" ")
        directory, _, name = path.removeprefix(root).partition("/ ")
        if _is_override(directory, name, is_link=kind == "l"):
            paths.append(f"{directory}/{name}")
    return tuple(sorted(paths))


def _is_override(directory: str, name: str, *, is_link: bool) -> bool:
    folder, _, drop_in = name.partition("/")
    if drop_in.endswith(".conf") or (is_link and _DROP_IN_DIR.match(folder)):
        if not _DROP_IN_DIR.match(folder):
            return False
        # Packages may add drop-ins for all units.
        if directory == _PACKAGED and not folder.startswith(("spark-", "run-spark-")):
            return False
        return is_link or directory != UNITS_DIR or not _OUR_DROP_IN.match(name)
    if not _UNIT_FILE.match(name):
        return False
    # A unit file of an instance would replace one of our templates.
    is_instance = re.search("@[^.]", name) and not name.startswith(f"{HOURS.name}@")
    return is_link or directory != UNITS_DIR or bool(is_instance)
