import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from spark_contract import units
from spark_contract.documents import parse, to_json
from spark_contract.job import Progress, parse_progress
from spark_contract.paths import ENGINE_SOCKET, Paths
from spark_contract.status import KeepList
from spark_contract.tool import ERROR, HOST_TOOL, HostToolError, parse_problem
from spark_contract.units import mount_unit
from spark_host import jobs
from spark_host.system import host as system

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import digest_of
from spark_deploy.plan.gateway import gateway_file
from spark_deploy.plan.jobs import discard_jobs, keep_list, plan_jobs
from spark_deploy.plan.release import limits_drop_in, release_files
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import plan_of, shipped


def write_files(plan, root):
    paths = Paths(root)
    work = (*plan_jobs(plan, ()), *discard_jobs(plan))
    for file in (
        *release_files(plan),
        gateway_file(plan.gateway),
        *(file for item in work for file in item.files()),
    ):
        paths.below(file.path).parent.mkdir(parents=True, exist_ok=True)
        paths.below(file.path).write_bytes(file.content)
    return paths


def assert_host_reads(plan, root):
    paths = write_files(plan, root)
    release = system.load_release(plan.release.name, paths)
    assert to_json(release) == release_files(plan)[0].content.decode()
    assert (release.digest, release.serve_unit) == (plan.release.digest, plan.release.serve_unit)
    assert system.load_gateway("main", paths) == plan.gateway.settings
    for work in (*plan_jobs(plan, ()), *discard_jobs(plan)):
        assert jobs.load_job(work.job.digest12, paths) == work.job
    assert parse(KeepList, to_json(keep_list(plan))) == keep_list(plan)


def test_host_tools_can_read_every_file_of_a_plan(tmp_path):
    for model, profile, plan in shipped():
        if isinstance(plan, HostPlan):
            assert_host_reads(plan, tmp_path / f"{model}-{profile}")


@pytest.mark.parametrize(
    "choices",
    [
        {"serve.expose": "lan", "serve.tls": "private-ca"},
        {"checkpoint.layout": "full", "checkpoint.keep_base": False},
        {"hub.token": {"env": "TOKEN"}, "keep_ready": [{"model": "large", "profile": "base"}]},
    ],
)
def test_host_reads_documents_from_different_settings(choices, tmp_path):
    assert_host_reads(plan_of(**choices), tmp_path)


def test_engine_arguments_match_the_release(tmp_path):
    plan = plan_of(**{"engine.max_sequences": 3})
    release = plan.release
    assert release.engine.max_sequences == 3
    assert release.engine.argv[-2:] == ("--uds", ENGINE_SOCKET)
    socket = Paths(Path("/")).engine_socket(release.service)
    assert (socket.parent.name, socket.name) == (release.service, Path(ENGINE_SOCKET).name)


def test_release_digest_covers_document_and_restart_limits(tmp_path):
    plan = plan_of()
    written = json.loads(release_files(plan)[0].content)
    rest = {key: value for key, value in written.items() if key not in ("name", "digest")}
    whole = {**rest, "restart": {"delay_s": 60, "burst": 3, "interval_s": 27780}}
    assert digest_of(whole) == plan.release.digest == written["digest"]
    assert "StartLimitIntervalSec=27780\n" in limits_drop_in(plan.release)


def test_rejects_invalid_log_pattern(tmp_path):
    paths = write_files(plan := plan_of(), tmp_path / "host")
    path = paths.releases / plan.release.name / "release.json"
    data = json.loads(path.read_text())
    data["check"]["log_required"] = ["("]
    path.write_text(json.dumps(data))
    with pytest.raises(HostToolError, match=r"check: .*'\('"):
        system.load_release(plan.release.name, paths)


def test_parses_printed_error_line():
    error = HostToolError("/a/b: c", "is gone: really", "look: there")
    problem = parse_problem(f"{ERROR}{error}")
    assert problem.line == str(error)
    assert problem.fix == "look: there"
    assert parse_problem("all is well") is None


def test_parses_printed_progress():
    progress = Progress("fetch", 5, 10, 2, None)
    assert parse_progress(progress.line(), None) == progress
    assert parse_progress("phase=x bytes=1", 7) == Progress("x", 1, 7, None, None)
    invalid = parse_progress("phase=x bytes=inf eta_s=1e999 total=nan", None)
    assert invalid == Progress("x", None, None, None, None)


@pytest.mark.parametrize("template", [units.SERVE, units.SWITCH, units.WATCH, units.GATEWAY,
                                      units.JOB, units.PREPARE])  # fmt: skip
def test_unit_files_exist_and_start_the_host_tools(template):
    text = (CHECKOUT / "files/units" / template.unit("")).read_text("utf-8")
    programs = re.findall(r"^Exec\w+=-?(\S*spark-host)", text, re.MULTILINE)
    assert set(programs) <= {HOST_TOOL}
    named = set(re.findall(r"spark-\w+@%i\.\w+", text))
    known = {item.unit("%i") for item in (units.SERVE, units.SWITCH, units.WATCH, units.GATEWAY)}
    assert named <= known


def test_unit_names_come_from_the_contract():
    literal_name = re.compile(r"spark-(?:serve|switch|watch|gateway|job|prepare)@[^A-Z`]")
    result = [
        f"{path.relative_to(CHECKOUT)}: {line.strip()}"
        for room in ("spark_deploy", "files/host", "files/contract", "roles", "deploys")
        for path in sorted((CHECKOUT / room).rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if literal_name.search(line) and "``" not in line
    ]
    assert result == []


@pytest.mark.skipif(shutil.which("systemd-escape") is None, reason="needs systemd-escape")
@pytest.mark.parametrize("path", ["/run/spark/engines/main", "/run/spark/engines/my-one", "/a b"])
def test_mount_unit_matches_systemd_escape(path):
    words = ["systemd-escape", "--path", "--suffix=mount", path]
    output = subprocess.run(words, capture_output=True, text=True, check=True)
    assert mount_unit(path) == output.stdout.strip()
