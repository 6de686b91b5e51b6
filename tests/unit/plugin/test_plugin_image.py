"""The image's recipe: what its labels say is true, and nothing is installed beside the engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from spark_vllm import SUPPORTED_ENGINES

IMAGE = Path(__file__).parents[3] / "files" / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()


def test_labels_name_the_base_the_plugin_and_the_engines_it_was_checked_with() -> None:
    labels = dict(re.findall(r'(spark\.\w+)="([^"]*)"', DOCKERFILE))
    version = re.search(r'^version = "(.*)"$', (IMAGE / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert labels == {
        "spark.base": "${BASE}",
        "spark.plugin": version[1],
        "spark.engines": " ".join(SUPPORTED_ENGINES),
    }


def test_the_check_of_what_was_installed_is_the_last_step_of_the_build() -> None:
    assert DOCKERFILE.rstrip().endswith("RUN cd / && python3 -m spark_vllm.check")
    assert DOCKERFILE.count("--no-deps") == 2


def test_the_check_says_that_the_engine_is_missing_where_nothing_of_it_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "spark_vllm.check"],  # no packages: not even PyYAML
        env={**os.environ, "PYTHONPATH": str(IMAGE)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("error: vllm: not installed for this Python; fix: ")
