import errno
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from spark_contract import files
from spark_contract.documents import to_plain
from spark_contract.job import JobRun
from spark_contract.records import DailyReport
from spark_contract.units import JOB
from spark_host import __main__, jobs
from spark_host.system import host as system
from spark_host.system import systemd
from spark_host.watch import daily
from stub_host import job_data, wait_until

from tests.receipts import checkpoint_receipt, source_receipt

D12 = "0123456789ab"
FIRST, SECOND, THIRD, FOURTH = (digit * 12 for digit in "1234")
WRITE_RECEIPT = (
    "import os; os.makedirs(os.path.dirname(os.environ['RECEIPT']), exist_ok=True); "
    "open(os.environ['RECEIPT'], 'w').write(os.environ['CONTENT'])"
)


@pytest.fixture
def units(monkeypatch):
    states: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(systemd, "show_loaded", lambda patterns, fields: states)
    monkeypatch.setattr(systemd, "is_stopping", lambda: False)
    return states


def write_job(host, script, digest=D12, **changes):
    receipt = host.paths.root / f"out-{digest}/receipt.json"
    receipt.parent.mkdir(exist_ok=True)
    digest64 = digest.ljust(64, "0")
    usual = {
        "argv": [sys.executable, "-u", "-c", script], "total_bytes": 1000,
        "env": {"RECEIPT": str(receipt), "CONTENT": source_receipt(digest64)},
        "proof": {"receipt": str(receipt), "digest": digest64},
    }  # fmt: skip
    document = job_data(digest, **{**usual, **changes})
    files.write_text(host.paths.job(digest) / "job.json", json.dumps(document))
    return receipt


def write_token(host, digest):
    token = host.paths.job(digest) / "hub-token"
    token.write_text("hf_canary")
    return token


def poll(host, *digests):
    return to_plain(jobs.poll(list(digests or [D12]), host.paths))


@pytest.mark.parametrize(
    ("result", "stopping", "kept"),
    [
        ("success", False, {SECOND, THIRD, FOURTH}),
        ("exit-code", False, {FOURTH}),
        ("signal", False, {FOURTH}),
        ("exit-code", True, {FIRST, SECOND, THIRD, FOURTH}),
        ("success", True, {FIRST, SECOND, THIRD, FOURTH}),
    ],
)
def test_removes_hub_tokens_of_an_ended_job_and_its_dependents(
    host, units, monkeypatch, result, stopping, kept
):
    after = {FIRST: [], SECOND: [FIRST], THIRD: [SECOND], FOURTH: []}
    for digest, dependencies in after.items():
        write_job(host, "", digest, after=dependencies)
        write_token(host, digest).with_suffix(".spark-new").write_text("hf_canary")
    monkeypatch.setenv("SERVICE_RESULT", result)
    monkeypatch.setattr(systemd, "is_stopping", lambda: stopping)
    assert jobs.main(["end", FIRST], host.paths) == 0
    assert {d for d in after if [*host.paths.job(d).glob("hub-token*")]} == kept


def test_unreadable_job_does_not_prevent_removal_of_other_tokens(host, units):
    write_job(host, "", FIRST)
    write_job(host, "", SECOND)
    (host.paths.job(SECOND) / "job.json").write_text("{")
    write_job(host, "", THIRD, after=[FIRST])
    token = write_token(host, THIRD)
    jobs.remove_tokens(FIRST, host.paths, success=False)
    assert not token.exists()


@pytest.mark.parametrize(
    "sweep",
    [lambda paths: jobs.main(["end", FIRST], paths), lambda paths: __main__.daily([], paths)],
    ids=["end of another job", "daily inspection"],
)
@pytest.mark.parametrize(
    ("unit", "age_s", "kept"),
    [
        ({}, 100, False),
        ({"ActiveState": "failed", "Job": "0"}, 100, False),
        ({"ActiveState": "inactive", "Job": "7"}, 100, True),
        ({"ActiveState": "activating", "Job": "0"}, 100, True),
        ({}, 0, True),
    ],
)
def test_removes_unused_tokens(host, units, monkeypatch, sweep, unit, age_s, kept):
    write_job(host, "", FIRST)
    write_job(host, "", SECOND)
    token = write_token(host, SECOND)
    units[JOB.unit(SECOND)] = unit
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + age_s)
    monkeypatch.setenv("SERVICE_RESULT", "success")
    monkeypatch.setattr(daily, "inspect_host", lambda _: DailyReport(at="", problems=()))
    sweep(host.paths)
    assert token.exists() == kept


