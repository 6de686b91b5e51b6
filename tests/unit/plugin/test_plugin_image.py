import os
import re
import subprocess
import sys
from pathlib import Path

from spark_vllm import SUPPORTED_ENGINES

IMAGE = Path(__file__).parents[3] / "files" / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()


def test_image_labels_list_base_plugin_and_supported_engines():
    labels = dict(re.findall(r'(spark\.\w+)="([^"]*)"', DOCKERFILE))
    version = re.search(r'^version = "(.*)"$', (IMAGE / "pyproject.toml").read_text(), re.M)
    assert labels == {
        "spark.base": "${BASE}",
        "spark.plugin": version[1],
        "spark.engines": " ".join(SUPPORTED_ENGINES),
    }


def test_image_build_ends_with_the_plugin_check():
    assert DOCKERFILE.rstrip().endswith("RUN cd / && python3 -m spark_vllm.check")
    assert DOCKERFILE.count("--no-deps") == 2


def test_plugin_check_reports_a_missing_engine():
    done = subprocess.run(
        [sys.executable, "-S", "-m", "spark_vllm.check"],  # no packages: not even PyYAML
        env={**os.environ, "PYTHONPATH": str(IMAGE)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("error: vllm is not installed for this Python; fix: ")
