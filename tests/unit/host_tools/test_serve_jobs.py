"""Results and states of jobs."""

from __future__ import annotations

import errno
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from spark_contract import files
from spark_contract.documents import plain
from spark_contract.job import JobRun
from spark_contract.records import DailyLook
from spark_contract.units import JOB
from spark_host import __main__, jobs
from spark_host.system import host as system
from spark_host.system import systemd
from spark_host.watch import daily
from stub_host import Host

from tests.receipts import source_receipt

D12 = "0123456789ab"


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    states: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(systemd, "loaded", lambda patterns, fields: states)
    return states


def write_job(host: Host, script: str, digest: str = D12, **changes: Any) -> Path:
    receipt = host.paths.root / f"out-{digest}/receipt.json"
    receipt.parent.mkdir(exist_ok=True)
    data = {
        "schema_version": 1,
        "digest": digest.ljust(64, "0"),
        "kind": "fetch",
        "title": f"job {digest}",
        "argv": [sys.executable, "-u", "-c", script],
        "env": {"RECEIPT": str(receipt), "CONTENT": source_receipt(digest.ljust(64, "0"))},
        "proof": {"receipt": str(receipt), "digest": digest.ljust(64, "0")},
        "total_bytes": 1000,
        "after": [],
        **changes,
    }
    folder = host.paths.job(digest)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(data))
    return receipt


RECEIPT = (
    "import os; os.makedirs(os.path.dirname(os.environ['RECEIPT']), exist_ok=True); "
    "open(os.environ['RECEIPT'], 'w').write(os.environ['CONTENT'])"
)


@pytest.mark.parametrize(
    ("result", "stopping", "left"),
    [
        ("success", False, "234"),
        ("exit-code", False, "4"),
        ("signal", False, "4"),
        ("exit-code", True, "1234"),
        ("success", True, "1234"),
    ],
)
def test_hub_token_is_removed_with_its_job_and_dependents(
    host: Host, monkeypatch: pytest.MonkeyPatch, result: str, stopping: bool, left: str
) -> None:
    after = {"1": [], "2": ["1"], "3": ["2"], "4": []}
    digests = {name: name * 12 for name in after}
    for name, digest in digests.items():
        write_job(host, "", digest, after=[digests[one] for one in after[name]])
        for file in ("hub-token", "hub-token.spark-new"):
            (host.paths.job(digest) / file).write_text("hf_canary")
    monkeypatch.setenv("SERVICE_RESULT", result)
    monkeypatch.setattr(systemd, "is_stopping", lambda: stopping)
    assert jobs.main(["end", digests["1"]], host.paths) == 0
    there = [name for name, one in digests.items() if [*host.paths.job(one).glob("hub-token*")]]
    assert "".join(there) == left


def test_unreadable_job_does_not_keep_other_tokens(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(host, "", "1" * 12)
    write_job(host, "", "2" * 12)
    (host.paths.job("2" * 12) / "job.json").write_text("{")
    write_job(host, "", "3" * 12, after=["1" * 12])
    token = host.paths.job("3" * 12) / "hub-token"
    token.write_text("hf_canary")
    monkeypatch.setattr(systemd, "is_stopping", lambda: False)
    jobs.end("1" * 12, host.paths, success=False)
    assert not token.exists()


@pytest.mark.parametrize("call", ["end", "daily"])
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
def test_unused_tokens_are_removed(
    host: Host,
    units: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    unit: dict[str, str],
    age_s: float,
    kept: bool,
) -> None:
    token = write_job(host, "", "2" * 12) and host.paths.job("2" * 12) / "hub-token"
    write_job(host, "", "1" * 12)
    token.write_text("hf_canary")
    units[JOB.of("2" * 12)] = unit
    monkeypatch.setattr(systemd, "is_stopping", lambda: False)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + age_s)
    if call == "end":
        monkeypatch.setenv("SERVICE_RESULT", "success")
        jobs.main(["end", "1" * 12], host.paths)
    else:
        monkeypatch.setattr(daily, "inspect", lambda _: DailyLook(at="", problems=()))
        __main__.daily([], host.paths)
    assert token.exists() == kept


def poll(host: Host, *digests: str) -> list[dict[str, Any]]:
    return plain(jobs.poll(list(digests or [D12]), host.paths))


