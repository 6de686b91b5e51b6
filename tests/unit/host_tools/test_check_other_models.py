import pytest
from engine_checks import check, failed
from spark_host import status

PLAIN = {
    "questions": [], "copy": [], "tool_call": False, "reasoning": False, "repeat": False,
    "conversation": False, "image": False, "needle": None, "prefix": None,
    "acceptance_floor": None, "metrics_required": {},
}  # fmt: skip
EMBEDDING = {"task": "embedding", "width": 128}
RANKING = {"task": "reranking"}
CLASSES = {"task": "classification"}
AUDIO = {"sound": True}
COMPLETION = {
    "task": "completion", "repeat": True,
    "questions": [{"prompt": "The capital of France is", "expect": "^Paris$", "max_tokens": 8}],
}  # fmt: skip


def release_of(host, plan):
    return host.release(**{f"check__{key}": value for key, value in {**PLAIN, **plan}.items()})


@pytest.mark.parametrize(
    ("plan", "names", "live"),
    [
        (EMBEDDING, {"embedding", "embedding in a batch"}, "numbers"),
        (RANKING, {"ranking"}, "the correct document"),
        (CLASSES, {"classes"}, "classes"),
    ],
    ids=["embedding", "ranking", "classes"],
)
def test_healthy_pooling_model_passes(host, plan, names, live):
    release = release_of(host, plan)
    host.started(release)
    result = check(host, release)
    assert result.ok, result.failed
    general = {"ready", "served names", "context length", "log lines", "counters", "health"}
    assert {finding.name for finding in result.checks} == names | general
    quick = {finding.name for finding in check(host, release, "quick").checks}
    assert quick & names == {min(names)}
    answer = status.check_live(release, host.paths)
    assert answer.ok, answer
    assert live in answer.detail
    # The real engine answers 404 to chat requests of such a model.
    assert "/v1/chat/completions" not in host.log.read_text()


@pytest.mark.parametrize(
    ("plan", "fault", "violated", "message"),
    [
        (EMBEDDING, "garbage", "embedding", "is not closer"),
        (EMBEDDING, "nan", "embedding", "not a finite number"),
        ({**EMBEDDING, "width": 96}, "", "embedding", "128 numbers, but the model's width is 96"),
        (EMBEDDING, "mixes-up", "embedding in a batch", "different embedding in a batch"),
        (RANKING, "garbage", "ranking", "the correct document scored 1.000, the other 1.000"),
        (CLASSES, "garbage", "classes", "identical class probabilities"),
        (CLASSES, "nan", "classes", "invalid probabilities"),
        (CLASSES, "mixes-up", "classes", "different class probabilities in a batch"),
        (EMBEDDING, "counters-flat", "counters", "grew by 0"),
        (AUDIO, "blind", "sound", "1 s and 4 s of sound took"),
        (COMPLETION, "garbage", "first answer", "does not match '^Paris$'"),
    ],
)
def test_each_fault_fails_its_check(host, monkeypatch, plan, fault, violated, message):
    monkeypatch.setattr("spark_host.check.checks._COUNTER_WAIT_S", 0.3)
    release = release_of(host, plan)
    host.started(release, fault)
    assert message in failed(check(host, release))[violated]


def test_base_model_is_checked_with_completions(host):
    release = release_of(host, COMPLETION)
    host.started(release)
    result = check(host, release)
    assert result.ok, result.failed
    names = {finding.name for finding in result.checks}
    assert {"first answer", "stream", "repeat", "parallel"} <= names
    log = host.log.read_text()
    assert "POST /v1/completions" in log
    assert "/v1/chat/completions" not in log


def test_longer_sounds_take_more_prompt_tokens(host):
    release = release_of(host, AUDIO)
    host.started(release)
    result = check(host, release)
    assert result.ok, result.failed
    assert "sound" in {finding.name for finding in result.checks}
