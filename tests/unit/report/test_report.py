import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hosts import (
    EVIDENCE,
    PLAN,
    PLANNED_TOKENS,
    PROOF,
    RELEASE,
    data_of,
    report_of,
    status_of,
    survey_of,
)

from spark_deploy.cli import doctor, hosts
from spark_deploy.cli.console import Options
from spark_deploy.cli.hosts import Answer
from spark_deploy.cli.report import Report, read_report, render_report
from spark_deploy.cli.report_contents import QUESTION_IDS, HostData, with_answers
from spark_deploy.config.catalog.load import read_questions
from spark_deploy.config.errors import SparkError
from tests.unit.statuses import host_status

QUESTIONS = read_questions()
ENGINE = EVIDENCE["engines"][0]


def answers_of(host):
    return {item.id: item.state for item in host.answers}


def with_engine(**fields):
    return data_of(evidence={**EVIDENCE, "engines": [{**ENGINE, **fields}]})


def with_proof(**proof):
    release = {**status_of()["releases"][0], "proof": {**PROOF, **proof}}
    return data_of(status_of(releases=[release]))


def test_every_open_question_has_a_rule():
    assert [item.id for item in QUESTIONS.all] == list(QUESTION_IDS)


def test_report_of_a_proven_release_answers_most_questions():
    result = answers_of(report_of())
    assert {name for name, state in result.items() if state == "yes"} == {
        "deployed", "neighbours", "fetched", "built", "loaded", "answers", "gdn-prefill",
        "acceptance", "watch", "rollout", "gpu-container", "start-time", "memory-left", "kv-cache",
        "speed", "heat", "driver-trouble",
    }  # fmt: skip
    assert result["needle"] == result["local"] == result["restarted"] == "open"


@pytest.mark.parametrize(
    ("text", "question", "state"),
    [
        (with_proof(portable=True), "answers", "open"),
        (with_proof(level="quick"), "answers", "open"),
        (with_proof(checks=[{"name": "answers", "ok": False}]), "answers", "no"),
        (with_proof(checks=[{"name": "log lines", "ok": False}]), "loaded", "no"),
        (with_proof(invocation_id="run-3"), "restarted", "yes"),
        (with_proof(start_memory=None), "memory-left", "open"),
        (data_of(evidence={**EVIDENCE, "kernel_log": {"xid": 2}}), "driver-trouble", "no"),
        (with_engine(rollout_state="rolled-back"), "rollout", "no"),
        (with_engine(kv_cache_tokens=int(PLANNED_TOKENS * 0.995)), "kv-cache", "yes"),
        (with_engine(kv_cache_tokens=int(PLANNED_TOKENS * 0.98)), "kv-cache", "no"),
        (data_of(evidence={**EVIDENCE, "engines": []}), "kv-cache", "open"),
        (data_of(status_of(events={"main": [{"kind": "hot"}]})), "heat", "no"),
        (data_of(status_of(jobs=[{"kind": "fetch", "state": "failed"}])), "fetched", "no"),
        (data_of(status_of(services={"main": {}})), "deployed", "open"),
    ],
)
def test_missing_evidence_leaves_a_report_question_open(text, question, state):
    assert answers_of(report_of(text))[question] == state


def test_report_lists_a_host_without_host_tools():
    result = report_of(HostData(survey_of(), host_status({}), None))
    assert len(result.notes) == 1
    assert (result.serving, result.is_spark) == (None, True)
    older = report_of(HostData(survey_of(), host_status(status_of()), None))
    assert "different version" in older.notes[0]
    assert older.serving.engine.lines == ()


def test_report_made_with_stubs_or_other_gpus_does_not_close_open_questions():
    assert report_of().is_spark
    stubbed = report_of(data_of(stubs=["ii  labstub-driver 580.159.03+labstub"]))
    other = with_answers(replace(report_of(), versions={"gpu": "NVIDIA H200"}))
    for report in (stubbed, other):
        assert not report.is_spark
        assert set(answers_of(report).values()) == {"open"}
    assert stubbed.stand_ins
    assert other.answers[0].text.startswith("not a Spark: NVIDIA H200; ")


def test_a_report_can_be_read_from_a_file(tmp_path):
    report = Report(1, "2026-11-22T12:00:00Z", "1.0", (report_of(),))
    path = tmp_path / "a.json"
    path.write_text(render_report(report))
    assert read_report(path) == report
    text = path.read_text()
    assert json.loads(text)["hosts"][0]["serving"]["engine"]["lines"] == ENGINE["lines"]
    for wrong in (text.replace('"at"', '"when"'), text[:-9], "# nothing\n"):
        path.write_text(wrong)
        with pytest.raises(SparkError, match=r"a\.json"):
            read_report(path)


def test_report_contains_the_release_but_not_the_host_name():
    result = report_of()
    assert result.name == "host-1"
    assert result.serving.release == RELEASE
    assert result.versions["image"] == "vllm@sha256:" + "a1" * 32
    assert result.versions["nccl"] == "2.29.3"


def test_additional_services_appear_only_as_a_count():
    services = {"main": {"active": RELEASE}, "embed": {"active": "embed-0123456789ab"}}
    result = report_of(data_of(status_of(services=services)))
    assert result.serving.engine.kv_cache_tokens == ENGINE["kv_cache_tokens"]
    assert result.notes == ("this report excludes 1 other running services",)


def test_report_omits_data_of_an_unreachable_host_but_lists_the_host(tmp_path, monkeypatch, capsys):
    selected = [SimpleNamespace(name=name) for name in ("spark-a3f2", "spark-b7c1")]
    answers = [Answer(selected[0], data_of()), Answer(selected[1], None, "unreachable: no")]
    for name, result in {"select_hosts": selected, "build_plan": PLAN}.items():
        monkeypatch.setattr(doctor, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(hosts, "query", lambda *_: answers)
    out = tmp_path / "sent.json"
    assert doctor.doctor.callback.__wrapped__(Options(), as_report=True, out=str(out)) == 1
    captured = capsys.readouterr()
    assert "spark-b7c1: unreachable: no" in captured.err
    assert "spark-a3f2 is host-1 in the report" in captured.err
    assert "host-1: 21 questions, 17 yes, 1 no, 3 open" in captured.out
    assert "spark-a3f2" not in out.read_text()
    assert len(read_report(out).hosts) == 1
