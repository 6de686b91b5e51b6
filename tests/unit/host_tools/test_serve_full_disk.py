"""A full disk loses no record, and keeps no server from coming up."""

from __future__ import annotations

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from memory_host import Model
from memory_ports import MemoryDisk
from spark_contract import files
from spark_host import __main__, status
from spark_host.check import runner
from spark_host.records import proof
from spark_host.system import host as system
from stub_host import REPOSITORY, Host

# A limit on the size of files cuts a write short without an error, as a disk that is nearly full
# does. In a process of its own, because it holds for everything that one writes.
_WRITE = """
import resource, signal, sys
from pathlib import Path
from spark_contract import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
files.write_text(Path(sys.argv[1]), "the next one" * 20)
"""


def test_full_disk_keeps_the_previous_record(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    files.write_text(path, "the one before")

    said = subprocess.run(
        [sys.executable, "-c", _WRITE, str(path)],
        capture_output=True, text=True, check=False, cwd=REPOSITORY / "files/contract",
    )  # fmt: skip

    assert f"File too large: '{path}'" in said.stderr
    assert path.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [path]


class FullDisk(MemoryDisk):
    def write(self, path: Path, document: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    remove, read = staticmethod(system.Disk.remove), staticmethod(system.Disk.read)


def full(host: Host) -> system.Host:
    return replace(host.here, disk=FullDisk(Model()))


def test_full_disk_does_not_fail_a_check(
    host: Host,
) -> None:
    release, told = host.release(), list[str]()
    host.start(release)
    proven = runner.check(release, full(host), "quick", told.append, invocation_id="run")
    assert proven.ok
    assert "the proof was not written: [Errno 28] No space left on device: " in told[-1]


@pytest.mark.slow
def test_full_disk_removes_an_invalid_proof(
    host: Host,
) -> None:
    release = host.release()
    host.start(release)
    assert runner.check(release, host.here, "full", str, invocation_id="run").ok
    host.engines[-1].kill()
    host.engines[-1].wait()
    assert not runner.check(release, full(host), "full", str, invocation_id="run").ok
    assert proof.read(release.name, host.here) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "fix: run it as root: sudo"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "spark-host status: reset by"),
    ],
)
def test_os_error_is_a_single_line(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str], paths: object) -> int:
        raise error

    monkeypatch.setattr(status, "main", fail)
    assert __main__.main(["status"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
