import re

import pytest
from spark_host import status
from spark_host.check import checks, questions, runner
from spark_host.engine.client import Engine
from spark_host.system import systemd
from stub_host import REPOSITORY, check, failed, stored_proof, warned

from spark_deploy.config.settings.engine import PROFILE_KEYS

ALL_CHECKS = {check.name for check in checks.CHECKS}
OTHER_TASKS = {"embedding", "embedding in a batch", "ranking", "classes", "sound"}


def test_healthy_engine_passes_every_check(host):
    result = check(host, host.serving())
    assert failed(result) == {}
    assert result.ok
    assert {finding.name for finding in result.checks} == {"ready", *ALL_CHECKS} - OTHER_TASKS
    assert result.engine == {"version": "0.0.0+stub"}
    [prefix] = [finding for finding in result.checks if finding.name == "prefix reuse"]
    assert re.match(r"the first token came after \d+\.\d\d s in turn 1 and", prefix.detail)


EXACT = [
    {"prompt": "What is the capital of France?", "expect": "Paris", "max_tokens": 32},
    {"prompt": "What is 7823 * 4519?", "expect": "35352137", "max_tokens": 32},
]
VIOLATIONS = [
    ("wrong-name", "served names", "serves the names ['other', 'other']"),
    ("wrong-context", "context length", "is 2048, but the release requires 4096"),
    ("log-missing", "log lines", "has no line matching 'spark plugin is on'"),
    ("log-forbidden", "log lines", "forbidden line"),
    ("wrong-arithmetic", "answers", "'35352138' does not match"),
    ("copy-typo", "copy", "the model repeated"),
    ("stream-cut", "stream", "broke off"),
    ("stream-cut", "parallel", "with 3 concurrent streams: the stream broke off"),
    ("sampler-nan", "sampled", "the same token over and over"),
    ("tool-types", "tool call", "days='3', not the number 3"),
    ("reasoning-mixed", "reasoning", "thinking is mixed into the answer"),
    ("forgets", "conversation", "in turn 2 of a conversation"),
    ("mixes-up", "parallel", "with 3 concurrent streams"),
    ("no-prefix-hits", "prefix reuse", "turn 2 of a conversation found no tokens"),
    ("stale-prefix", "prefix reuse", "wrong answer in turn 2 of a long conversation: '48214'"),
    ("low-acceptance", "acceptance", "the minimum is 50%"),
    ("blind", "image", "a blue image was described as 'Red'"),
    ("no-drafts", "acceptance", "speculation is off"),
    ("no-cache-info", "metrics", "no sample of vllm:cache_config_info has"),
    ("unhealthy-later", "health", "HTTP 503 after the check"),
]
DOUBTS = [
    ("unsteady", "repeat", "the same greedy request gave"),
    ("sampler-wrong", "sampled", "does not match"),
    ("no-tool", "tool call", "no tool was called"),
    ("needle-lost", "needle", "does not contain a number"),
    ("needle-lost", "prefix reuse", "wrong answer in turn 1 of a long conversation"),
    ("some-drafts", "acceptance", "the minimum is 50%"),
]
SEPARATE_TESTS = {"first answer", "counters", "ready", "same run"}


def leave_out(monkeypatch, *names):
    kept = tuple(item for item in runner.CHECKS if item.name not in names)
    monkeypatch.setattr(runner, "CHECKS", kept)


def test_every_server_check_has_a_fault_that_fails_it():
    violated = {name for _, name, _ in [*VIOLATIONS, *DOUBTS]}
    assert violated | SEPARATE_TESTS | OTHER_TASKS == {"ready", *ALL_CHECKS, "same run"}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "violated", "message"), VIOLATIONS)
def test_each_engine_fault_fails_its_check(host, monkeypatch, fault, violated, message):
    similar = {
        "wrong-arithmetic": {"conversation", "parallel", "repeat"},
        "stream-cut": {"parallel", "stream"},
    }
    leave_out(monkeypatch, *similar.get(fault, set()) - {violated})
    changes = {} if violated == "prefix reuse" else {"check__prefix": None}
    monkeypatch.setattr(questions, "_COUNTER_WAIT_S", 0.3)
    failures = failed(check(host, host.serving(fault, check__questions=EXACT, **changes)))
    also = {"acceptance"} if fault == "no-drafts" else set()
    assert set(failures) - also <= {violated}
    assert message in failures[violated]


