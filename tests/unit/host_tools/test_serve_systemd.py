"""A timeout of systemd is not an empty answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_host.system import systemd


@pytest.fixture(autouse=True)
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("systemctl", "journalctl"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 30\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(systemd, "_LIMIT_S", 0.2)
    monkeypatch.setattr(systemd, "_JOURNAL_S", 0.2)


def test_timed_out_request_fails() -> None:
    said = systemd.systemctl("stop", "x.service", timeout_s=0.2)
    assert (said.returncode, said.stderr) == (124, "no answer within 0 s")


def test_timed_out_query_is_not_an_empty_answer() -> None:
    with pytest.raises(HostToolError, match="systemctl show: no answer"):
        systemd.state("x.service", "ActiveState")
    with pytest.raises(HostToolError, match="systemctl list-units: no answer"):
        systemd.listed("spark-serve@*.service")


def test_timed_out_journal_is_a_log_line() -> None:
    assert systemd.journal("", "x.service") == ["(journalctl gave no answer within 0 s)"]
