"""Each check passes on a sound engine, and each is failed by the fault that violates it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from spark_contract.serving.records import Proof
from spark_contract.serving.release import Release
from spark_host.check import runner
from spark_host.check.questions import long_text
from spark_host.engine.client import Engine
from spark_host.records import proof
from spark_host.system import systemd
from stub_host import Host


def check(host: Host, release: Release, level: str = "deep") -> Proof:
    return runner.check(release, host.here, level, print, invocation_id="run-1")


def failed(result: Proof) -> dict[str, str]:
    return {item.name: item.detail for item in result.failed}


def warned(result: Proof) -> dict[str, str]:
    return {item.name: item.detail for item in result.warnings}


def test_a_sound_engine_passes_every_check(host: Host) -> None:
    release = host.release()
    host.started(release)
    result = check(host, release)
    assert failed(result) == {}
    assert result.ok
    names = {item.name for item in result.checks}
    assert names == {"ready", *(item.name for item in runner.CHECKS)} - OF_NUMBERS
    assert result.engine == {"version": "0.0.0+stub"}


EXACT = [
    {"prompt": "What is the capital of France?", "expect": "Paris", "max_tokens": 32},
    {"prompt": "What is 7823 * 4519?", "expect": "35352137", "max_tokens": 32},
]
# The fault, the one check it violates, and words of what that check says.
VIOLATIONS = [
    ("wrong-name", "served names", "serves the names ['other', 'other']"),
    ("wrong-context", "context length", "is 2048, the release wants 4096"),
    ("log-missing", "log lines", "has no line matching 'spark plugin is on'"),
    ("log-forbidden", "log lines", "forbidden line"),
    ("wrong-arithmetic", "answers", "was answered '35352138'"),
    ("copy-typo", "copy", "asked to repeat"),
    ("stream-cut", "stream", "broke"),
    ("tool-types", "tool call", "days='3', not the number 3"),
    ("reasoning-mixed", "reasoning", "thinking is mixed into the answer"),
    ("forgets", "conversation", "in turn 2 of a conversation"),
    ("mixes-up", "parallel", "among 3 streams at once"),
    ("no-prefix-hits", "prefix reuse", "turn 2 of a conversation found no token"),
    ("stale-prefix", "prefix reuse", "turn 2 of a long conversation was answered '48214'"),
    ("low-acceptance", "acceptance", "the floor is 50%"),
    ("blind", "image", "a picture that is all blue was called 'Red'"),
    ("no-drafts", "acceptance", "switched off"),
    ("no-cache-info", "metrics", "no sample of vllm:cache_config_info carries"),
    ("unhealthy-later", "health", "HTTP 503 after the check"),
]
# What a right server may show as well.
DOUBTS = [
    ("unsteady", "repeat", "the same greedy request gave"),
    ("no-tool", "tool call", "no tool was called"),
    ("needle-lost", "needle", "was not found"),
    ("needle-lost", "prefix reuse", "turn 1 of a long conversation was answered"),
    ("some-drafts", "acceptance", "the floor is 50%"),
]
# A broken engine can show in the first two at any level, the others stand around the questions; all
# have tests of their own below.
ELSEWHERE = {"first answer", "counters", "ready", "same run"}
# Of servers that answer with numbers: test_serve_pooled.py.
OF_NUMBERS = {"embedding", "embedding beside others", "ranking", "classes", "sound"}


def leave_out(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    kept = tuple(item for item in runner.CHECKS if item.name not in names)
    monkeypatch.setattr(runner, "CHECKS", kept)


@pytest.mark.parametrize(("fault", "violated", "sentence"), VIOLATIONS)
def test_a_fault_fails_the_check_made_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, fault: str, violated: str, sentence: str
) -> None:
    # The faults of one kind of answer must not show in another check: each question stands alone.
    alone = {
        "wrong-arithmetic": ("conversation", "parallel", "repeat"),
        "stream-cut": ("parallel",),
    }
    leave_out(monkeypatch, *alone.get(fault, ()))
    changes = {} if violated == "prefix reuse" else {"check__prefix": None}
    monkeypatch.setattr(long_text, "_COUNTER_WAIT_S", 0.3)
    release = host.release(check__questions=EXACT, **changes)
    host.started(release, fault)
    problems = failed(check(host, release))
    others = {"acceptance"} if fault == "no-drafts" else set()
    assert set(problems) - others <= {violated}
    assert sentence in problems[violated]


@pytest.mark.parametrize(("fault", "doubted", "sentence"), DOUBTS)
def test_what_a_right_server_may_show_is_told_and_fails_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch, fault: str, doubted: str, sentence: str
) -> None:
    leave_out(monkeypatch, *{"unsteady": ("conversation",)}.get(fault, ()))
    changes = {} if doubted == "prefix reuse" else {"check__prefix": None}
    release = host.release(check__questions=EXACT, **changes)
    host.started(release, fault)

    result = check(host, release, "full" if doubted == "prefix reuse" else "deep")

    assert (result.ok, failed(result), set(warned(result))) == (True, {}, {doubted})
    assert sentence in warned(result)[doubted]
    kept = proof.read(release.name, host.here)
    assert kept is not None
    assert warned(kept) == warned(result)


def test_a_question_with_thinking_is_asked_so_and_weighs_a_warning(host: Host) -> None:
    product = {**EXACT[1], "thinking": True}
    release = host.release(check__questions=[EXACT[0], product], check__prefix=None)
    host.started(release, "wrong-arithmetic")

    result = check(host, release)

    assert (result.ok, set(warned(result))) == (True, {"answers"})
    assert "was answered '35352138'" in warned(result)["answers"]
    # At a start nothing is asked that takes thinking, whatever the order.
    release = host.release(check__questions=[product, EXACT[0]], check__prefix=None)
    [first] = [one for one in check(host, release, "quick").checks if one.name == "first answer"]
    assert "capital of France" in first.detail


def test_the_engine_is_told_whether_to_think(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    ask = Engine.ask

    def noted(self: Engine, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        thinks = body["chat_template_kwargs"]["enable_thinking"]
        asked.append((body["messages"][0]["content"], thinks))
        return ask(self, path, body, timeout_s)

    monkeypatch.setattr(Engine, "ask", noted)
    leave_out(monkeypatch, "reasoning")
    product = {**EXACT[1], "thinking": True}
    release = host.release(check__questions=[EXACT[0], product], check__prefix=None)
    host.started(release)
    check(host, release)

    assert {thinks for text, thinks in asked if text == product["prompt"]} == {True}
    assert {thinks for text, thinks in asked if text != product["prompt"]} == {False}


def test_an_error_of_the_engine_is_never_a_warning(host: Host) -> None:
    release = host.release(check__questions=[EXACT[0], {**EXACT[1], "thinking": True}])
    host.started(release, "crash-later", STUB_FAULT_AFTER_S="0.3", STUB_PIECE_S="0.05")
    result = check(host, release)
    assert not result.ok
    assert warned(result) == {}


def test_a_check_says_why_it_weighs_what_it_weighs() -> None:
    for item in runner.CHECKS:
        assert item.broken_by, item.name
        never = item.right_and_failing.startswith("cannot")
        assert never <= (item.weight == "must"), item.name
        # A part that a right server may fail is told as a warning, or the whole check is one.
        assert never or item.weight == "warn" or "told as a warning" in item.right_and_failing


def test_requests_at_once_are_streams(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "stream")
    release = host.release(check__prefix=None)
    host.started(release, "stream-cut")
    problems = failed(check(host, release))
    assert set(problems) == {"parallel"}
    assert "among 3 streams at once the streamed answer broke" in problems["parallel"]


def test_every_check_there_is_has_an_engine_that_violates_it() -> None:
    violated = {name for _, name, _ in [*VIOLATIONS, *DOUBTS]}
    known = violated | ELSEWHERE | OF_NUMBERS
    assert known == {"ready", *(item.name for item in runner.CHECKS), "same run"}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("garbage", "was answered 'ent fjord"),
        ("nan", "by one token over and over"),
        ("empty", "was answered ''"),
        ("error-500", "HTTP 500"),
        ("wedge", "no usable answer after 1.5 s"),
    ],
)
def test_a_broken_engine_never_passes_the_quick_check(
    host: Host, fault: str, sentence: str
) -> None:
    release = host.release()
    host.started(release, fault)
    result = check(host, release, "quick")
    problems = failed(result)
    assert sentence in problems["first answer"]
    # Where not one answer came there were no tokens to count either.
    also = {"counters", "metrics"} if fault == "error-500" else set()
    assert set(problems) == {"first answer", *also}


def test_an_engine_that_was_restarted_during_the_check_is_not_proven(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release()
    host.started(release)
    runs = iter(["run-1", "run-2"])
    monkeypatch.setattr(systemd, "invocation", lambda unit: next(runs))

    result = runner.check(release, host.here, "quick", print)

    assert failed(result) == {"same run": "the engine was restarted meanwhile"}
    assert not result.ok
    # The proof is bound to the run that was asked, so it never covers the one that serves now.
    assert result.invocation_id == "run-1"


def test_the_proof_of_a_long_conversation_tells_when_turn_two_began_to_answer(host: Host) -> None:
    release = host.release()
    host.started(release)
    [found] = [c for c in check(host, release).checks if c.name == "prefix reuse"]
    assert re.match(r"turn 2 began to answer after \d+\.\d\d s, turn 1 after", found.detail)


def test_a_conversation_shorter_than_a_cache_block_proves_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "_FILLER_TOKENS", 100_000)
    release = host.release(check__prefix={"block_tokens": 100})
    host.started(release)
    assert "a cache block 100" in failed(check(host, release))["prefix reuse"]


def test_frozen_counters_fail_the_counters_check(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_host.check import evidence

    monkeypatch.setattr(evidence, "_COUNTER_WAIT_S", 0.3)
    release = host.release(check__metrics_required={})
    host.started(release, "counters-flat")
    problems = failed(check(host, release, "quick"))
    assert "moved by 0" in problems["counters"]
    assert set(problems) == {"counters"}


@pytest.mark.parametrize("fault", ["never-ready", "crash-at-start", "oom-at-start", "unhealthy"])
def test_an_engine_that_is_never_ready_is_given_up_at_the_limit(host: Host, fault: str) -> None:
    release = host.release(timeouts__start_s=1)
    host.start(release, fault)
    result = check(host, release, "quick")
    assert [item.name for item in result.checks] == ["ready"]
    assert "not ready after 1 s" in failed(result)["ready"]


def test_a_slow_engine_is_waited_for(host: Host) -> None:
    release = host.release(timeouts__start_s=10)
    host.start(release, STUB_LOAD_S="0.7")
    result = check(host, release, "quick")
    assert result.ok
    assert result.checks[0].seconds > 0.5


def test_what_a_loading_engine_said_last_is_told_and_not_what_was_told_of_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_host.check.runner._PROGRESS_S", 0.2)
    release = host.release(timeouts__start_s=1.5)
    host.start(release, "never-ready")
    told: list[str] = []

    def report(line: str) -> None:
        told.append(line)
        with host.log.open("a") as log:  # the unit's journal holds what its check prints as well
            log.write(f"{line}\n")

    runner.check(release, host.here, "quick", report, invocation_id="run-1")
    waited = [line.partition(" last: ")[2] for line in told if "waited_s=" in line]
    assert len(waited) > 2
    assert all(waited)
    assert not [one for one in waited if "waited_s=" in one]


def test_an_engine_that_dies_during_the_check_is_not_proven(host: Host) -> None:
    release = host.release()
    host.started(release, "crash-later", STUB_FAULT_AFTER_S="0.3", STUB_PIECE_S="0.05")
    result = check(host, release)
    assert not result.ok
    assert "went away" in failed(result)["health"]


def test_a_trickling_answer_does_not_outlive_the_limit(host: Host) -> None:
    release = host.release(check__timeout_s=0.5)
    engine = host.started(release, STUB_PIECE_S="0.2")
    with pytest.raises(runner.EngineError, match="in time"):
        list(
            engine.stream_chat(
                {"messages": [{"role": "user", "content": "hi"}], "stream": True}, 0.5
            )
        )


def test_a_check_of_many_slow_answers_ends_at_its_limit_and_ends_the_proof(host: Host) -> None:
    # Each answer comes in time; together they take longer than one check may.
    release = host.release(check__timeout_s=1.0, check__copy=["abcd" * 6] * 4)
    host.started(release, STUB_PIECE_S="0.06")
    result = check(host, release)
    problems = failed(result)
    assert list(problems) == ["copy"]
    assert "the check's 1 s are over" in problems["copy"]
    assert result.checks[-1].name == "copy"
    assert result.checks[-1].seconds < 1.5


def test_the_verdict_is_an_exit_code_and_json_on_standard_output(
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


def test_the_proof_is_bound_to_the_run_and_the_versions(host: Host) -> None:
    release = host.release()
    host.started(release)
    result = check(host, release, "full")
    kept = proof.read(release.name, host.here)
    now = result.versions
    assert proof.why_not(kept, release.digest, "run-1", now) is None
    assert proof.why_not(kept, release.digest, "run-2", now) == (
        "the engine was started after the last check"
    )
    assert "kernel" in (proof.why_not(kept, release.digest, "run-1", {**now, "kernel": "9"}) or "")
    assert proof.why_not(kept, "e" * 64, "run-1", now) == "the proof is of another release"


def test_a_journal_that_forgot_how_the_engine_loaded_does_not_unprove_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release()
    host.started(release)
    first = check(host, release, "full")
    assert first.load_lines
    monkeypatch.setattr(runner, "read_log", lambda release, invocation_id: [])
    assert check(host, release, "full").ok
    kept = proof.read(release.name, host.here)
    assert kept is not None
    assert kept.load_lines == first.load_lines
    # Of another run they say nothing.
    other = runner.check(release, host.here, "full", print, invocation_id="run-2")
    assert [finding.name for finding in other.failed] == ["log lines"]


ROOM = (
    "(EngineCore pid=2) INFO 08-01 00:40:44 [gpu_worker.py:400] Available KV cache memory: 2.0 GiB"
)


def test_what_the_engine_counts_of_its_cache_is_kept_with_the_proof(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_quick_check_after_a_reboot_is_enough_when_nothing_changed(host: Host) -> None:
    release = host.release()
    host.started(release)
    first = check(host, release, "full")
    runner.check(release, host.here, "quick", print, invocation_id="run-2")
    kept = proof.read(release.name, host.here)
    assert proof.why_not(kept, release.digest, "run-2", first.versions) is None


def test_a_quick_check_alone_is_not_a_proof(host: Host) -> None:
    release = host.release()
    host.started(release)
    result = check(host, release, "quick")
    kept = proof.read(release.name, host.here)
    why = proof.why_not(kept, release.digest, "run-1", result.versions)
    assert why == "only the quick check was run"


def test_a_failed_check_takes_the_proof_away(host: Host) -> None:
    release = host.release()
    host.started(release)
    versions = check(host, release, "full").versions
    (host.paths.engine_run("main") / "stub-fault").write_text("garbage")
    check(host, release, "full")
    kept = proof.read(release.name, host.here)
    assert proof.why_not(kept, release.digest, "run-1", versions) == "the last check failed"