def test_reports_memory_before_and_after_a_job(host, units, tmp_path, monkeypatch, capfd):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree: 104857600 kB\nCached: 1048576 kB\n")
    monkeypatch.setenv("SPARK_MEMINFO", str(meminfo))
    after = "MemFree: 102760448 kB\\nCached: 3145728 kB\\n"
    write_job(host, f"open({str(meminfo)!r}, 'w').write('{after}'); {WRITE_RECEIPT}")
    assert jobs.run(D12, host.paths) == 0
    assert "MemFree was 100.00 GiB before and 98.00 GiB after" in capfd.readouterr().out
    assert jobs.run(D12, host.paths) == 0, "it is done and does not run again"
    [job] = poll(host)
    assert job["state"] == "done"
    assert job["memory"] == {
        "free_before_bytes": 100 << 30, "free_after_bytes": 98 << 30,
        "cached_before_bytes": 1 << 30, "cached_after_bytes": 3 << 30,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "receipt_text", "code", "last_line"),
    [
        ("print('all fine')", None, 5, "without a valid result"),
        ("raise SystemExit(3)", source_receipt("f" * 64), 3, ""),
        ("raise SystemExit(4)", '{"digest": "01', 4, ""),
        ("for i in range(50): print(i)\nraise SystemExit('error: hub: 404')", None, 1, "hub: 404"),
    ],
)
def test_job_fails_without_a_valid_receipt(host, units, script, receipt_text, code, last_line):
    receipt = write_job(host, script)
    if receipt_text:
        receipt.write_text(receipt_text)
    assert jobs.run(D12, host.paths) == code
    [job] = poll(host)
    assert (job["state"], job["exit_code"]) == ("failed", code)
    assert last_line in "".join(job["log_tail"][-1:])
    assert len(job["log_tail"]) <= 20


def test_reports_the_donor_tensors_of_a_built_checkpoint(host, units):
    receipt = write_job(host, "pass", kind="checkpoint")
    document = json.loads(checkpoint_receipt(digest=D12.ljust(64, "0")))
    receipt.write_text(json.dumps({**document, "donor_sha256": "a" * 64}))
    assert [job["donor_sha256"] for job in poll(host)] == ["a" * 64]


STALLS = "for i in range(2000): print('phase=fetch bytes=1 total=9 eta_s=%d' % i); time.sleep(0.05)"
MOVES = "for i in range(30): print('phase=fetch bytes=%d total=9' % i); time.sleep(0.1)"
CLOSES_OUTPUT = "import os; os.close(1); os.close(2); time.sleep(60)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code"), [(STALLS, 4), (CLOSES_OUTPUT, 4), (f"{MOVES}\nexit(3)", 3)]
)
def test_stall_timeout_ends_a_job_without_progress(host, units, monkeypatch, script, code):
    monkeypatch.setattr(jobs, "_STALL_TIMEOUT_S", 2.0)
    write_job(host, f"import time\n{script}")
    started = time.monotonic()
    assert jobs.run(D12, host.paths) == code
    assert time.monotonic() - started < 40
    assert ("no progress" in "".join(poll(host)[0]["log_tail"])) == (code == 4)


