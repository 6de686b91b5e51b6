"""What `doctor` says of a host where another stack serves: what is there, and how to move."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_deploy.cli import doctor, main, plan
from spark_deploy.cli.query_hosts import Answer
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError
from spark_deploy.hosts.disk import Stored
from spark_deploy.hosts.survey import stopped_script
from tests.unit.operations.test_operations import NEEDS
from tests.unit.preflight.surveyed import OLLAMA, survey

RUNNING = OLLAMA.replace("STATE", "running").replace("RESTART", "always")
SECOND = RUNNING.replace("ollama", "vllm").replace("a1", "b2")
SHARDS = (("a" * 64, 40_000_000_000), ("b" * 64, 32_000_000_000))
HERE = frozenset({("66306", *SHARDS[0]), ("66306", "c" * 64, 5_000_000_000)})


def said(containers: list[str], stored: Stored | None = None, **needs: Any) -> dict[str, Any]:
    seen = dataclasses.replace(survey(containers=containers), stored=stored or Stored())
    host: Any = SimpleNamespace(name="spark-1", data={})
    wanted = dataclasses.replace(NEEDS, downloads=(("/srv/spark/sources/x", SHARDS),), **needs)
    return doctor.verdict_of(Answer(host, seen), wanted, {})


@pytest.mark.parametrize(("lines", "named"), [(["0"], False), (["3"], True), ([], False)])
def test_failed_allocations_of_the_driver_are_named(lines: list[str], named: bool) -> None:
    looks = dict(doctor._survey_rows(survey(driver_memory=lines), NEEDS))
    assert ("driver" in looks) == named
    assert "blocks" in looks


def test_other_engines_are_named_with_the_two_commands_that_move() -> None:
    found = said([RUNNING, SECOND])
    text = "\n".join(doctor.verdict_lines(found))
    assert "  others    ollama (ollama/ollama, running), vllm (vllm/vllm, running)\n" in text
    first, second = found["move"]
    assert shlex.split(first)[:3] == ["spark-deploy", "up", "spark-1"]
    option, setting = shlex.split(first)[3:]
    key, _, value = setting.partition("=")
    assert (option, key, json.loads(value)) == ("--data", "takeover", ["ollama", "vllm"])
    assert second == "spark-deploy connect spark-1"
    assert f"  move      {first}\n  then      {second}" in text


def test_engines_that_may_stay_or_are_taken_over_already_need_no_move() -> None:
    assert said([RUNNING], takeover=("ollama",))["move"] == []
    assert said([RUNNING], allow_containers=("ollama",))["move"] == []
    assert said([])["move"] == []


def test_who_stopped_a_service_is_told_and_that_a_deploy_leaves_it_so() -> None:
    record = '{"schema_version":1,"release":"main-1","at":"NOON","by":"ann@desk","until":"ONE"}'
    stopped = survey(containers=[], stopped=["main", record, "small", "torn"])
    host: Any = SimpleNamespace(name="spark-1", data={})
    text = "\n".join(doctor.verdict_lines(doctor.verdict_of(Answer(host, stopped), NEEDS, {})))
    assert text.startswith(
        "spark-1: a deploy would go ahead, and leave main and small stopped\n"
        "  stopped   main was stopped on purpose by ann@desk and is down since NOON until ONE; "
        "`spark-deploy start` starts it\n"
        "  stopped   small was stopped on purpose by someone on the host and is down since an "
        "unknown time; "
    )
    assert "stopped" not in "\n".join(doctor.verdict_lines(said([])))


def test_a_host_tells_each_stop_on_one_line_and_none_where_none_is(tmp_path: Path) -> None:
    def told() -> list[str]:
        script = ["sh", "-ec", stopped_script(str(tmp_path)) + "exit 0"]
        return subprocess.run(script, capture_output=True, text=True, check=True).stdout.split("\n")

    assert told() == ["== stopped", ""]
    (tmp_path / "main.json").write_text('{\n "at": "NOON"\n}\n')
    assert told() == ["== stopped", "main", '{ "at": "NOON"}', ""]


def test_what_lies_on_the_host_already_is_told_in_bytes_of_the_model() -> None:
    found = said([], Stored(files=HERE, folders={"a" * 64: "/data/hub"}))
    assert found["looks"]["reuse"].startswith("Reusing 40.0 of 72.0 GB found in /data/hub; ")
    assert "reuse" not in said([])["looks"]


@pytest.mark.parametrize(
    ("found_bytes", "whole_bytes", "said"),
    [
        (12_900_000, 12_900_000, "Reusing 12.9 of 12.9 MB; "),
        (12_900_000, 72_000_000_000, "Reusing 12.9 MB of 72.0 GB; "),
    ],
)
def test_small_files_are_told_in_a_unit_that_shows_them(
    found_bytes: int, whole_bytes: int, said: str
) -> None:
    assert doctor.reuse_text(doctor.Reuse(found_bytes, whole_bytes, ())).startswith(said)


def test_a_plan_asks_the_host_what_lies_there_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def look(hosts: list[Any], _ask: Any) -> list[Answer[Any]]:
        asked.extend(host.name for host in hosts)
        needs = plan.build_plan(hosts[0], estimate=True).needs
        [(sha256, size_bytes)] = {file for _, files in needs.downloads for file in files}
        stored = Stored(files=frozenset({("1", sha256, size_bytes)}), folders={sha256: "/d/hub"})
        seen = dataclasses.replace(survey(), stored=stored)
        return [Answer(host, seen if host.name == reached else None, "is off") for host in hosts]

    monkeypatch.setattr(plan, "query", look)
    monkeypatch.setattr("gevent.monkey.patch_all", lambda: None)  # for all tests after this one
    words = ["plan", "--estimate", "--profile", "base", str(CHECKOUT / "inventory/spark.py")]
    reached = "spark-1"
    assert main(words) == 0
    assert (asked, "Reusing" in capsys.readouterr().out) == ([], False)
    assert main([*words, "--on-host"]) == 0
    whole = r"on the host +Reusing (\S+) of \1 GB found in /d/hub"
    assert re.search(whole, capsys.readouterr().out)
    assert main([*words, "--on-host", "--json"]) == 0
    [document] = json.loads(capsys.readouterr().out)
    assert document["reuse"]["folders"] == ["/d/hub"]
    reached = "another"
    assert main([*words, "--on-host"]) == 1
    assert "spark-1: is off" in capsys.readouterr().err


def test_a_hub_that_is_silent_is_asked_once_for_all_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts: list[Any] = [SimpleNamespace(name=f"spark-{number}") for number in (1, 2, 3)]
    asked = []

    def planned(host: Any, *, estimate: bool) -> Any:
        asked.append((host.name, estimate))
        if not estimate:
            raise LockError.one("hub", "cannot be asked", "look at the network")
        return SimpleNamespace(needs=NEEDS)

    monkeypatch.setattr(doctor, "build_plan", planned)
    assert list(doctor._needs(hosts)) == ["spark-1", "spark-2", "spark-3"]
    assert [name for name, estimate in asked if not estimate] == ["spark-1"]
    assert capsys.readouterr().err.count("cannot be asked") == 1
