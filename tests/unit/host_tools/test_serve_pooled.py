"""Checks of pooling and base models; each fails by its fault."""

from __future__ import annotations

import pytest
from spark_contract.records import Proof
from spark_contract.release import Release
from spark_host import status
from spark_host.check import runner
from stub_host import Host

PLAIN = {
    "questions": [], "copy": [], "tool_call": False, "reasoning": False, "repeat": False,
    "conversation": False, "image": False, "needle": None, "prefix": None,
    "acceptance_floor": None, "metrics_required": {},
}  # fmt: skip
EMBEDDING = {"task": "embedding", "width": 128}
RANKING = {"task": "reranking"}
CLASSES = {"task": "classification"}
HEARING = {"sound": True}


def release_of(host: Host, asked: dict[str, object]) -> Release:
    return host.release(**{f"check__{key}": value for key, value in {**PLAIN, **asked}.items()})


def check(host: Host, release: Release, level: str = "deep") -> Proof:
    return runner.check(release, host.here, level, print, invocation_id="run-1")


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (EMBEDDING, {"embedding", "embedding in a batch"}),
        (RANKING, {"ranking"}),
        (CLASSES, {"classes"}),
    ],
    ids=["embedding", "ranking", "classes"],
)
def test_healthy_pooling_model_passes(
    host: Host, asked: dict[str, object], names: set[str]
) -> None:
    release = release_of(host, asked)
    host.started(release)
    result = check(host, release)
    assert result.ok, result.failed
    around = {"ready", "served names", "context length", "log lines", "counters", "health"}
    assert {item.name for item in result.checks} == names | around
    # A health answer is not enough for a start.
    quick = {item.name for item in check(host, release, "quick").checks}
    assert quick & names == {next(iter(sorted(names)))}


VIOLATIONS = [
    (EMBEDDING, "garbage", "embedding", "is not nearer"),
    (EMBEDDING, "nan", "embedding", "not a finite number"),
    ({**EMBEDDING, "width": 96}, "", "embedding", "128 numbers, the model's width is 96"),
    (EMBEDDING, "mixes-up", "embedding in a batch", "another embedding in a batch"),
    (RANKING, "garbage", "ranking", "the document that answers scored 1.000, the other 1.000"),
    (CLASSES, "garbage", "classes", "got the very same numbers"),
    (CLASSES, "nan", "classes", "not a probability"),
    (CLASSES, "mixes-up", "classes", "other classes in a batch"),
    (EMBEDDING, "counters-flat", "counters", "moved by 0"),
    (HEARING, "blind", "sound", "sounds of 1 and 4 s took"),
]


@pytest.mark.parametrize(
    ("asked", "said"),
    [(EMBEDDING, "numbers"), (RANKING, "the document that answers"), (CLASSES, "classes")],
)
def test_live_status_asks_a_pooling_model_for_numbers(
    host: Host, asked: dict[str, object], said: str
) -> None:
    # The real engine answers 404 to chat requests of such a model.
    release = release_of(host, asked)
    host.started(release)
    found = status.ask(release, host.paths)
    assert found.ok, found
    assert said in found.detail
    assert "/v1/chat/completions" not in host.log.read_text()


@pytest.mark.parametrize(("asked", "fault", "violated", "sentence"), VIOLATIONS)
def test_each_fault_fails_its_check(
    host: Host, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object], fault: str,
    violated: str, sentence: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("spark_host.check.checks._COUNTER_WAIT_S", 0.3)
    release = release_of(host, asked)
    host.started(release, fault)
    failed = {item.name: item.detail for item in check(host, release).failed}
    assert sentence in failed[violated]


def test_base_model_is_checked_with_completions(host: Host) -> None:
    asked = [{"prompt": "The capital of France is", "expect": "^Paris$", "max_tokens": 8}]
    release = release_of(host, {"task": "completion", "questions": asked, "repeat": True})
    host.started(release)
    result = check(host, release)
    assert result.ok, result.failed
    assert {"first answer", "stream", "repeat", "parallel"} <= {one.name for one in result.checks}
    log = host.log.read_text()
    assert "POST /v1/completions" in log
    assert "/v1/chat/completions" not in log


def test_wrong_completion_of_a_base_model_fails(host: Host) -> None:
    asked = [{"prompt": "The capital of France is", "expect": "^Paris$", "max_tokens": 8}]
    release = release_of(host, {"task": "completion", "questions": asked})
    host.started(release, "garbage")
    assert [item.name for item in check(host, release, "quick").failed] == ["first answer"]


def test_sounds_take_prompt_tokens(host: Host) -> None:
    release = release_of(host, HEARING)
    host.started(release)
    result = check(host, release)
    assert result.ok, result.failed
    [heard] = [one.detail for one in result.checks if one.name == "sound"]
    assert heard.startswith("sounds of 1 and 4 s took")
