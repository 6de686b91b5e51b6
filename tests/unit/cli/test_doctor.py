import dataclasses
import json
import re
import shlex
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from spark_deploy.cli import doctor, hosts, main, plan
from spark_deploy.cli.hosts import Answer
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError
from spark_deploy.hosts.disk import StoredFiles
from spark_deploy.hosts.survey import stopped_script
from tests.unit.operations.test_operations import NEEDS
from tests.unit.preflight.surveyed import ollama, survey

RUNNING = ollama()
SECOND = RUNNING.replace("ollama", "vllm").replace("a1", "b2")
SHARDS = (("a" * 64, 40_000_000_000), ("b" * 64, 32_000_000_000))
FILES = frozenset({("66306", *SHARDS[0]), ("66306", "c" * 64, 5_000_000_000)})


def make_verdict(host_survey, **needs):
    host: Any = SimpleNamespace(name="spark-1", data={})
    answer, surveys = Answer(host, host_survey), {host.name: host_survey}
    return doctor.make_verdict(answer, dataclasses.replace(NEEDS, **needs), surveys)


def text_of(verdict):
    return "\n".join(doctor.verdict_lines(verdict))


def test_doctor_shows_problems_and_warnings_with_fixes():
    verdict = {
        "host": "lab-1", "reachable": True, "stubbed": ["driver 580+labstub"], "stopped": {},
        "problems": [{"where": "disk /", "what": "1 GiB free", "fix": "free 9 GiB"}],
        "warnings": [{"where": "kernel", "what": "a reboot is pending", "fix": "reboot"}],
        "looks": {"system": "debian 12 on x86_64"}, "move": [],
    }  # fmt: skip
    text = text_of(verdict)
    for part in (
        "would reject this host for 1 reason\n", "REFUSED   disk /: 1 GiB free", "fix: free 9 GiB",
        "warning   kernel", "stand-ins driver 580+labstub",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(("lines", "is_shown"), [(["0"], False), (["3"], True), ([], False)])
def test_doctor_shows_failed_driver_allocations(lines, is_shown):
    rows = make_verdict(survey(driver_memory=lines))["looks"]
    assert ("driver" in rows) == is_shown
    assert "blocks" in rows


def test_doctor_lists_other_engines_with_commands_to_replace_them():
    verdict = make_verdict(survey(containers=[RUNNING, SECOND]))
    text = text_of(verdict)
    assert "  others    ollama (ollama/ollama, running), vllm (vllm/vllm, running)\n" in text
    first, second = verdict["move"]
    *command, option, setting = shlex.split(first)
    key, _, value = setting.partition("=")
    assert command == ["spark-deploy", "up", "spark-1"]
    assert (option, key, json.loads(value)) == ("--data", "takeover", ["ollama", "vllm"])
    assert second == "spark-deploy connect spark-1"
    assert f"  move      {first}\n  then      {second}" in text


@pytest.mark.parametrize("setting", ["takeover", "allow_containers"])
def test_containers_listed_in_settings_get_no_replacement_command(setting):
    assert make_verdict(survey(containers=[RUNNING]), **{setting: ("ollama",)})["move"] == []
    assert make_verdict(survey(containers=[]))["move"] == []


def test_doctor_lists_stopped_services_and_a_deploy_leaves_them_stopped():
    record = '{"schema_version":1,"release":"main-1","at":"NOON","by":"ann@desk","until":"ONE"}'
    verdict = make_verdict(survey(containers=[], stopped=["main", record, "small", "torn"]))
    assert text_of(verdict).startswith(
        "spark-1: a deploy would proceed, and leave main and small stopped\n  stopped   "
    )
    assert list(verdict["stopped"]) == ["main", "small"]
    for part in ("ann@desk", "NOON; it stays down until ONE"):
        assert part in verdict["stopped"]["main"]
    assert "unknown time" in verdict["stopped"]["small"]
    assert "stopped" not in text_of(make_verdict(survey(containers=[])))
    waits = '{"schema_version":1,"release":"small-1","at":"NOON","on_request":true}'
    assert "stopped" not in text_of(make_verdict(survey(containers=[], stopped=["small", waits])))


def test_doctor_reads_one_stopped_service_per_line(tmp_path):
    def lines():
        script = ["sh", "-ec", stopped_script(str(tmp_path)) + "exit 0"]
        return subprocess.run(script, capture_output=True, text=True, check=True).stdout.split("\n")

    assert lines() == ["== stopped", ""]
    (tmp_path / "main.json").write_text('{\n "at": "NOON"\n}\n')
    assert lines() == ["== stopped", "main", '{ "at": "NOON"}', ""]


def test_doctor_counts_files_on_the_host_as_reusable():
    downloads = (("/srv/spark/sources/x", SHARDS),)
    stored = StoredFiles(files=FILES, folders={"a" * 64: "/data/hub"})
    host_survey = dataclasses.replace(survey(containers=[]), stored=stored)
    rows = make_verdict(host_survey, downloads=downloads)["looks"]
    assert rows["reuse"].startswith("will reuse 40.0 of 72.0 GB found in /data/hub;")
    assert "reuse" not in make_verdict(survey(containers=[]), downloads=downloads)["looks"]


def test_plan_option_on_host_shows_files_already_on_hosts(monkeypatch, capsys):
    queried: list[str] = []
    is_reached = True

    def query(hosts, _read):
        queried.extend(host.name for host in hosts)
        needs = plan.build_plan(hosts[0], estimate=True).preflight
        [(sha256, size_bytes)] = {file for _, files in needs.downloads for file in files}
        stored = StoredFiles(
            files=frozenset({("1", sha256, size_bytes)}), folders={sha256: "/d/hub"}
        )
        result = dataclasses.replace(survey(), stored=stored) if is_reached else None
        return [Answer(host, result, "is off") for host in hosts]

    monkeypatch.setattr(hosts, "query", query)
    monkeypatch.setattr("gevent.monkey.patch_all", lambda: None)
    words = ["plan", "--estimate", "--profile", "base", str(CHECKOUT / "inventory/spark.py")]
    assert main(words) == 0
    assert (queried, "will reuse" in capsys.readouterr().out) == ([], False)
    assert main([*words, "--on-host"]) == 0
    whole = r"on the host +will reuse (\S+) of \1 GB found in /d/hub"
    assert re.search(whole, capsys.readouterr().out)
    assert main([*words, "--on-host", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["reuse"]["folders"] == ["/d/hub"]
    is_reached = False
    assert main([*words, "--on-host"]) == 1
    assert "spark-1: is off" in capsys.readouterr().err


def test_doctor_queries_an_unreachable_hub_once(monkeypatch, capsys):
    hosts: list[Any] = [SimpleNamespace(name=f"spark-{number}") for number in (1, 2, 3)]
    calls = []

    def build_plan(host, *, estimate):
        calls.append((host.name, estimate))
        if not estimate:
            raise LockError.single("hub", "unreachable", "check the network")
        return SimpleNamespace(preflight=host.name)

    monkeypatch.setattr(doctor, "build_plan", build_plan)
    assert doctor._preflight_plans(hosts) == {host.name: host.name for host in hosts}
    assert [name for name, estimate in calls if not estimate] == ["spark-1"]
    assert capsys.readouterr().err.count("unreachable") == 1
