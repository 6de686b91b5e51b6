"""Judges of engines: none may pass because an engine is missing, or differs outside ties."""

import json
import math
import os
import select
from contextlib import suppress

import pytest

from proofs.engine import gpu_memory
from proofs.engine.run import run_cases
from proofs.flash import talks
from proofs.judges.answers import judge_engines, row, show
from proofs.judges.talks import EAGER, SHAPES, TWINS, Word, judge_conversations, reruns
from proofs.recall import verdicts
from proofs.recall.judge import judge_answer

RAN, DIED = {"state": "ran"}, {"state": "died"}


def broken(results):
    raise KeyError("answers")


@pytest.mark.parametrize(
    ("judge", "failed"),
    [
        (lambda results: [row("answers", True, ["a", "b"])], []),
        (lambda results: [row("a: answers", True, ["a"]), row("b: seen", None, [])], []),
        (lambda results: [row("a: answers", True, ["a"])], ["b"]),
        (broken, ["judge", "a", "b"]),
    ],
)
def test_fails_if_an_engine_has_no_row_or_the_judge_is_broken(judge, failed):
    results = {"a": RAN, "b": DIED}
    rows = judge_engines(results, judge, results)
    bad = [entry for entry in rows if entry["passed"] is False]
    assert [(entry["cases"] or [entry["claim"]])[0] for entry in bad] == failed


def test_display_only_comparison_fails_if_its_engine_is_missing():
    assert show(row("a", False, ["a"], diverged=3), "shown")["passed"] is None
    assert show(row("a: ran", False, ["a"], state="died"), "shown")["passed"] is False


def answer(token, right, other=None, said=None):
    """Return the answer of an engine that gives these probabilities to tokens 1 and 2."""
    step = {"1": math.log(right), "2": math.log(other or 1 - right)}
    judged = judge_answer({"tokens": [said or token], "steps": [step]}, [1])
    return {"length": 32, "kind": "record", "depth": 0.5, **judged}


@pytest.mark.parametrize(
    ("alone", "together", "passed"),
    [
        ((1, 0.9), (1, 0.8), True),
        ((1, 0.52), (2, 0.48), True),
        ((1, 0.22, 0.21), (2, 0.21, 0.23), True),  # no token has a third of the probability
        ((1, 0.6), (2, 0.4), False),
        ((1, 0.9), (2, 0.49), False),  # a tie only with the other requests
        ((1, 0.9), (2, 0.1), False),
        ((1, 0.5), (1, 0.5, 0.5, 777), False),  # a token that is not in the tie
        ((1, 0.5), (2, math.nan), False),
        ((1, 0.9), None, False),
    ],
)
def test_concurrent_answers_differ_from_sequential_ones_only_at_ties(alone, together, passed):
    results = {"wide-a-alone": {**RAN, "recall": [answer(*alone)]}, "wide-a": RAN}
    if together:
        results["wide-a"] = {**RAN, "recall": [answer(*together)]}
    [compared] = [r for r in verdicts.judge_wide(results, {}) if "five at once" in r["claim"]]
    assert compared["passed"] is passed


@pytest.mark.parametrize(("together", "passed"), [([answer(2, 0.1)], None), ([], False)])
def test_concurrent_answers_with_4_bit_keys_have_no_verdict_unless_missing(together, passed):
    alone, both = "wide-tq-4bit_nc-alone", "wide-tq-4bit_nc"
    results = {alone: {**RAN, "recall": [answer(1, 0.9)]}, both: {**RAN, "recall": together}}
    [compared] = [r for r in verdicts.judge_wide(results, {}) if "five at once" in r["claim"]]
    assert compared["passed"] is passed


SAME, CHANGED, PARTED = (
    (0, 0.01, None),
    (0, 0.5, None),
    (1, 0.0, 3.0),
)


@pytest.mark.parametrize(
    ("first", "later", "intact", "damaged"),
    [
        (SAME, SAME, True, False),
        (SAME, CHANGED, False, True),
        (SAME, PARTED, False, True),
        (CHANGED, CHANGED, False, False),
        (PARTED, None, False, False),
    ],
)
def test_losing_states_must_change_only_turns_with_cache_hits(first, later, intact, damaged):
    words = [Word(turn, 0, *word) for turn, word in enumerate((first, later)) if word]
    turn = {"before": {}, "counters": {"prefix_cache_hits": 272}}
    for name, passed in (("talk-cache", intact), (talks.DAMAGED, damaged)):
        result = talks._judge_hits(name, {"turns": [turn]}, words, 0.01)
        assert result["passed"] is passed


def conversation(token, later=1):
    turn = {"before": {}, "counters": {"prefix_cache_hits": 272}}
    first, second = (
        [{"tokens": [said], "margins": [0.8], "logprobs": [-0.1]}] for said in (token, later)
    )
    return {**RAN, "answers": first, "turns": [{**turn, "answers": second}]}


@pytest.mark.parametrize(
    ("with_cache", "without", "passed"),
    [
        ([], [], True),
        ([(2, 1)], [(2, 1)], True),
        ([(2, 1)] * 2, [], False),
        ([(1, 2)], [(2, 1)], False),
    ],
)
def test_a_cache_changes_answers_no_more_often_and_nowhere_else_than_another_start(
    with_cache, without, passed
):
    results = {shape: conversation(1) for shape in SHAPES}
    for name, others in ("agent-eager", with_cache), (EAGER, without):
        for run in reruns(name):
            results[run] = conversation(1)
        for run, other in zip(reruns(name), others, strict=False):
            results[run] = conversation(*other)
    judged = dict(zip(TWINS, judge_conversations(results), strict=True))
    assert judged["agent-eager"]["passed"] is passed


def test_engine_waits_until_the_gpu_has_enough_free_memory(monkeypatch, tmp_path):
    def wait(_):
        raise TimeoutError

    monkeypatch.setattr(gpu_memory, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(gpu_memory, "memory_gib", lambda _: 10)
    monkeypatch.setattr(gpu_memory.time, "sleep", wait)
    with gpu_memory.reserve("0", 5):
        with gpu_memory.reserve("0", 2), gpu_memory.reserve("1", 7):
            pass
        with pytest.raises(TimeoutError), gpu_memory.reserve("0", 3):
            pass
    with gpu_memory.reserve("0", 100):
        pass


def test_resumed_run_starts_only_engines_that_have_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none")
    cases = [{"name": state, "tree": "tree", "options": {}} for state in ("ran", "refused")]
    for case in cases:
        path = tmp_path / f"{case['name']}.json"
        path.write_text(json.dumps({"case": case, "state": case["name"]}))
        path.with_suffix(".log").write_text("")
    results = run_cases(cases, tmp_path, tmp_path, module="no.such.module", resume=True)
    assert {name: result["state"] for name, result in results.items()} == {
        "ran": "ran", "refused": "died",
    }  # fmt: skip


def test_workers_of_a_failed_engine_are_stopped(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pid = tmp_path / "pid"
    (tmp_path / "failing_engine.py").write_text(
        "import pathlib, subprocess, sys\n"
        "worker = subprocess.Popen(['sleep', '300'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(worker.pid))\n"
        "sys.exit(1)\n"
    )
    case = {"name": "failing", "tree": "tree", "options": {}}
    [result] = run_cases([case], tmp_path, tmp_path / "out", module="failing_engine").values()
    assert result["state"] == "died"
    with suppress(ProcessLookupError):  # it is gone already
        worker = os.pidfd_open(int(pid.read_text()))
        assert select.select([worker], [], [], 60)[0] == [worker]
