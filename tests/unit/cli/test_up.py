from dataclasses import replace
from types import SimpleNamespace

import pytest
from spark_contract.job import JobState, Progress
from spark_contract.records import Rollout
from spark_contract.tool import COMPILING

from spark_deploy.cli import connect, hosts, up, update
from spark_deploy.cli.console import Options
from spark_deploy.cli.hosts import Answer
from spark_deploy.cli.up import HostState, preview
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.status import HostStatus, Jobs, JobStates, Status
from spark_deploy.inventory.host_keys import HostKey
from spark_deploy.inventory.login import LoginResult
from spark_deploy.lock.resolve import Names
from spark_deploy.plan.jobs import plan_jobs
from tests.unit.cli.targets import target_of, write_inventory
from tests.unit.planning.plans import plan_of
from tests.unit.statuses import host_status

OLD = "main-aaaaaaaaaaaa"
PLAN = plan_of("large", "v2")


def run_up(*, dry):
    return up.up.callback.__wrapped__(Options(inventory="inventory/lab.py", dry=dry))


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "deploy"])
def test_a_missing_ssh_key_is_reported_before_a_password_prompt(dry, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    host = SimpleNamespace(name="spark-1", data={})
    monkeypatch.setattr(up, "select_hosts", lambda _options: [host])
    monkeypatch.setattr(hosts.login, "try_key", lambda _endpoint: LoginResult(False, False))
    monkeypatch.setattr(
        hosts.host_keys,
        "query_host_key",
        lambda host: HostKey(host, "spark-1", tmp_path, "new", None, None),
    )
    monkeypatch.setattr(up.changes, "deploy", lambda *_: 1 / 0)
    with pytest.raises(SparkError, match="run `ssh-keygen -t ed25519`"):
        run_up(dry=dry)
    assert "password" not in capsys.readouterr().err


def test_a_dry_run_prints_the_pyinfra_command(monkeypatch, capsys):
    monkeypatch.setattr(up, "select_hosts", lambda _options: [])
    monkeypatch.setattr(up, "query", lambda _hosts, _read: [])
    assert run_up(dry=True) == 0
    message, command = capsys.readouterr().err.splitlines()
    assert "no changes made" in message
    assert command.endswith("deploy.py --dry")


def test_up_offers_to_write_a_command_line_choice_to_the_settings(tmp_path, monkeypatch, capsys):
    inventory = str(write_inventory(tmp_path / "inventory/spark.py", "a"))
    settings = tmp_path / "group_vars/all.yml"
    settings.parent.mkdir()
    settings.write_text("model: qwen3.5-35b\nprofile: v2\n")
    assert up._temporary_choice(Options(inventory=inventory, model="qwen3.5-35b")) == ""
    options = Options(inventory=inventory, model="qwen3.5-122b", profile="agent")
    choice = up._temporary_choice(options)
    assert choice == "qwen3.5-122b/agent"
    up._offer_to_save(choice, replace(options, yes=True))
    assert f"spark-deploy use {choice}" in capsys.readouterr().err
    assert "35b" in settings.read_text()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(up.click, "confirm", lambda *_, **__: True)
    up._offer_to_save(choice, options)
    assert settings.read_text() == "model: qwen3.5-122b\nprofile: agent\n"


def test_up_locks_names_without_the_options_of_the_update_command(monkeypatch, tmp_path):
    path = tmp_path / "spark.lock.yml"
    host = SimpleNamespace(catalog=None, loaded=SimpleNamespace(lock_path=path), settings=None)
    monkeypatch.setattr(update, "select_hosts", lambda _options: [host])
    monkeypatch.setattr(update, "required_names", lambda *_: Names(frozenset(), frozenset()))
    monkeypatch.setattr(update, "verify_names_if_online", lambda *words: words[2])
    assert update.lock_names(Options(), only_missing=True) == 0


def status(active=OLD, profile="agent", **release):
    known = {"name": OLD, "model": "large", "profile": profile, "proof": None, **release}
    service = {
        "known_good": active, "enabled": [active] if active else [], "active": active,
        "traffic_open": True, "gateway": {"active": "active"},
    }  # fmt: skip
    return {"releases": [known], "services": {"main": service}}


def jobs(state, fetched_bytes=0):
    progress = Progress("download", fetched_bytes, None, None, None)
    return Jobs({
        work.job.digest12: JobState(
            work.job.digest12, work.job.title, work.job.kind, state, "", None, None, progress,
            None, (),
        )
        for work in plan_jobs(PLAN, read_payload().image_context)
    })  # fmt: skip


def text_of(data, states=None, last=None):
    state = HostState(host_status(data) if data else HostStatus(None), states or Jobs({}), last)
    return preview(PLAN, Answer(SimpleNamespace(name="spark-1"), state))["text"]


def test_preview_of_a_new_host_shows_downloads_and_builds():
    text = text_of(None)
    assert text.startswith("new host: will serve large with v2; downloads ")
    for part in ("an image of", "builds the checkpoint", "starts for the first time"):
        assert part in text
    assert text.endswith(COMPILING)


def test_preview_of_a_profile_change_shows_the_downtime():
    times = {"drain": 3.0, "stop": 10.0, "memory": 2.0, "start": 300.0, "check": 28.0}
    assert text_of(status(), jobs("done"), Rollout(OLD, times_s=times)) == (
        "agent → v2 (large); nothing to download; engine restarts; clients get 503 for "
        f"about 6 minutes (the last start took 5:40); plus {COMPILING}"
    )


@pytest.mark.parametrize(
    ("release", "text"),
    [
        ({"model": "small"}, "small with agent → large with v2; "),
        ({"profile": "v2"}, "large with v2 with changed settings; "),
        ({"name": PLAN.release.name}, "large with v2 keeps running and will be checked again; "),
    ],
)
def test_preview_shows_old_and_new_release(release, text):
    active = release.get("name", OLD)
    assert text_of(status(active, **release)).startswith(text)


@pytest.mark.parametrize(("name", "compiles"), [(OLD, False), ("embed-aaaaaaaaaaaa", True)])
def test_preview_omits_compilation_if_a_release_has_the_same_cache(name, compiles):
    data = status()
    data["releases"].append({**data["releases"][0], "name": name, "cache": PLAN.cache_dir})
    assert text_of(data).endswith(COMPILING) is compiles


@pytest.mark.parametrize(
    ("release", "text"),
    [(OLD, "run this command again after the rollout to change to large with v2"),
     (PLAN.release.name, "this run attaches to it")],
)  # fmt: skip
def test_up_attaches_only_to_a_running_rollout_of_the_same_release(release, text):
    data = status(None, name=release)
    rollout = {"release": release, "since": "2026-11-21T10:00:00Z", "phase": "start"}
    data["services"]["main"]["rollout"] = rollout
    first, second = text_of(data).split("; ", 1)
    assert first.startswith("rollout of large with agent in progress since 2026-11-21T10:00:00Z (")
    assert second.startswith(text)


@pytest.mark.parametrize(
    ("last", "proof", "text"),
    [
        ("switched", None, ", which takes about a minute (the last start took 1:10)"),
        ("rolled-back", None, " for the first time (duration unknown)"),
        (None, {}, " again (duration of the last start unknown)"),
    ],
)
def test_preview_shows_duration_of_the_last_successful_start(last, proof, text):
    data = status(None, name=PLAN.release.name, cache=PLAN.cache_dir, proof=proof)
    rollout = Rollout(PLAN.release.name, state=last, times_s={"start": 70.0}) if last else None
    assert text_of(data, jobs("done"), rollout).endswith(f"then the engine starts{text}")


@pytest.mark.parametrize(
    ("data", "release"), [(status(None), PLAN.release.name), (status(OLD), OLD), (None, None)]
)
def test_preview_reads_the_last_rollout_of_the_serving_or_planned_release(data, release):
    commands = []

    def run_shell_command(line, **_):
        commands.append(line)
        return False, SimpleNamespace(stdout="")

    facts = {Status: host_status(data) if data else HostStatus(None), JobStates: Jobs({})}
    host = SimpleNamespace(
        get_fact=lambda fact, **_: facts[fact], run_shell_command=run_shell_command, data={}
    )
    assert up.read_state(host, PLAN).last_rollout is None
    assert [command.split()[-1] for command in commands] == ([release] if release else [])


@pytest.mark.parametrize("others", [True, False])
def test_preview_shows_changes_to_additional_services(others, monkeypatch):
    monkeypatch.setattr(
        HostStatus, "unproven_reason", lambda _self, name, _release: "new" * (name != "main")
    )
    plan, data = PLAN, status()
    if others:
        release = replace(plan.release, name="small-1", service="small")
        plan = replace(plan, services=(replace(plan, release=release),))
        data["services"]["gone"] = {**data["services"]["main"], "enabled": ["gone-1"]}
    state = HostState(host_status(data), Jobs({}), None)
    result = preview(plan, Answer(SimpleNamespace(name="a"), state))
    assert result["changes"] == others
    assert result["text"].startswith("already serves large with v2")
    assert result["text"].split("; ")[1:] == [
        "service small: will serve large with v2",
        "service gone: will stop, because the settings no longer list it",
    ] * others  # fmt: skip


def test_preview_subtracts_bytes_already_downloaded():
    assert " GB of files" in text_of(status(None), jobs("waiting"))
    assert "of files" not in text_of(status(None), jobs("running", fetched_bytes=10**12))


@pytest.mark.parametrize(
    ("code", "failing", "asked"),
    [
        (0, [], ["spark-1", "spark-2"]),
        (1, ["spark-2"], ["spark-1"]),
        (1, ["spark-1", "spark-2"], []),
        (1, [], []),
        (130, ["spark-2"], []),
    ],
)
def test_up_sends_a_test_question_to_each_deployed_host(
    code, failing, asked, monkeypatch, tmp_path, capsys
):
    targets = [target_of(tmp_path, name) for name in ("spark-1", "spark-2")]
    answers = [Answer(host, HostState(HostStatus(None), Jobs({}), None)) for host in targets]

    def deploy(*_, failed):
        failed.update(failing)
        return code

    def ask_host(host, *_, **__):
        if host.name == "spark-2":
            raise SparkError.single("spark-2: gateway", "no answer", "open the port")
        return {"answer": "35352137\n", "tokens_per_s": 31.2}

    monkeypatch.setattr(up, "select_hosts", lambda _options: targets)
    monkeypatch.setattr(up, "_bootstrap", lambda *_: 0)
    monkeypatch.setattr(up, "required_names", lambda *_: Names(frozenset(), frozenset()))
    monkeypatch.setattr(up, "build_plan", lambda _host: PLAN)
    monkeypatch.setattr(up, "query", lambda _hosts, _read: answers)
    monkeypatch.setattr(up, "ask_host", ask_host)
    monkeypatch.setattr(up.changes, "deploy", deploy)
    monkeypatch.setattr(up.update, "lock_donor_tensors", lambda _hosts: None)
    monkeypatch.setattr(connect, "read_inventory", lambda *_, **__: ["spark-1", "spark-2"])
    options = Options(inventory="inventory/lab.py", yes=True)
    assert up.up.callback.__wrapped__(options) == code
    out, err = capsys.readouterr()
    blocks = [line for line in out.splitlines() if "http://" in line]
    assert [line.split(":")[0] for line in blocks] == asked
    for port, (name, line) in enumerate(zip(asked, blocks, strict=True), 8000):
        assert f"http://127.0.0.1:{port}/v1 while `" in line
        assert f"connect {name} --tunnel" in line
    assert ("'35352137' at 31.2 tok/s" in out) == ("spark-1" in asked)
    assert ("open the port" in err) == ("spark-2" in asked)