def test_finished_job_is_not_run_again(host: Host, units: dict[str, Any]) -> None:
    receipt = write_job(host, f"{RECEIPT}; open(os.environ['RECEIPT'] + '.runs', 'a').write('x')")
    assert jobs.run(D12, host.paths) == 0
    assert jobs.run(D12, host.paths) == 0
    assert Path(f"{receipt}.runs").read_text() == "x"
    assert poll(host)[0]["state"] == "done"


def test_memory_before_and_after_a_job_is_reported(
    host: Host, units: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    kernel = tmp_path / "meminfo"
    kernel.write_text("MemFree: 104857600 kB\nCached: 1048576 kB\n")
    monkeypatch.setenv("SPARK_MEMINFO", str(kernel))
    after = "MemFree: 102760448 kB\\nCached: 3145728 kB\\n"
    write_job(host, f"open({str(kernel)!r}, 'w').write('{after}'); {RECEIPT}")
    assert jobs.run(D12, host.paths) == 0
    told = "MemFree 100.00 GiB before, 98.00 GiB after, Cached 1.00 GiB before, 3.00 GiB after"
    assert told in capfd.readouterr().out
    assert jobs.run(D12, host.paths) == 0  # already done
    assert poll(host)[0]["memory"] == {
        "free_before_bytes": 100 << 30, "free_after_bytes": 98 << 30,
        "cached_before_bytes": 1 << 30, "cached_after_bytes": 3 << 30,
    }  # fmt: skip


def test_exit_code_0_without_a_result_is_a_failure(host: Host, units: dict[str, Any]) -> None:
    write_job(host, "print('all fine')")
    assert jobs.run(D12, host.paths) == 5
    entry = poll(host)[0]
    assert (entry["state"], entry["exit_code"]) == ("failed", 5)
    assert "without a valid result" in entry["log_tail"][-1]


def test_receipt_of_another_digest_is_not_a_result(host: Host, units: dict[str, Any]) -> None:
    receipt = write_job(host, "raise SystemExit(3)")
    receipt.write_text(source_receipt("f" * 64))
    assert jobs.run(D12, host.paths) == 3
    assert poll(host)[0]["state"] == "failed"


def test_truncated_receipt_is_not_a_result(host: Host) -> None:
    receipt = write_job(host, "raise SystemExit(4)")
    receipt.write_text('{"digest": "01')
    assert jobs.run(D12, host.paths) == 4


def test_failed_job_reports_its_last_lines(host: Host, units: dict[str, Any]) -> None:
    write_job(host, "for i in range(50): print('line', i)\nraise SystemExit('error: hub: 404')")
    assert jobs.run(D12, host.paths) == 1
    entry = poll(host)[0]
    assert entry["log_tail"][-1] == "error: hub: 404"
    assert len(entry["log_tail"]) == 20


def test_next_run_removes_temporary_files(host: Host) -> None:
    write_job(host, "raise SystemExit(1)")
    folder = host.paths.job(D12)
    for name in (".progress.1460", ".tail.1460", "progress", "tail"):
        (folder / name).write_text("of a run that was killed")
    before = {path.name for path in folder.iterdir()}
    assert jobs.run(D12, host.paths) == 1
    left = {path.name for path in folder.iterdir()}
    assert before - left >= {".progress.1460", ".tail.1460"}
    assert not any(name.startswith(".") for name in left)


def test_progress_lines_are_parsed(host: Host, units: dict[str, Any]) -> None:
    write_job(host, "print('phase=write bytes=456 rate_bytes_per_s=78.9 eta_s=7')")
    jobs.run(D12, host.paths)
    units[JOB.of(D12)] = {"ActiveState": "activating"}
    entry = poll(host)[0]
    assert entry["state"] == "running"
    assert entry["progress"] == {
        "phase": "write",
        "bytes": 456,
        "total": 1000,
        "rate_bytes_per_s": 78,
        "eta_s": 7,
    }


def test_interrupted_job_is_failed_not_waiting(host: Host, units: dict[str, Any]) -> None:
    write_job(host, "pass")
    assert poll(host)[0]["state"] == "waiting"
    system.write_document(
        host.paths.job(D12) / "status.json", JobRun("running", None, "2026-01-01T00:00:00Z")
    )
    assert (poll(host)[0]["state"], poll(host)[0]["result"]) == ("failed", "interrupted")


def test_dependents_of_a_failed_job_fail(host: Host, units: dict[str, Any]) -> None:
    first, second, third = "a" * 12, "b" * 12, "c" * 12
    write_job(host, "raise SystemExit(4)", first)
    write_job(host, "pass", second, after=[first])
    write_job(host, "pass", third, after=[second])
    jobs.run(first, host.paths)
    states = {e["title"][-12:]: (e["state"], e["result"]) for e in poll(host, third, second, first)}
    assert states[second] == ("failed", f"needs the failed job {first}")
    assert states[third] == ("failed", f"needs the failed job {second}")


def test_incomplete_checkpoint_is_rebuilt(host: Host) -> None:
    receipt = write_job(host, RECEIPT)
    (receipt.parent / "half.safetensors").write_text("left by somebody")
    assert jobs.run(D12, host.paths) == 0
    assert json.loads(receipt.read_text())["digest"].startswith(D12)
    assert not (receipt.parent / "half.safetensors").exists()
    assert not receipt.parent.with_name(f"{receipt.parent.name}.damaged").exists()


def test_failed_rebuild_keeps_the_renamed_checkpoint(host: Host) -> None:
    receipt = write_job(host, "raise SystemExit(3)")
    (receipt.parent / "whole.safetensors").write_text("still good")
    assert jobs.run(D12, host.paths) == 3
    aside = receipt.parent.with_name(f"{receipt.parent.name}.damaged")
    assert (aside / "whole.safetensors").read_text() == "still good"


def test_missing_program_is_reported(host: Host, units: dict[str, Any]) -> None:
    write_job(host, "", argv=["/no/such/program"])
    assert jobs.run(D12, host.paths) == 4
    assert "No such file" in poll(host)[0]["log_tail"][0]


def test_job_is_done_if_another_checkpoint_makes_it_needless(
    host: Host, units: dict[str, Any]
) -> None:
    tree = host.paths.root / "tree/receipt.json"
    write_job(host, "raise SystemExit(3)", unless={"receipt": str(tree), "digest": "e" * 64})
    tree.parent.mkdir()
    tree.write_text(source_receipt("e" * 64, [{"path": "a", "size_bytes": 3}]))
    assert jobs.run(D12, host.paths) == 3  # the tree lacks a file: the work is needed
    (tree.parent / "a").write_text("abc")
    assert jobs.run(D12, host.paths) == 0
    assert poll(host)[0]["state"] == "done"


def write_removal(host: Host, script: str) -> Path:
    base = host.paths.root / "sources/base-0123456789ab"
    base.mkdir(parents=True, exist_ok=True)
    write_job(host, script, kind="discard", title="remove", proof={"absent": str(base)})
    return base


def test_removal_is_done_when_the_folder_is_gone(host: Host, units: dict[str, Any]) -> None:
    base = write_removal(host, "pass")
    assert jobs.run(D12, host.paths) == 5
    write_removal(host, f"import os; os.rmdir({str(base)!r})")
    assert jobs.run(D12, host.paths) == 0
    assert poll(host)[0]["state"] == "done"


def test_checkpoint_of_a_release_is_not_removed(
    host: Host, units: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_removal(host, "raise SystemExit(9)")
    name = host.release(tree__path=str(base)).name
    assert jobs.run(D12, host.paths) == 0
    assert base.exists()
    assert f"kept, {name} can serve it" in capsys.readouterr().out


def test_full_disk_keeps_the_jobs_own_error(
    host: Host,
    units: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_job(host, "print('phase=fetch bytes=1'); print('error: the disk is full'); exit(4)")
    whole = files.write_text

    def write(path: Path, text: str, mode: int = 0o644) -> None:
        if path.name == "progress" or '"failed"' in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, text, mode)

    monkeypatch.setattr(files, "write_text", write)
    assert jobs.run(D12, host.paths) == 4
    said = capfd.readouterr().out
    assert "error: the disk is full" in said
    assert "status.json: not written" in said
    # The journal has the error that the status lacks.
    units[JOB.of(D12)] = {
        "ActiveState": "failed",
        "Result": "exit-code",
        "InvocationID": "r1",
    }
    asked: list[tuple[str, str, int]] = []
    monkeypatch.setattr(systemd, "journal", lambda *words: asked.append(words) or ["error: full"])
    [entry] = poll(host)
    assert (entry["state"], entry["log_tail"]) == ("failed", ["error: full"])
    assert asked == [("r1", JOB.of(D12), 20)]
