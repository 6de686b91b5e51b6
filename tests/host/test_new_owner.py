import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import yaml

from tests.labkit import SPARE, Guest, guest_named, lab, wait_for_port
from tests.owner import Owner, new_owner, typed_commands

ASK = """
import os
from openai import OpenAI
messages = [{"role": "user", "content": "What is 7823 * 4519?"}]
answer = OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
print(answer.choices[0].message.content)
"""


@dataclass
class Walk:
    owner: Owner
    guest: Guest
    first: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    name = SPARE[0]
    lab("up", name, "--fresh", "--bootstrap-guest", name, "--engine", "stub")
    owner, up = new_owner(tmp_path_factory.mktemp("owner"), name)
    return Walk(owner, guest_named(name), owner.run(*up, "-y"))


def test_first_server_needs_two_commands(walk):
    assert walk.first.returncode == 0, walk.first.stdout[-4000:] + walk.first.stderr[-2000:]
    assert (len(walk.owner.commands), walk.owner.edits) == (2, 0)
    assert walk.guest.answers()


def test_model_switch_needs_one_edit_and_one_command(walk):
    before = len(walk.owner.commands)
    [switch], [rollback] = typed_commands("switch model or profile"), typed_commands("roll back")
    walk.owner.set_profile("agent")
    switched = walk.owner.run(*switch, "-y")
    assert switched.returncode == 0, switched.stdout[-4000:]
    assert "--enable-prefix-caching" in walk.guest.argv()
    back = walk.owner.run(*rollback, "-y")
    assert back.returncode == 0, back.stderr[-4000:]
    assert "--no-enable-prefix-caching" in walk.guest.argv()
    assert (walk.owner.edits, len(walk.owner.commands) - before) == (1, 2)


def test_up_after_rollback_restarts_nothing(walk):
    before = walk.guest.invocation()
    walk.owner.set_profile("v2")
    result = walk.owner.run("up", "-y")
    assert result.returncode == 0, result.stdout + result.stderr
    assert walk.guest.invocation() == before


def test_client_connects_with_two_commands_and_no_copied_key(walk):
    tunnel, [evaluated] = typed_commands("connect through an SSH tunnel")
    assert evaluated == "$(spark-deploy connect spark-1 --for env)"
    with walk.owner.running(*tunnel):
        wait_for_port(8000)
        printed = walk.owner.run("connect", "spark-1", "--for", "env").stdout
        assert re.search(r'OPENAI_API_KEY="\$\(.*\)"', printed)
        result = subprocess.run(
            ["bash", "-euc", f'{printed}\nexec "$0" -c "$1"', sys.executable, ASK],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (result.returncode, result.stdout.strip()) == (0, "35352137"), result.stderr


def test_one_command_frees_the_gpu(walk):
    [stop] = typed_commands("free the GPU")
    stopped = walk.owner.run(*stop)
    assert stopped.returncode == 0, stopped.stderr
    assert walk.guest.serving() == []
    assert walk.owner.run("start", "-y").returncode == 0
    assert walk.guest.answers()


@pytest.mark.parametrize(
    ("job", "options", "answer"),
    [
        ("see why a server is slow", ("--once",), r"spark-1 .*\b0\b"),
        ("see why a server is down", (), r"● spark-1 +lab-stub +v2 "),
        ("measure speed", ("--protocol", "seeds", "--out", "bench"), r"tok/s"),
    ],
)
def test_one_command_answers_each_status_question(walk, job, options, answer):
    [typed] = typed_commands(job)
    result = walk.owner.run(*typed, *options)
    assert result.returncode == 0, result.stderr
    assert re.search(answer, result.stdout), result.stdout


def test_schedule_needs_one_edit_and_one_command(walk):
    [up], path = typed_commands("switch by time of day"), walk.owner.folder / "group_vars/all.yml"
    before = path.read_text()
    pairs = [{"model": "lab-stub", "profile": name} for name in ("v2", "agent")]
    times = [{"at": at, **pair} for at, pair in zip(("04:00", "04:30"), pairs, strict=True)]
    chosen = {"keep_ready": pairs[1:], "schedule": times}
    path.write_text(f"{before}\n{yaml.safe_dump(chosen)}")
    result = walk.owner.run(*up, "-y")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr
    timers = "systemctl list-timers --all --no-legend 'spark-hours@*'"
    assert walk.guest.run(f"{timers} | wc -l").strip() == "2"
    path.write_text(before)


def test_engine_and_gateway_and_tools_log_to_one_stream(walk):
    output = walk.owner.run("logs", "-n", "400").stdout
    parts = ("engine", "gateway", "watch")
    assert [part for part in parts if part not in output] == []


def test_uninstall_and_unbootstrap_need_one_command_each(walk):
    [uninstall], [unbootstrap] = typed_commands("uninstall"), typed_commands("revoke access")
    removed = walk.owner.run(*uninstall, "-y")
    assert removed.returncode == 0, removed.stdout[-4000:] + removed.stderr
    assert walk.guest.run("ls -d /etc/spark /usr/local/lib/spark 2>/dev/null || true") == ""
    assert walk.owner.run(*unbootstrap, "-y").returncode == 0
    with pytest.raises(RuntimeError, match="Permission denied"):
        walk.guest.run("true")