HOLDS_PIPE = """
import os, signal, time
if os.fork():
    {child}
{grandchild}
open("pid", "w").write(str(os.getpid()))
time.sleep(60)
"""
IGNORES_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def is_running(pid):
    state = subprocess.run(["ps", "-o", "stat=", str(pid)], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


@pytest.mark.slow
@pytest.mark.parametrize("child", ["time.sleep(60)", "os._exit(0)"], ids=["stalled", "ended"])
@pytest.mark.parametrize("grandchild", [IGNORES_TERM, "os.setsid()"], ids=["in group", "escaped"])
def test_stall_timeout_ends_a_job_whose_grandchild_keeps_the_pipe_open(
    host, units, monkeypatch, child, grandchild
):
    monkeypatch.setattr(jobs, "_STALL_TIMEOUT_S", 2.0)
    monkeypatch.setattr(jobs, "_STOP_TIMEOUT_S", 0.5)
    write_job(host, HOLDS_PIPE.format(child=child, grandchild=grandchild))
    started = time.monotonic()
    assert jobs.run(D12, host.paths) == 4
    assert time.monotonic() - started < 40
    pid = int((host.paths.job(D12) / "pid").read_text())
    if grandchild == IGNORES_TERM:
        wait_until(lambda: not is_running(pid), "end of the grandchild")
    else:
        os.kill(pid, signal.SIGKILL)


def test_missing_program_is_reported(host, units):
    write_job(host, "", argv=["/no/such/program"])
    assert jobs.run(D12, host.paths) == 4
    assert "No such file" in poll(host)[0]["log_tail"][0]


def test_next_job_run_removes_temporary_files(host):
    write_job(host, "raise SystemExit(1)")
    folder = host.paths.job(D12)
    stale = {".progress.1460", ".tail.1460", "progress", "tail"}
    for name in stale:
        (folder / name).write_text("of a killed run")
    assert jobs.run(D12, host.paths) == 1
    assert {path.name for path in folder.iterdir()} & stale <= {"tail"}


def test_reads_progress_lines(host, units):
    write_job(host, "print('phase=write bytes=456 rate_bytes_per_s=78.9 eta_s=7')")
    jobs.run(D12, host.paths)
    units[JOB.unit(D12)] = {"ActiveState": "activating"}
    [job] = poll(host)
    assert job["state"] == "running"
    assert job["progress"] == {
        "phase": "write", "bytes": 456, "total": 1000, "rate_bytes_per_s": 78, "eta_s": 7,
    }  # fmt: skip


def test_interrupted_job_is_reported_as_failed(host, units):
    write_job(host, "pass")
    assert poll(host)[0]["state"] == "waiting"
    interrupted = JobRun("running", None, "2026-01-01T00:00:00Z")
    system.write_document(host.paths.job(D12) / "status.json", interrupted)
    assert (poll(host)[0]["state"], poll(host)[0]["result"]) == ("failed", "interrupted")


def test_dependents_of_a_failed_job_fail(host, units):
    write_job(host, "raise SystemExit(4)", FIRST)
    write_job(host, "pass", SECOND, after=[FIRST])
    write_job(host, "pass", THIRD, after=[SECOND])
    jobs.run(FIRST, host.paths)
    third, second, _ = poll(host, THIRD, SECOND, FIRST)
    assert (second["state"], second["result"]) == ("failed", f"requires the failed job {FIRST}")
    assert (third["state"], third["result"]) == ("failed", f"requires the failed job {SECOND}")


def test_rebuilds_an_incomplete_checkpoint(host):
    receipt = write_job(host, WRITE_RECEIPT)
    leftover = receipt.parent / "half.safetensors"
    leftover.write_text("half")
    assert jobs.run(D12, host.paths) == 0
    assert json.loads(receipt.read_text())["digest"].startswith(D12)
    assert not leftover.exists()
    assert not receipt.parent.with_name(f"{receipt.parent.name}.damaged").exists()


def test_failed_rebuild_keeps_the_renamed_checkpoint(host):
    receipt = write_job(host, "raise SystemExit(3)")
    (receipt.parent / "whole.safetensors").write_text("intact")
    assert jobs.run(D12, host.paths) == 3
    renamed = receipt.parent.with_name(f"{receipt.parent.name}.damaged")
    assert (renamed / "whole.safetensors").read_text() == "intact"


def test_job_is_done_if_a_different_checkpoint_makes_it_unnecessary(host, units):
    receipt = host.paths.root / "tree/receipt.json"
    write_job(host, "raise SystemExit(3)", unless={"receipt": str(receipt), "digest": "e" * 64})
    receipt.parent.mkdir()
    receipt.write_text(source_receipt("e" * 64, [{"path": "a", "size_bytes": 3}]))
    assert jobs.run(D12, host.paths) == 3
    (receipt.parent / "a").write_text("abc")
    assert jobs.run(D12, host.paths) == 0
    assert poll(host)[0]["state"] == "done"


def write_removal(host, script):
    checkpoint = host.paths.root / "sources/base-0123456789ab"
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_job(host, script, kind="discard", title="remove", proof={"absent": str(checkpoint)})
    return checkpoint


def test_removal_job_is_done_if_the_folder_is_missing(host, units):
    checkpoint = write_removal(host, "pass")
    assert jobs.run(D12, host.paths) == 5
    write_removal(host, f"import os; os.rmdir({str(checkpoint)!r})")
    assert jobs.run(D12, host.paths) == 0
    assert poll(host)[0]["state"] == "done"


def test_keeps_the_checkpoint_of_a_release(host, units):
    checkpoint = write_removal(host, "raise SystemExit(9)")
    host.release(tree__path=str(checkpoint))
    assert jobs.run(D12, host.paths) == 0
    assert checkpoint.exists()


def test_full_disk_does_not_hide_the_error_of_a_job(host, units, monkeypatch, capfd):
    write_job(host, "print('phase=fetch bytes=1'); print('error: the disk is full'); exit(4)")
    write_text = files.write_text

    def fail_on_status(path, text, mode=420):
        if path.name == "progress" or '"failed"' in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_text(path, text, mode)

    monkeypatch.setattr(files, "write_text", fail_on_status)
    assert jobs.run(D12, host.paths) == 4
    output = capfd.readouterr().out
    assert "error: the disk is full" in output
    assert "status.json: error number 28" in output
    units[JOB.unit(D12)] = {"ActiveState": "failed", "Result": "exit-code", "InvocationID": "r1"}
    queries: list[tuple[Any, ...]] = []
    monkeypatch.setattr(systemd, "journal", lambda *query: queries.append(query) or ["error: full"])
    [job] = poll(host)
    assert (job["state"], job["log_tail"]) == ("failed", ["error: full"])
    assert queries == [("r1", JOB.unit(D12), 20)]
