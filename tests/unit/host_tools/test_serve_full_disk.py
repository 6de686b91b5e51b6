"""A full disk loses no record, and keeps no server from coming up."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from spark_contract import files
from spark_host import __main__
from spark_host.check import runner
from spark_host.gateway import traffic
from spark_host.records import boot, proof
from spark_host.rollout import rollout, speed
from stub_host import REPOSITORY, Host
from stub_systemd import A, B, Systemd, changed_to

# A limit on the size of files cuts a write short without an error, as a disk that is nearly full
# does. In a process of its own, because it holds for everything that one writes.
_WRITE = """
import resource, signal, sys
from pathlib import Path
from spark_contract import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
files.write_json(Path(sys.argv[1]), {"release": "main-cccccccccccc", "previous": ["b"] * 20})
"""


def test_a_record_that_does_not_fit_any_more_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    files.write_json(path, {"release": "main-aaaaaaaaaaaa", "previous": ["b"] * 20})

    said = subprocess.run(
        [sys.executable, "-c", _WRITE, str(path)],
        capture_output=True, text=True, check=False, cwd=REPOSITORY / "files/contract",
    )  # fmt: skip

    assert f"File too large: '{path}'" in said.stderr
    found = files.read_json(path)
    assert found is not None
    assert found["release"] == "main-aaaaaaaaaaaa"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A disk that a test fills up; what lies on a tmpfs goes on."""
    state = {"full": False}
    write = files.write_text

    def written(path: Path, text: str, mode: int = 0o644) -> None:
        if state["full"] and host.paths.run not in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text, mode)

    monkeypatch.setattr(files, "write_text", written)
    return state


def test_a_disk_that_fills_up_in_a_change_leaves_the_old_release_serving(
    host: Host, units: Systemd, disk: dict[str, bool], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    host.release(A)
    host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    monkeypatch.setattr(rollout, "_drain", lambda *_: disk.update(full=True))

    assert rollout.switch(B, host.paths) == 1

    assert units.active == {f"spark-serve@{A}.service"}
    assert boot.enabled("main", host.paths) == [A]
    assert boot.good("main", host.paths)["release"] == A
    said = capfd.readouterr().out
    assert f"rolled-back: serving {A}; [Errno 28] No space left on device: " in said


def test_a_change_on_a_full_disk_is_refused_before_anything_is_touched(
    host: Host, units: Systemd, disk: dict[str, bool], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    host.release(A)
    host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    disk["full"] = True
    monkeypatch.delattr(traffic, "close")

    assert rollout.switch(B, host.paths) == 1

    assert units.active == {f"spark-serve@{A}.service"}
    said = capfd.readouterr().out
    assert f"refused: serving {A}; {host.paths.switch(B)}: cannot be written: No space left" in said
    assert "fix: free space" in said


def test_an_engine_that_answers_right_comes_up_though_its_proof_cannot_be_kept(
    host: Host, disk: dict[str, bool]
) -> None:
    release, told = host.release(), list[str]()
    host.start(release)
    disk["full"] = True
    proven = runner.check(release, host.paths, "quick", told.append, invocation_id="run")
    assert proven["ok"]
    assert "the proof is not kept: [Errno 28] No space left on device: " in told[-1]


def test_a_proof_that_does_not_hold_any_more_goes_though_the_disk_is_full(
    host: Host, disk: dict[str, bool]
) -> None:
    release = host.release()
    host.start(release)
    assert runner.check(release, host.paths, "full", str, invocation_id="run")["ok"]
    host.engines[-1].kill()
    host.engines[-1].wait()
    disk["full"] = True
    assert not runner.check(release, host.paths, "full", str, invocation_id="run")["ok"]
    assert proof.read(release.name, host.paths) is None


def test_a_speed_that_cannot_be_kept_undoes_no_change(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(A)

    def measured(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x.json")

    monkeypatch.setattr(speed, "measured", measured)
    found = changed_to(host, A)
    assert (found["state"], units.active) == ("switched", {f"spark-serve@{A}.service"})
    assert "no speed was measured: [Errno 28] No space left on device" in found["bench"][0]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "fix: run it as root: sudo"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "spark-host status: reset by"),
    ],
)
def test_what_the_system_refuses_is_one_line_and_no_traceback(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(words: list[str], paths: object) -> int:
        raise error

    monkeypatch.setitem(__main__.VERBS, "status", (status, ""))
    assert __main__.main(["status"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
