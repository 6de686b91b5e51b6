"""A report says what the host shows, answers what is open, and can be read again from its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hosts import (
    EVIDENCE,
    PLAN,
    PLANNED_TOKENS,
    PROOF,
    RELEASE,
    report_of,
    said_of,
    status_of,
    survey_of,
)

from spark_deploy.cli import doctor
from spark_deploy.cli.options import Options
from spark_deploy.cli.query_hosts import Answer
from spark_deploy.cli.report import HostReport, Report, file_text, read_report
from spark_deploy.cli.report_contents import ANSWERS, HostData, with_answers
from spark_deploy.config.catalog.load import read_questions
from spark_deploy.config.errors import SparkError
from tests.unit.statuses import told

QUESTIONS = read_questions()
ENGINE = EVIDENCE["engines"][0]


def answers_of(host: HostReport) -> dict[str, str]:
    return {one.id: one.state for one in host.answers}


def without(**proof: object) -> HostData:
    release = {**status_of()["releases"][0], "proof": {**PROOF, **proof}}
    return said_of(status_of(releases=[release]))


def test_every_open_question_is_answered_by_a_function_of_its_name() -> None:
    assert [one.id for one in QUESTIONS.all] == list(ANSWERS)


def test_a_spark_that_serves_what_is_proven_answers_nearly_all() -> None:
    found = answers_of(report_of())
    assert {name for name, state in found.items() if state == "yes"} == {
        "deployed", "neighbours", "fetched", "built", "loaded", "answers", "gdn-prefill",
        "acceptance", "watch", "rollout", "gpu-container", "start-time", "memory-left", "kv-cache",
        "speed", "heat", "driver-trouble",
    }  # fmt: skip
    assert found["needle"] == found["local"] == found["restarted"] == "open"


def test_an_answer_says_what_it_was_taken_from() -> None:
    told_of = {one.id: one.text for one in report_of().answers}
    assert told_of["acceptance"] == "75.0% of 4,000 drafted tokens since the start"
    assert told_of["memory-left"] == "least 17.0 GiB, floor 4.0 GiB"
    assert told_of["kv-cache"].startswith(
        f"{PLANNED_TOKENS + 1000:,} tokens, planned {PLANNED_TOKENS:,} ("
    )
    assert told_of["speed"] == "one_stream_tokens_per_s 51.5"
    assert "requested=triton" in told_of["gdn-prefill"]


@pytest.mark.parametrize(
    ("said", "question", "state"),
    [
        (without(portable=True), "answers", "open"),
        (without(level="quick"), "answers", "open"),
        (without(checks=[{"name": "answers", "ok": False}]), "answers", "no"),
        (without(checks=[{"name": "log lines", "ok": False}]), "loaded", "no"),
        (without(invocation_id="run-3"), "restarted", "yes"),
        (without(start_memory=None), "memory-left", "open"),
        (said_of(evidence={**EVIDENCE, "kernel_log": {"xid": 2}}), "driver-trouble", "no"),
        (
            said_of(evidence={**EVIDENCE, "engines": [{**ENGINE, "rollout_state": "rolled-back"}]}),
            "rollout",
            "no",
        ),
        (said_of(evidence={**EVIDENCE, "engines": []}), "kv-cache", "open"),
        (said_of(status_of(events={"main": [{"kind": "hot"}]})), "heat", "no"),
        (said_of(status_of(jobs=[{"kind": "fetch", "state": "failed"}])), "fetched", "no"),
        (said_of(status_of(services={"main": {}})), "deployed", "open"),
    ],
)
def test_what_a_host_does_not_show_stays_open_and_what_went_wrong_is_a_no(
    said: HostData, question: str, state: str
) -> None:
    assert answers_of(report_of(said))[question] == state


def test_a_host_with_nothing_of_ours_is_reported_too() -> None:
    found = report_of(HostData(survey_of(), told({}), None))
    assert len(found.notes) == 1
    assert (found.serving, found.is_spark) == (None, True)
    older = report_of(HostData(survey_of(), told(status_of()), None))
    assert "another version" in older.notes[0]
    assert older.serving is not None
    assert older.serving.engine.lines == ()


def test_what_a_stand_in_shows_counts_for_no_spark() -> None:
    assert report_of().is_spark
    stubbed = report_of(said_of(stubs=["ii  labstub-driver 580.159.03+labstub"]))
    assert stubbed.stand_ins
    assert not stubbed.is_spark
    assert set(answers_of(stubbed).values()) == {"open"}
    told_of = {one.id: one.text for one in stubbed.answers}
    assert told_of["driver-trouble"] == "stand-ins; 0 Xid lines since the boot"


def test_a_machine_with_another_gpu_answers_nothing_for_sparks() -> None:
    found = with_answers(replace(report_of(), versions={"gpu": "NVIDIA H200"}))
    assert set(answers_of(found).values()) == {"open"}
    assert found.answers[0].text.startswith("not a Spark: NVIDIA H200; ")


@pytest.mark.parametrize(("tokens", "state"), [(0.995, "yes"), (0.98, "no")])
def test_a_cache_is_as_planned_where_the_engine_counts_as_much_as_the_plan_does(
    tokens: float, state: str
) -> None:
    counted = {**ENGINE, "kv_cache_tokens": int(PLANNED_TOKENS * tokens)}
    found = report_of(said_of(evidence={**EVIDENCE, "engines": [counted]}))
    assert answers_of(found)["kv-cache"] == state


def test_a_report_is_read_again_from_its_file(tmp_path: Path) -> None:
    report = Report(1, "2026-11-22T12:00:00Z", "1.0", (report_of(),))
    path = tmp_path / "a.json"
    path.write_text(file_text(report))
    assert read_report(path) == report
    text = path.read_text()
    assert json.loads(text)["hosts"][0]["serving"]["engine"]["lines"] == ENGINE["lines"]
    for wrong in (text.replace('"at"', '"when"'), text[:-9], "# nothing\n"):
        path.write_text(wrong)
        with pytest.raises(SparkError, match=r"a\.json"):
            read_report(path)


def test_a_report_names_the_release_and_never_the_host() -> None:
    found = report_of()
    assert found.name == "host-1"
    assert found.serving is not None
    assert found.serving.release == RELEASE
    assert found.versions["image"] == "vllm@sha256:" + "a1" * 32
    assert found.versions["nccl"] == "2.29.3"


def test_of_several_services_the_main_one_is_told_and_the_others_are_counted() -> None:
    services = {"main": {"active": RELEASE}, "embed": {"active": "embed-0123456789ab"}}
    found = report_of(said_of(status_of(services=services)))
    assert found.serving is not None
    assert found.serving.engine.kv_cache_tokens == ENGINE["kv_cache_tokens"]
    assert [note[:15] for note in found.notes] == ["1 more services"]


def test_a_host_that_cannot_be_asked_is_named_here_and_left_out_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [SimpleNamespace(name=name) for name in ("spark-a3f2", "spark-b7c1")]
    answers = [Answer(hosts[0], said_of()), Answer(hosts[1], None, "cannot be reached: no")]
    for name, result in {"select_hosts": hosts, "build_plan": PLAN, "query": answers}.items():
        monkeypatch.setattr(doctor, name, lambda *_, result=result, **__: result)
    out = tmp_path / "sent.json"
    assert doctor.doctor.callback.__wrapped__(Options(), is_report=True, out=str(out)) == 1
    told = capsys.readouterr()
    assert "spark-b7c1: cannot be reached: no" in told.err
    assert "spark-a3f2 is host-1 in the report" in told.err
    assert "host-1: 17 yes, 1 no, 3 open of 21 questions" in told.out
    assert "spark-a3f2" not in out.read_text()
    assert len(read_report(out).hosts) == 1