@pytest.mark.parametrize(("fault", "doubted", "message"), DOUBTS)
def test_doubtful_check_results_are_only_warnings(host, monkeypatch, fault, doubted, message):
    leave_out(monkeypatch, *{"unsteady": ("conversation",)}.get(fault, ()))
    changes = {} if doubted == "prefix reuse" else {"check__prefix": None}
    release = host.serving(fault, check__questions=EXACT, **changes)

    result = check(host, release, "full" if doubted == "prefix reuse" else "deep")

    assert (result.ok, failed(result), set(warned(result))) == (True, {}, {doubted})
    assert message in warned(result)[doubted]
    assert warned(stored_proof(host, release)) == warned(result)


THINKING = {**EXACT[1], "thinking": True}


def test_wrong_answer_after_thinking_is_only_a_warning(host):
    release = host.release(check__questions=[EXACT[0], THINKING], check__prefix=None)
    host.started(release, "wrong-arithmetic")

    result = check(host, release)

    assert (result.ok, set(warned(result))) == (True, {"answers"})
    assert "'35352138' does not match" in warned(result)["answers"]
    release = host.release(check__questions=[THINKING, EXACT[0]], check__prefix=None)
    findings = check(host, release, "quick").checks
    [first] = [finding for finding in findings if finding.name == "first answer"]
    assert "capital of France" in first.detail


def test_requests_enable_or_disable_thinking(host, monkeypatch):
    requests: list[tuple[str, bool]] = []
    ask = Engine.ask

    def record(self, path, body, timeout_s):
        thinking = body["chat_template_kwargs"]["enable_thinking"]
        requests.append((body["messages"][0]["content"], thinking))
        return ask(self, path, body, timeout_s)

    monkeypatch.setattr(Engine, "ask", record)
    leave_out(monkeypatch, "reasoning")
    check(host, host.serving(check__questions=[EXACT[0], THINKING], check__prefix=None))

    assert {thinking for text, thinking in requests if text == THINKING["prompt"]} == {True}
    assert {thinking for text, thinking in requests if text != THINKING["prompt"]} == {False}


def test_engine_crash_during_the_check_fails_it_without_warnings(host):
    release = host.release(check__questions=[EXACT[0], THINKING])
    host.started(release, "crash-later", STUB_FAULT_AFTER_S="0.3", STUB_PIECE_S="0.05")
    result = check(host, release)
    assert not result.ok
    assert warned(result) == {}
    assert "stopped responding" in failed(result)["health"]


def test_reference_page_lists_every_check_with_level_and_severity():
    page = (REPOSITORY / "docs/reference/checks.md").read_text()
    lines = page.partition("\n## Faults")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| `" in line]
    documented = [(name, level, severity.strip("`")) for name, level, severity, *_ in rows]
    of_runner = [("memory", "at a start", "must"), ("ready", "quick", "must")]
    of_runner.append(("same run", "quick", "must"))
    assert documented == of_runner + [(c.name, c.level, c.severity) for c in checks.CHECKS]
    fail_for = {name: (broken, healthy) for name, *_, broken, healthy in rows[len(of_runner) :]}
    assert all(broken for broken, _ in fail_for.values())
    can_warn = {
        c.name for c in checks.CHECKS if c.severity == "warn" or "warn" in c.run.__code__.co_consts
    }
    assert {name for name, (_, healthy) in fail_for.items() if healthy} == can_warn


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("garbage", "'ent fjord"),
        ("nan", "the same token over and over"),
        ("empty", ": '' does not match"),
        ("error-500", "HTTP 500"),
        ("wedge", "no usable answer after "),
    ],
)
def test_broken_engine_fails_the_quick_check(host, fault, message):
    timeout_s = 2 if fault == "wedge" else 6
    failures = failed(check(host, host.serving(fault, check__timeout_s=timeout_s), "quick"))
    assert message in failures["first answer"]
    also = {"counters", "metrics"} if fault == "error-500" else set()
    assert set(failures) == {"first answer", *also}


