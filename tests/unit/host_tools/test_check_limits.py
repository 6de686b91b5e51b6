import errno
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from spark_contract import files
from spark_contract.records import CompileCache
from spark_contract.tool import COMPILING
from spark_host import __main__, status
from spark_host.check import runner
from spark_host.records import boot
from spark_host.system import host as system
from stub_host import REPOSITORY, check, fail_without_space, failed, stored_proof


@pytest.mark.parametrize("fault", ["never-ready", "crash-at-start", "oom-at-start", "unhealthy"])
def test_fails_if_engine_is_not_ready_before_timeout(host, fault):
    release = host.release(timeouts__start_s=1)
    host.start(release, fault)
    result = check(host, release, "quick")
    assert [finding.name for finding in result.checks] == ["ready"]
    assert "not ready after 1 s" in failed(result)["ready"]


def test_check_progress_shows_the_phase_if_the_engine_prints_nothing(host, monkeypatch):
    monkeypatch.setattr(runner, "_PROGRESS_INTERVAL_S", 0.2)
    monkeypatch.setattr(runner, "_PHASE_INTERVAL_S", 0.0)
    release = host.release(timeouts__start_s=3)
    host.start(release, "never-ready", STUB_LOAD_S="0.6")
    lines: list[str] = []

    def report(line):
        lines.append(line)
        with host.log.open("a") as log:
            log.write(f"{line}\n")

    host.here.disk.write(host.paths.compile_cache(release.name), CompileCache("580", None, "run-1"))
    runner.check(release, host.here, "quick", report, invocation_id="run-1")
    progress = [line for line in lines if "waited_s=" in line]
    assert len(progress) > 2
    assert all(COMPILING in line for line in progress)
    phases = [re.sub(r".*limit_s=3 |, \d+ s;.*", "", line) for line in progress]
    assert phases[-1] == "capturing CUDA graphs"
    assert set(phases) <= {"starting the container", "loading weights", phases[-1]}


def test_check_ends_at_the_time_limit_if_answers_are_slow(host):
    copies = ["abcd" * 6] * 12
    release = host.serving(STUB_PIECE_S="0.06", check__timeout_s=3.0, check__copy=copies)
    result = check(host, release)
    failures = failed(result)
    assert list(failures) == ["copy"]
    assert "the check reached its time limit of 3 s" in failures["copy"]
    assert result.checks[-1].name == "copy"
    assert result.checks[-1].seconds < 5


def test_check_prints_json_and_returns_exit_code(host, monkeypatch, capsys):
    monkeypatch.setattr(runner.systemd, "read_invocation_id", lambda _: "run-1")
    release = host.serving()
    assert runner.main([release.name, "--json"], host.paths) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["ok"], result["level"]) == (True, "full")
    assert "ok   served names" in output.err
    (host.paths.engine_run("main") / "stub-fault").write_text("wrong-name")
    assert runner.main([release.name, "--quick"], host.paths) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("FAIL served names" in line for line in lines)
    assert lines[-1] == f"{release.name}: quick check failed: served names"


def unproven_reason(host, run, versions):
    release = host.release()
    return boot.unproven_reason(stored_proof(host, release), release.digest, run, versions)


def test_proof_is_valid_only_for_its_own_result_its_run_and_its_versions(host):
    release = host.serving()
    now = check(host, release, "quick").versions
    assert unproven_reason(host, "run-1", now) == "only the quick check has run"
    check(host, release, "full")
    assert unproven_reason(host, "run-1", now) is None
    restarted = "the engine has been restarted since the last check"
    assert unproven_reason(host, "run-2", now) == restarted
    assert "kernel" in str(unproven_reason(host, "run-1", {**now, "kernel": "9"}))
    other = boot.unproven_reason(stored_proof(host, release), "e" * 64, "run-1", now)
    assert other == "the proof belongs to another release"
    check(host, release, "quick", run="run-2")
    assert unproven_reason(host, "run-2", now) is None
    (host.paths.engine_run("main") / "stub-fault").write_text("garbage")
    check(host, release, "quick")
    assert unproven_reason(host, "run-1", now) == "the last check failed"


CACHE_LINE = (
    "(EngineCore pid=2) INFO 08-01 00:40:44 [gpu_worker.py:400] Available KV cache memory: 2.0 GiB"
)


def test_proof_keeps_log_lines_and_cache_size_after_journal_rotation(host, monkeypatch):
    release = host.serving()
    assert check(host, release, "full").kv_cache is None, "the log has tokens, but no bytes"
    read_log = runner.read_log
    monkeypatch.setattr(runner, "read_log", lambda *run: [CACHE_LINE, *read_log(*run)])
    first = check(host, release, "full")
    assert first.load_lines
    assert first.kv_cache.tokens % release.check.max_model_len == 0
    assert first.kv_cache.size_bytes == 2 << 30
    monkeypatch.setattr(runner, "read_log", lambda *run: [])
    assert check(host, release, "full").ok
    stored = stored_proof(host, release)
    assert (stored.load_lines, stored.kv_cache) == (first.load_lines, first.kv_cache)
    assert list(failed(check(host, release, "full", run="run-2"))) == ["log lines"]


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
def test_failed_write_on_a_full_disk_keeps_the_previous_file(tmp_path):
    path = tmp_path / "good.json"
    files.write_text(path, "the previous content")

    done = subprocess.run(
        [sys.executable, "-c", _WRITE, str(path)],
        capture_output=True, text=True, check=False, cwd=REPOSITORY / "files/contract",
    )  # fmt: skip

    assert f"File too large: '{path}'" in done.stderr
    assert path.read_text() == "the previous content"
    assert list(tmp_path.iterdir()) == [path]


class FullDisk(system.Disk):
    write = staticmethod(fail_without_space)


def on_full_disk(host):
    return replace(host.here, disk=FullDisk())


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
def test_os_errors_are_reported_on_one_line(error, message, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(status, "main", fail)
    assert __main__.main(["status"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
