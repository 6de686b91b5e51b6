"""Options of ``--additional-config`` for n-gram embedding tables, without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPTION, CACHE_OPTION = "ngram_table", "ngram_cache_mib"
_CACHE_MIB = 1024


@dataclass(frozen=True)
class TableOptions:
    directory: Path  # of the checkpoint
    cache_bytes: int


def read_table_options(additional: Any, directory: str | Path) -> TableOptions | None:
    """Return directory and cache size for tables in files, or None if tables are tensors."""
    spark = additional.get("spark", {}) if isinstance(additional, Mapping) else {}
    choice, cache_mib = spark.get(OPTION), spark.get(CACHE_OPTION, _CACHE_MIB)
    if choice not in (None, "file"):
        raise ValueError(
            f'--additional-config: spark.{OPTION}: {choice!r}, expected "file"; '
            'fix: use "file", or remove the option'
        )
    if not isinstance(cache_mib, int) or cache_mib < 1:
        raise ValueError(
            f"--additional-config: spark.{CACHE_OPTION}: {cache_mib!r}, expected a number of MiB "
            "from 1; fix: use such a number, or remove the option"
        )
    has_files = any(Path(directory).glob("ngram-table-*.bin"))
    if has_files != (choice == "file"):
        state = "has" if has_files else "lacks"
        raise ValueError(
            f"--additional-config: spark.{OPTION}: {choice!r}, but the checkpoint {state} "
            'ngram-table files; fix: use "file" if the checkpoint has them, and remove the option '
            "otherwise"
        )
    return TableOptions(Path(directory), cache_mib << 20) if choice else None