def test_restart_during_the_check_fails_it(host, monkeypatch):
    release = host.serving()
    runs = iter(["run-1", "run-2"])
    monkeypatch.setattr(systemd, "read_invocation_id", lambda unit: next(runs))

    result = runner.check(release, host.here, "quick", print)

    assert failed(result) == {"same run": "the engine was restarted during the check"}
    assert not result.ok
    assert result.invocation_id == "run-1", "the proof must not cover the next run"


def test_prefix_check_fails_if_a_cache_block_is_longer_than_the_prompt(host, monkeypatch):
    monkeypatch.setattr(questions, "_FILLER_TOKENS", 100_000)
    release = host.serving(check__prefix={"block_tokens": 100})
    assert "a cache block of 100" in failed(check(host, release))["prefix reuse"]


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


def serve_with(host, plan, fault=""):
    plan = {f"check__{key}": value for key, value in {**PLAIN, **plan}.items()}
    return host.serving(fault, **plan)


@pytest.mark.parametrize(
    ("plan", "names", "live"),
    [
        (EMBEDDING, {"embedding", "embedding in a batch"}, "dimensions"),
        (RANKING, {"ranking"}, "the correct document"),
        (CLASSES, {"classes"}, "classes"),
        (COMPLETION, {"first answer", "stream", "repeat", "parallel"}, ""),
    ],
    ids=["embedding", "ranking", "classes", "completion"],
)
def test_healthy_model_for_any_task_passes_its_checks(host, plan, names, live):
    release = serve_with(host, plan)
    result = check(host, release)
    assert result.ok, result.failed
    general = {"ready", "served names", "context length", "log lines", "counters", "health"}
    assert {finding.name for finding in result.checks} >= names | general
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
        ({**EMBEDDING, "width": 96}, "", "embedding", "128 dimensions, but the model"),
        (EMBEDDING, "mixes-up", "embedding in a batch", "different embedding in a batch"),
        (RANKING, "garbage", "ranking", "the correct document scored 1.000, the other 1.000"),
        (CLASSES, "garbage", "classes", "identical class probabilities"),
        (CLASSES, "nan", "classes", "invalid probabilities"),
        (CLASSES, "mixes-up", "classes", "different class probabilities in a batch"),
        (EMBEDDING, "counters-flat", "counters", "grew by 0"),
        (AUDIO, "blind", "sound", "1 s of audio took"),
        (COMPLETION, "garbage", "first answer", "does not match '^Paris$'"),
    ],
)
def test_fault_in_a_model_for_another_task_fails_the_check_of_that_task(
    host, monkeypatch, plan, fault, violated, message
):
    monkeypatch.setattr("spark_host.check.checks._COUNTER_WAIT_S", 0.3)
    assert message in failed(check(host, serve_with(host, plan, fault)))[violated]


def test_audio_check_passes_if_longer_sounds_use_more_tokens(host):
    result = check(host, serve_with(host, AUDIO))
    assert result.ok, result.failed
    assert "sound" in {finding.name for finding in result.checks}


def test_only_the_engine_package_has_engine_specific_names():
    package = REPOSITORY / "files/host/spark_host/engine"
    names = re.compile(r"vllm:|KV cache size:|VLLM_")
    modules = [
        path
        for folder in ("files/host", "files/contract")
        for path in (REPOSITORY / folder).rglob("*.py")
        if package not in path.parents
    ]
    assert [path for path in modules if names.search(path.read_text())] == []


def test_only_engine_plan_modules_have_engine_options():
    folder = REPOSITORY / "spark_deploy/plan"
    names = ("cluster", "engine_arguments", "guard_rails", "kv_cache")
    allowed = {folder / f"{name}.py" for name in names}
    option = re.compile(r"[\"'](?:--)?([a-z]+(?:-[a-z]+)+)[\"']")
    options = {name for path in allowed for name in option.findall(path.read_text())}
    options |= set(PROFILE_KEYS)
    assert {"max-num-seqs", "block-size", "tensor-parallel-size", "served-model-name"} <= options
    violations = set()
    for path in set(folder.rglob("*.py")) - allowed:
        text = path.read_text()
        found = options.intersection(option.findall(text))
        # The engine's name, too, except in the names of our image and plugin.
        found.update(re.findall(r"(?i)(?<!spark[-_])vllm\w*", text))
        violations |= {(str(path.relative_to(folder)), name) for name in found}
    assert violations == set()
