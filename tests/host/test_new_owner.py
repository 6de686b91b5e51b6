"""A new owner follows the table of jobs; commands and edits are counted."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.labkit import SPARE, Guest, Site, guest_named, info, lab
from tests.owner import Owner, typed_commands, write_lab_settings

pytestmark = pytest.mark.host


SWITCH = "switch model or profile"
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
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    name = SPARE[0]
    lab("up", name, "--fresh", "--bootstrap-guest", name, "--engine", "stub")
    about = next(guest for guest in info()["guests"] if guest["name"] == name)
    root = tmp_path_factory.mktemp("owner")
    site = Site(root / "lab", hosts=[name])
    password, host_keys = root / "password", root / "host_keys"
    password.touch(mode=0o600)
    password.write_text(about["password"] + "\n")
    host_keys.write_text(f"{about['ip']} {about['host_key']}\n")
    # The answers to the questions for password and host key.
    answers = {
        "SPARK_BOOTSTRAP_PASSWORD_FILE": str(password),
        "SPARK_BOOTSTRAP_HOST_KEYS_FILE": str(host_keys),
    }
    owner = Owner(root / "own", {**answers, "XDG_CACHE_HOME": str(root / "cache")})
    shutil.copytree(
        Path.home() / ".cache/spark-deploy", root / "cache/spark-deploy", dirs_exist_ok=True,
        ignore_dangling_symlinks=True,
    ) if (Path.home() / ".cache/spark-deploy").is_dir() else None  # fmt: skip
    user = info()["ssh"]["user"]
    init, up = typed_commands("first server", address=about["ip"], user=user, folder="own")
    done = owner.run(*init, "--model", "lab-stub", cwd=root)
    assert done.returncode == 0, done.stderr
    write_lab_settings(owner.folder, site.root / "inventory/lab.py")
    first = owner.run(*up, "-y")
    return Walk(owner, guest_named(name), first)


def test_first_server_takes_two_commands(walk: Walk) -> None:
    assert walk.first.returncode == 0, walk.first.stdout[-4000:] + walk.first.stderr[-2000:]
    assert (len(walk.owner.commands), walk.owner.edits) == (2, 0)
    assert walk.guest.answers()


def test_up_shows_plan_and_result(walk: Walk) -> None:
    output = walk.first.stdout
    assert re.search(r"spark-1: .*will serve lab-stub with v2", output)
    assert re.search(r"spark-1  serves lab-stub with profile v2 .*http://\S+", output)
    assert re.search(r"proof: full check of \S+, \d+ checks", output)
    assert re.search(r"took \d+:\d\d \(.*engine \d+:\d\d", output)
    assert re.search(r"changed \d+ of \d+ steps", output)


def test_up_repeats_no_line(walk: Walk) -> None:
    lines = [line for line in walk.first.stdout.splitlines() if line.strip()]
    assert len(lines) == len(set(lines))
    assert len(lines) < 60


def test_up_prints_pyinfra_command(walk: Walk) -> None:
    [line] = [text for text in walk.first.stderr.splitlines() if "deploy.py" in text]
    assert line.split()[0].endswith("pyinfra")
    assert line.split()[-1] == "-y"


def test_switch_takes_one_edit_and_one_command(walk: Walk) -> None:
    before, [switch], [rollback] = (
        len(walk.owner.commands),
        typed_commands(SWITCH),
        typed_commands("go back"),
    )
    walk.owner.set_profile("agent")
    dry = walk.owner.run("up", "--dry")
    assert "v2 → agent (lab-stub); " in dry.stdout
    assert re.search(r"nothing to download; engine restarts; clients get 503 for about", dry.stdout)
    assert walk.guest.answers()

    switched = walk.owner.run(*switch, "-y")
    assert switched.returncode == 0, switched.stdout[-4000:]
    assert "--enable-prefix-caching" in walk.guest.argv()
    back = walk.owner.run(*rollback, "-y")
    assert back.returncode == 0, back.stderr[-4000:]
    assert "--no-enable-prefix-caching" in walk.guest.argv()
    assert (walk.owner.edits, len(walk.owner.commands) - before) == (1, 3)


def test_top_and_status_show_engine(walk: Walk) -> None:
    assert walk.guest.answers()
    [now] = json.loads(walk.owner.run("top", "--once", "--json").stdout)
    assert now["running"] == 0
    assert now["tokens_per_s"] is not None
    assert walk.owner.run("status").returncode in (0, 1)


def test_second_run_changes_nothing(walk: Walk) -> None:
    walk.owner.set_profile("v2")
    done = walk.owner.run("up", "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed nothing" in done.stdout


def test_client_needs_two_commands_and_no_copied_key(walk: Walk) -> None:
    tunnel, [evaluated] = typed_commands("through an SSH tunnel")
    assert evaluated == "$(spark-deploy connect spark-1 --for env)"
    with walk.owner.running(*tunnel):
        wait_for("127.0.0.1", 8000)
        printed = walk.owner.run("connect", "spark-1", "--for", "env").stdout
        assert re.search(r'OPENAI_API_KEY="\$\(.*\)"', printed), "the key is read when needed"
        done = subprocess.run(
            ["bash", "-euc", f'{printed}\nexec "$0" -c "$1"', sys.executable, ASK],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "35352137"), done.stderr


def wait_for(address: str, port: int) -> None:
    until_s = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, port), 2).close()
        except OSError:
            assert time.monotonic() < until_s
            time.sleep(0.2)


def test_one_command_frees_the_gpu(walk: Walk) -> None:
    [stop] = typed_commands("free the GPU")
    stopped = walk.owner.run(*stop)
    assert stopped.returncode == 0, stopped.stderr
    assert walk.guest.serving() == []
    assert "stopped" in walk.owner.run("status").stdout
    assert walk.owner.run("start").returncode == 0
    assert walk.guest.answers()


@pytest.mark.parametrize(
    ("job", "more", "answer"),
    [
        ("why slow", ("--once",), r"spark-1 .*\b0\b"),
        ("why dead", (), r"spark-1: lab-stub with v2 as lab-model"),
        ("measure it", ("--protocol", "seeds", "--out", "bench"), r"tok/s"),
    ],
)
def test_status_job_takes_one_command(
    walk: Walk, job: str, more: tuple[str, ...], answer: str
) -> None:
    [typed] = typed_commands(job)
    done = walk.owner.run(*typed, *more)
    assert done.returncode == 0, done.stderr
    assert re.search(answer, done.stdout), done.stdout


def test_schedule_takes_one_edit_and_one_command(walk: Walk) -> None:
    [up], path = typed_commands("day and night"), walk.owner.folder / "group_vars/all.yml"
    before = path.read_text()
    pairs = [{"model": "lab-stub", "profile": name} for name in ("v2", "agent")]
    times = [{"at": at, **pair} for at, pair in zip(("04:00", "04:30"), pairs, strict=True)]
    chosen = {"keep_ready": pairs[1:], "schedule": times}
    path.write_text(f"{before}\n{yaml.safe_dump(chosen)}")
    done = walk.owner.run(*up, "-y")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    timers = "systemctl list-timers --all --no-legend 'spark-hours@*'"
    assert walk.guest.run(f"{timers} | wc -l").strip() == "2"
    path.write_text(before)


def test_logs_of_all_parts_are_one_stream(walk: Walk) -> None:
    output = walk.owner.run("logs", "-n", "400").stdout
    parts = ("engine", "gateway", "watch")
    assert [part for part in parts if part not in output] == []


def test_uninstall_and_unbootstrap_take_one_command_each(walk: Walk) -> None:
    [uninstall], [unbootstrap] = typed_commands("uninstall"), typed_commands("revoke the access")
    gone = walk.owner.run(*uninstall, "-y")
    assert gone.returncode == 0, gone.stdout[-4000:] + gone.stderr
    assert walk.guest.run("ls -d /etc/spark /usr/local/lib/spark 2>/dev/null || true") == ""
    assert walk.owner.run(*unbootstrap, "-y").returncode == 0
    with pytest.raises(RuntimeError, match="Permission denied"):
        walk.guest.run("true")
