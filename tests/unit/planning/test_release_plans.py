import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from spark_contract.documents import to_json
from spark_contract.paths import TOOLS_DIR

from spark_deploy.config.errors import SettingsError
from spark_deploy.plan.host import plan_document
from spark_deploy.plan.jobs import keep_list
from spark_deploy.plan.release import release_files, timer_files, unit_and_command_files
from tests.unit.planning.plans import plan_of


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"hub.endpoint": "http://mirror.example"}, True),
        ({"downloads.outage_s": 9}, True),
        ({"hub.token": {"env": "TOKEN"}}, True),
        ({"ssh.user": "someone"}, True),
        ({"serve.api_key": {"file": "/key"}}, True),
        ({"serve.port": 9000, "serve.expose": "lan", "serve.max_body_mib": 1}, True),
        ({"disk.reserve_gib": 1}, True),
        ({"takeover": ["old"]}, True),
        ({"engine.max_sequences": 2}, False),
        ({"serve.names": ["a", "b"]}, False),
        ({"engine.options": {"seed": 1}}, False),
        ({"engine.environment": {"VLLM_LOGGING_LEVEL": "DEBUG"}}, False),
        ({"memory.reserve_gib": 30}, False),
    ],
)
def test_release_digest_changes_only_with_what_affects_the_engine(change, same):
    base, changed = plan_of(), plan_of(**change)
    assert (changed.release.digest == base.release.digest) is same
    assert changed.checkpoint.digest == base.checkpoint.digest
    assert changed.sources[0].digest == base.sources[0].digest


def test_release_contains_no_reference_to_a_secret():
    text = to_json(
        plan_of(**{"serve.api_key": {"env": "KEY"}, "hub.token": {"env": "TOK"}}).release
    )
    assert '"KEY"' not in text
    assert '"TOK"' not in text


def test_compile_cache_depends_on_base_image_and_drafts_not_on_plugin():
    ours, stock = plan_of("large", "v2"), plan_of("large", "v2-native")
    assert ours.image.tag != stock.image.tag
    assert ours.cache_dir == stock.cache_dir
    assert plan_of("large", "base").cache_dir != ours.cache_dir
    other_image = plan_of(images={"engine": "registry.example/other:1"})
    assert other_image.cache_dir != ours.cache_dir


def test_server_waits_for_the_checkpoint_and_cache_disks():
    paths = {"models_dir": "/disk-1/models"}
    plan = plan_of("small", "v2", paths=paths)
    drop_in = release_files(plan)[-1].content.decode()
    match = re.search(r"^RequiresMountsFor=(.*)$", drop_in, re.M)
    mounts = match[1].split()
    assert mounts[0] == plan.release.tree.path
    assert [path.split("/")[1] for path in mounts] == ["disk-1", "srv", "run"]


@pytest.mark.parametrize(
    ("context", "configured_s", "planned_s"),
    [(262144, 120, 263), (65536, 120, 120), (262144, 600, 600)],
)
def test_stall_timeout_exceeds_time_to_read_longest_prompt(context, configured_s, planned_s):
    settings = {"engine.max_context_tokens": context, "watch.stall_s": configured_s}
    assert plan_of(**settings).release.watch.stall_s == planned_s


NIGHT = {"model": "large", "profile": "v2-tq"}
DAY = {"model": "large", "profile": "v2"}
TIMES = [{"at": "Mon..Fri 08:00", **DAY}, {"at": "20:00", **NIGHT}, {"at": "Sun 10:00", **DAY}]


def scheduled(*times, **settings):
    return plan_of("large", "v2", keep_ready=[NIGHT], schedule=list(times or TIMES), **settings)


def test_scheduled_releases_equal_deployed_releases():
    plan = scheduled()
    assert [change.at for change in plan.schedule] == ["Mon..Fri 08:00", "20:00", "Sun 10:00"]
    day, night, sunday = (change.release for change in plan.schedule)
    assert day == sunday == plan.release == plan_of("large", "v2").release
    assert night == plan_of("large", "v2-tq").release


