"""The torn score is what the vendor's tool prints, whatever it complains of beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spark_deploy.hosts import gpu
from spark_deploy.hosts.facts import split_sections


@pytest.mark.parametrize("complaint", ["", "W: /etc/apt/sources.list.d/dgx.sources: no Release"])
def test_a_complaint_on_the_other_stream_does_not_hide_the_score(
    tmp_path: Path, complaint: str
) -> None:
    tool = tmp_path / "nvidia-spark-ota-check"
    tool.write_text(
        f'#!/bin/sh\necho "{complaint}" >&2\necho \'{{"name": "OTA2.2", "torn": 2.6}}\'\n'
    )
    tool.chmod(0o755)
    found = subprocess.run(
        ["sh", "-c", gpu.GPU_SCRIPT],
        capture_output=True, text=True, check=False, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert gpu.parse_gpu(split_sections(found.stdout.splitlines())).torn_score == 2.6
