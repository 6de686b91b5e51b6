import errno
import subprocess
import sys
from dataclasses import replace

import pytest
from engine_checks import check
from simulated_host import SimulatedHost
from simulated_ports import Disk
from spark_contract import files
from spark_host import __main__, status
from spark_host.check import runner
from spark_host.records import boot
from spark_host.system import host as system
from stub_host import REPOSITORY

# A file size limit cuts a write short without an error, as a nearly full disk does. It applies to
# the whole process, so it needs a separate one.
_WRITE = """
import resource, signal, sys
from pathlib import Path
from spark_contract import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
files.write_text(Path(sys.argv[1]), "the next content" * 20)
"""


@pytest.mark.slow
def test_full_disk_keeps_the_previous_file(tmp_path):
    path = tmp_path / "good.json"
    files.write_text(path, "the previous content")

    done = subprocess.run(
        [sys.executable, "-c", _WRITE, str(path)],
        capture_output=True, text=True, check=False, cwd=REPOSITORY / "files/contract",
    )  # fmt: skip

    assert f"File too large: '{path}'" in done.stderr
    assert path.read_text() == "the previous content"
    assert list(tmp_path.iterdir()) == [path]


class FullDisk(Disk):
    def write(self, path, document):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    remove, read = staticmethod(system.Disk.remove), staticmethod(system.Disk.read)


def on_full_disk(host):
    return replace(host.here, disk=FullDisk(SimulatedHost()))


def test_full_disk_does_not_fail_a_check(host):
    release, reports = host.release(), list[str]()
    host.start(release)
    assert runner.check(release, on_full_disk(host), "quick", reports.append, "run").ok
    assert "cannot write the proof: [Errno 28] No space left on device: " in reports[-1]


@pytest.mark.slow
def test_full_disk_removes_an_invalid_proof(host):
    release = host.release()
    host.start(release)
    assert check(host, release, "full").ok
    host.engines[-1].kill()
    host.engines[-1].wait()
    assert not runner.check(release, on_full_disk(host), "full", str, "run-1").ok
    assert boot.read_proof(release.name, host.here) is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/y"),
            "fix: run the command as root",
        ),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "spark-host status: reset by"),
    ],
)
def test_os_error_is_a_single_line(error, message, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(status, "main", fail)
    assert __main__.main(["status"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
