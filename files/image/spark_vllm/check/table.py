"""Everything of vLLM that the plugin relies on, one row each."""

from __future__ import annotations

from spark_vllm.check import rows_attention, rows_head, rows_model, rows_quant
from spark_vllm.check.row import Row
from spark_vllm.check.sources import Sources

TABLE: tuple[Row, ...] = (
    *rows_quant.ROWS,
    *rows_model.ROWS,
    *rows_attention.ROWS,
    *rows_head.ROWS,
)


def rows_for(version: str) -> list[Row]:
    """Return the rows that hold for engine ``version``."""
    return [row for row in TABLE if version in row.versions]


def table_problems(sources: Sources, version: str) -> list[str]:
    """Return everything in ``sources`` that is not as the table says."""
    return [problem for row in rows_for(version) for problem in row.problems(sources)]
