"""Settings that have code of others run are refused, and taken on only by the rail's own name."""

import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.plan.resolve import resolve
from tests.unit.planning.plans import CATALOG, problems, settings_of, whats

WHY = "reviewed by us in November"
OPTIONS = {
    "trust-remote-code": [
        {"trust-remote-code": True},
        {"trust_remote_code": True},
        {"trust-remote-code": "true"},
    ],
    "code-by-option": [
        {"worker-cls": "ours.Worker"},
        {"worker_extension_cls": "ours.Worker"},
        {"scheduler-cls": "ours.Scheduler"},
        {"logits-processors": ["ours:Processor"]},
        {"io-processor-plugin": "ours"},
        {"reasoning-parser-plugin": "/model/parser.py"},
        {"tool-parser-plugin": "/vllm-workspace/parser.py"},
        {"middleware": ["ours.middleware"]},
        {"model-class-overrides": {"A": "ours:B"}},
        {"distributed-executor-backend": "ours.Executor"},
        {"compilation-config": {"backend": "ours.backend"}},
        {"compilation-config": '{"backend": "ours.backend"}'},
    ],
    "pickled-weights": [{"load-format": "pt"}, {"load_format": "NpCache"}],
}
CASES = [
    *((rule, {"engine.options": one}) for rule, found in OPTIONS.items() for one in found),
    ("insecure-serialisation", {"engine.environment": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}}),
    ("insecure-serialisation", {"engine.environment": {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "y"}}),
    ("docker-on-the-network", {"docker.daemon": {"hosts": ["fd://", "tcp://0.0.0.0:2375"]}}),
    ("docker-on-the-network", {"docker.daemon": {"hosts": "tcp://127.0.0.1:2375"}}),
    ("docker-on-the-network", {"docker.daemon": {"hosts": [":2375"]}}),
]
CALM = [
    {"engine.options": {"trust-remote-code": False}},
    {"engine.options": {"no-trust-remote-code": True}},
    {"engine.options": {"reasoning-parser": "qwen3"}},
    {"engine.environment": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}},
    {"docker.daemon": {"hosts": ["unix:///var/run/docker.sock", "fd://"]}},
    {"docker.daemon": {"log-opts": {"max-size": "50m"}}},
]


@pytest.mark.parametrize(("rule", "chosen"), CASES)
def test_what_has_code_of_others_run_is_refused_by_name(rule, chosen):
    assert any(f"guard rail {rule}:" in what for what in whats(**chosen))


@pytest.mark.parametrize("chosen", CALM)
def test_what_has_none_run_stays_free(chosen):
    assert whats(**chosen) == []


@pytest.mark.parametrize(("rule", "chosen"), CASES)
def test_only_the_override_of_that_name_lets_it_pass_and_the_plan_warns(rule, chosen):
    other = "docker-on-the-network" if rule == "trust-remote-code" else "trust-remote-code"
    assert whats(**chosen, override_rails={other: WHY})
    if rule == "pickled-weights":  # nothing could be loaded
        assert any("cannot be overridden" in what for what in whats(override_rails={rule: WHY}))
        return
    found = resolve(settings_of(**chosen, override_rails={rule: WHY}), CATALOG)
    assert any(f"{rule} is overridden ({WHY})" in text for text in found.warnings)


def test_the_refusal_names_the_override():
    [problem] = problems(**{"engine.options": {"trust-remote-code": True}})
    assert "override_rails: {trust-remote-code: WHY}" in problem.fix


@pytest.mark.parametrize(
    ("rule", "what", "fix"),
    [
        ("trust-remote-kode", "not a guard rail", "did you mean trust-remote-code"),
        ("memory-fraction-unsafe", "cannot be overridden", "allowed: "),
    ],
)
def test_an_override_of_nothing_is_refused(rule, what, fix):
    [problem] = problems(override_rails={rule: WHY})
    assert what in problem.what
    assert fix in problem.fix


def test_an_override_needs_a_reason():
    with pytest.raises(SettingsError):
        settings_of(override_rails={"trust-remote-code": ""})


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"engine.options": {"enable-log-requests": True}}, True),
        ({"engine.options": {"enable_log_outputs": True}}, True),
        ({"engine.environment": {"VLLM_LOGGING_LEVEL": "debug"}}, True),
        ({"engine.environment": {"VLLM_REQUEST_BODY_LOG_LEVEL": "INFO"}}, True),
        ({"engine.options": {"no-enable-log-requests": True}}, False),
        ({"engine.options": {"enable-log-requests": False}}, False),
        ({"engine.environment": {"VLLM_LOGGING_LEVEL": "WARNING"}}, False),
        ({}, False),
    ],
)
def test_an_engine_that_would_print_questions_is_warned_of(chosen, told):
    warnings = resolve(settings_of(**chosen), CATALOG).warnings
    assert any("questions-in-the-journal" in text for text in warnings) == told
