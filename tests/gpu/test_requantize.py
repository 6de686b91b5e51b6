"""AutoRound as `spark-deploy add --requantize` runs it, compared with plain rounding.

``SPARK_GPU_AUTOROUND`` names a folder with AutoRound, which follows the installed packages.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def _packages():
    named = os.environ.get("SPARK_GPU_AUTOROUND")
    if named:
        return Path(named).resolve()
    spec = importlib.util.find_spec("auto_round")  # importing it takes long, and changes logging
    if spec is None or spec.origin is None:
        pytest.skip("needs AutoRound: pip install auto-round, or SPARK_GPU_AUTOROUND=/folder")
    return Path(spec.origin).parents[1]


def test_tuned_weights_have_a_smaller_error_than_rounded_weights(tmp_path, results):
    packages = _packages()
    places = {"--packages": packages, "--work": tmp_path / "made", "--out": results}
    places["--work"].mkdir()
    subprocess.run(
        [sys.executable, "proofs/kernels/requantize.py"]
        + [str(word) for pair in places.items() for word in pair],
        cwd=CHECKOUT,
        check=True,
    )
    rows = json.loads((results / "requantize.json").read_text())["rows"]
    assert [row["passed"] for row in rows].count(True) > 1
    assert [row for row in rows if row["passed"] is False] == []