def test_scheduled_releases_are_installed_and_kept():
    plan = scheduled()
    names = {change.release.name for change in plan.schedule}
    paths = {file.path for file in release_files(plan)}
    for name in names:
        assert f"/etc/spark/releases/{name}/release.json" in paths
        assert f"/etc/systemd/system/spark-serve@{name}.service.d/50-release.conf" in paths
    assert set(keep_list(plan).releases) == names
    assert plan.release.name in plan_document(plan)["unit"]["drop_in"]


def test_scheduled_release_has_one_timer_for_all_its_times():
    plan = scheduled()
    files = {file.path: file.content.decode() for file in timer_files(plan.schedule)}
    assert len(files) == 2
    day = files[f"/etc/systemd/system/spark-hours@{plan.release.name}.timer"]
    assert re.findall("^OnCalendar=(.*)$", day, re.M) == ["Mon..Fri 08:00", "Sun 10:00"]
    assert f"\nUnit=spark-switch@{plan.release.name}.service\n" in day
    assert timer_files(plan_of("large", "v2").schedule) == ()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_timers(tmp_path):
    for file in timer_files(scheduled().schedule):
        name = Path(file.path).name
        (tmp_path / name).write_bytes(file.content)
        unit = name.replace("spark-hours@", "spark-switch@").replace(".timer", ".service")
        (tmp_path / unit).write_text("[Service]\nExecStart=/bin/true\n")
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
            capture_output=True, text=True, check=False,
            env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:/lib/systemd/system", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "spark-" in line] == []
    for at in [time["at"] for time in TIMES] + ["20:00 Europe/Berlin", "*-*-1 02:30"]:
        subprocess.run(["systemd-analyze", "calendar", at], check=True, capture_output=True)
        scheduled({"at": at, **DAY}, {"at": "20:00", **NIGHT})


@pytest.mark.parametrize(
    ("times", "settings", "message"),
    [
        (
            [{"at": "20:00", "model": "small", "profile": "v2"}, TIMES[0]],
            {},
            "is not in keep_ready",
        ),
        ([TIMES[1]], {}, "no entry switches back to large with v2"),
        ([{"at": "20:00\nUnit=reboot.target", **DAY}], {}, "the required form"),
        ([{"at": "", **DAY}], {}, "the required form"),
        ([{**DAY}], {}, "at"),
        (TIMES, {"cluster.hosts": ["a", "b"]}, "cluster members switch together"),
    ],
)
def test_rejects_invalid_schedules(times, settings, message):
    with pytest.raises(SettingsError, match=message):
        scheduled(*times, **settings)


COMMANDS = {file.path: file.content.decode() for file in unit_and_command_files(())}


@pytest.mark.parametrize(
    ("name", "user_id", "output"),
    [
        ("spark-check", 0, "tool check --deep a b"),
        ("spark-host", 0, "tool --deep a b"),
        ("spark-check", 1000, "sudo -- /usr/local/bin/spark-check --deep a b"),
        ("spark-host", 1000, "sudo -- /usr/local/bin/spark-host --deep a b"),
    ],
)
def test_commands_installed_on_the_host_run_as_root(tmp_path, name, user_id, output):
    programs = {
        "id": f"echo {user_id}",
        "sudo": 'echo sudo "$@"',
        "tools/current/bin/spark-host": 'echo tool "$@"',
        name: COMMANDS[f"/usr/local/bin/{name}"].replace(TOOLS_DIR, f"{tmp_path}/tools"),
    }
    for path, text in programs.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (tmp_path / path).chmod(0o755)
    command = [tmp_path / name, "--deep", "a b"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == output


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        (
            "engine.draft_vocabulary_text",
            {"engine.head": "int8-triton", "engine.draft_vocabulary_tokens": 32768},
        ),
        ("requantize.calibration", {"checkpoint.source": "requantized", "requantize.iters": 1}),
    ],
)
def test_plan_document_does_not_contain_the_text_of_local_files(tmp_path, key, settings):
    text = json.dumps({"text": "our private words"})
    (tmp_path / "text.jsonl").write_text(text)
    settings = {**settings, key: str(tmp_path / "text.jsonl")}
    plan = plan_of(keep_ready=[{"model": "large", "profile": "v2-tq"}], **settings)
    assert text in repr(plan)
    assert text in repr(plan.ready)
    assert "private words" not in json.dumps(plan_document(plan))
