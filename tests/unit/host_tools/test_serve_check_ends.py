"""Time limits of a check, and the run to which a proof is bound."""

from __future__ import annotations

import json

import pytest
from checked import check, failed
from spark_contract.records import CompileCache
from spark_contract.tool import COMPILING
from spark_host.check import runner
from spark_host.records import proof
from stub_host import Host


@pytest.mark.parametrize("fault", ["never-ready", "crash-at-start", "oom-at-start", "unhealthy"])
def test_engine_not_ready_at_the_limit_fails(host: Host, fault: str) -> None:
    release = host.release(timeouts__start_s=1)
    host.start(release, fault)
    result = check(host, release, "quick")
    assert [item.name for item in result.checks] == ["ready"]
    assert "not ready after 1 s" in failed(result)["ready"]


def test_check_waits_for_a_slow_engine(host: Host) -> None:
    release = host.release(timeouts__start_s=10)
    host.start(release, STUB_LOAD_S="0.7")
    result = check(host, release, "quick")
    assert result.ok
    assert result.checks[0].seconds > 0.5


def test_progress_shows_last_engine_log_line(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_host.check.runner._PROGRESS_S", 0.2)
    release = host.release(timeouts__start_s=1.5)
    host.start(release, "never-ready")
    told: list[str] = []

    def report(line: str) -> None:
        told.append(line)
        with host.log.open("a") as log:  # the journal contains the check's output, too
            log.write(f"{line}\n")

    host.here.disk.write(host.paths.compile_cache(release.name), CompileCache("580", None, "run-1"))
    runner.check(release, host.here, "quick", report, invocation_id="run-1")
    assert all(COMPILING in line for line in told if "waited_s=" in line)
    waited = [line.partition(" last: ")[2] for line in told if "waited_s=" in line]
    assert len(waited) > 2
    assert all(waited)
    assert not [one for one in waited if "waited_s=" in one]


def test_engine_that_dies_during_the_check_fails(host: Host) -> None:
    release = host.release()
    host.started(release, "crash-later", STUB_FAULT_AFTER_S="0.3", STUB_PIECE_S="0.05")
    result = check(host, release)
    assert not result.ok
    assert "went away" in failed(result)["health"]


def test_trickling_answer_ends_at_the_limit(host: Host) -> None:
    release = host.release(check__timeout_s=0.5)
    engine = host.started(release, STUB_PIECE_S="0.2")
    with pytest.raises(runner.EngineError, match="in time"):
        list(
            engine.stream_chat(
                {"messages": [{"role": "user", "content": "hi"}], "stream": True}, 0.5
            )
        )


def test_slow_answers_end_the_whole_check(host: Host) -> None:
    # Each answer is in time, but together they exceed the limit of a check.
    release = host.release(check__timeout_s=1.0, check__copy=["abcd" * 6] * 4)
    host.started(release, STUB_PIECE_S="0.06")
    result = check(host, release)
    problems = failed(result)
    assert list(problems) == ["copy"]
    assert "the check's 1 s are over" in problems["copy"]
    assert result.checks[-1].name == "copy"
    assert result.checks[-1].seconds < 1.5


def test_check_prints_json_and_returns_exit_code(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner.systemd, "invocation", lambda _: "run-1")
    release = host.release()
    host.started(release)
    assert runner.main([release.name, "--json"], host.paths) == 0
    said = capsys.readouterr()
    proven = json.loads(said.out)
    assert (proven["ok"], proven["level"]) == (True, "full")
    assert "ok   served names" in said.err
    (host.paths.engine_run("main") / "stub-fault").write_text("wrong-name")
    assert runner.main([release.name, "--quick"], host.paths) == 1
    said = capsys.readouterr()
    assert "FAIL served names: it serves the names ['other', 'other']" in said.out
    assert said.out.splitlines()[-1] == f"{release.name}: quick check failed: served names"


def test_proof_is_bound_to_run_and_versions(host: Host) -> None:
    release = host.release()
    host.started(release)
    result = check(host, release, "full")
    kept = proof.read(release.name, host.here)
    now = result.versions
    assert proof.unproven_reason(kept, release.digest, "run-1", now) is None
    assert proof.unproven_reason(kept, release.digest, "run-2", now) == (
        "the engine was started after the last check"
    )
    assert "kernel" in (
        proof.unproven_reason(kept, release.digest, "run-1", {**now, "kernel": "9"}) or ""
    )
    assert proof.unproven_reason(kept, "e" * 64, "run-1", now) == "the proof is of another release"


def test_proof_survives_a_rotated_journal(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    release = host.release()
    host.started(release)
    first = check(host, release, "full")
    assert first.load_lines
    monkeypatch.setattr(runner, "read_log", lambda release, invocation_id: [])
    assert check(host, release, "full").ok
    kept = proof.read(release.name, host.here)
    assert kept is not None
    assert kept.load_lines == first.load_lines
    # Not of another run.
    other = runner.check(release, host.here, "full", print, invocation_id="run-2")
    assert [finding.name for finding in other.failed] == ["log lines"]


ROOM = (
    "(EngineCore pid=2) INFO 08-01 00:40:44 [gpu_worker.py:400] Available KV cache memory: 2.0 GiB"
)


def test_proof_stores_the_kv_cache_size(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    release = host.release()
    host.started(release)
    assert check(host, release, "full").kv_cache is None, "its log says tokens and no bytes"
    told = runner.read_log
    monkeypatch.setattr(runner, "read_log", lambda *run: [ROOM, *told(*run)])
    counted = check(host, release, "full").kv_cache
    assert counted is not None
    assert (counted.tokens % release.check.max_model_len, counted.size_bytes) == (0, 2 << 30)
    monkeypatch.setattr(runner, "read_log", told)
    check(host, release, "full")
    kept = proof.read(release.name, host.here)
    assert kept is not None
    assert kept.kv_cache == counted, "the same run, whose journal forgot"


def test_quick_check_after_reboot_suffices_without_changes(host: Host) -> None:
    release = host.release()
    host.started(release)
    first = check(host, release, "full")
    runner.check(release, host.here, "quick", print, invocation_id="run-2")
    kept = proof.read(release.name, host.here)
    assert proof.unproven_reason(kept, release.digest, "run-2", first.versions) is None


def test_quick_check_alone_is_not_a_proof(host: Host) -> None:
    release = host.release()
    host.started(release)
    result = check(host, release, "quick")
    kept = proof.read(release.name, host.here)
    why = proof.unproven_reason(kept, release.digest, "run-1", result.versions)
    assert why == "only the quick check was run"


def test_failed_check_invalidates_the_proof(host: Host) -> None:
    release = host.release()
    host.started(release)
    versions = check(host, release, "full").versions
    (host.paths.engine_run("main") / "stub-fault").write_text("garbage")
    check(host, release, "full")
    kept = proof.read(release.name, host.here)
    assert proof.unproven_reason(kept, release.digest, "run-1", versions) == "the last check failed"
