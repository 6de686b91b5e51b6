"""Packages are half installed while somebody installs them; that is no reason against a host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_deploy.hosts.survey import audit_script, parse_audit

HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); input()"
)
AUDIT = """#!/bin/sh
echo "The following packages are only half configured:"
echo " nginx    small web server"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of packages of which one is half installed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dpkg").write_text(AUDIT)
    (tmp_path / "bin/dpkg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for lock in ("lock", "lock-frontend"):
        (tmp_path / lock).touch()
    return tmp_path


def half_installed(folder: Path) -> tuple[str, ...]:
    said = subprocess.run(
        ["sh", "-c", audit_script(str(folder))], capture_output=True, text=True, check=False
    )
    assert said.stderr == ""
    return parse_audit(said.stdout.splitlines())


def test_what_nobody_installs_is_half_installed(folder: Path) -> None:
    assert half_installed(folder) == ("nginx",)


@pytest.mark.parametrize("lock", ["lock", "lock-frontend"])
def test_what_somebody_installs_right_now_is_not(folder: Path, lock: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    assert half_installed(folder) == ()
    holder.communicate("\n")
    assert half_installed(folder) == ("nginx",)
