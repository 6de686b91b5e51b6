"""The planned memory of running engines, read from their releases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from spark_deploy.hosts.survey import engine_memory_script


def test_each_running_engine_is_printed_with_the_need_of_its_release(tmp_path: Path) -> None:
    known, unknown = (f"spark-serve@{name}-0123456789ab.service" for name in ("main", "code"))
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho '{known} loaded active'\necho '{unknown} loaded active'")
    systemctl.chmod(0o755)
    release = tmp_path / "main-0123456789ab/release.json"
    release.parent.mkdir()
    release.write_text('{\n "memory": {\n  "wait_s": 60.0,\n  "needed_bytes": 123\n }\n}\n')
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", engine_memory_script(str(tmp_path))],
        env={"PATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["== engine-memory", f"{known} 123", f"{unknown} "]
