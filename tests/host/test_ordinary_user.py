"""A user follows the README on a bare machine, from the installation to a second host."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.labkit import CAPITAL, CHECKOUT, SPARE, Guest, Site, guest_named, info, lab
from tests.owner import write_lab_settings

LAPTOP, HOME, FOLDER = "lab-36", "/home/ana", "/home/ana/sparks"
README = (CHECKOUT / "README.md").read_text("utf-8")


@dataclass
class User:
    guest: Guest
    environment: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def types(self, line):
        self.lines.append(line)
        exports = " ".join(f"{name}={value}" for name, value in self.environment.items())
        script = f"cd {FOLDER} 2>/dev/null; export PATH=$HOME/venv/bin:$PATH {exports}; {line}"
        login = f"sudo -n runuser -l ana -c {shlex.quote(script)}"
        result = subprocess.run(
            [*self.guest.login(), login],
            capture_output=True, text=True, timeout=900, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        sys.stdout.write(f"$ {line}\n{result.stdout}{result.stderr}")
        return result

    def writes(self, path, text, mode="600"):
        quoted = shlex.quote(text)
        self.guest.run(
            f"printf %s {quoted} > {path}; chown ana: {path}; chmod {mode} {path}", timeout_s=30
        )

    def answers_bootstrap_of(self, name):
        about = next(guest for guest in info()["guests"] if guest["name"] == name)
        for question, answer in {
            "PASSWORD": about["password"], "HOST_KEYS": f"{about['ip']} {about['host_key']}",
        }.items():  # fmt: skip
            self.writes(f"{HOME}/{question}", f"{answer}\n")
            self.environment[f"SPARK_BOOTSTRAP_{question}_FILE"] = f"{HOME}/{question}"


def readme_command(start):
    """Return the command of the README that starts with these words, without its comment."""
    [line] = [line for line in README.splitlines() if line.startswith(f"spark-deploy {start}")]
    return line.partition("  #")[0].strip()


def install(guest, work):
    version = guest.run("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work, "."],
                   cwd=CHECKOUT, check=True)  # fmt: skip
    [wheel] = work.glob("*.whl")
    target = [*pip, "install", "--target", work / "site", "--python-version", version,
              "--only-binary=:all:", "--no-deps"]  # fmt: skip
    subprocess.run([*target, "--require-hashes", "-r", "requirements/run.txt"],
                   cwd=CHECKOUT, check=True)  # fmt: skip
    subprocess.run([*target, wheel], cwd=work, check=True)
    guest.run("useradd -m -s /bin/bash ana")
    guest.run("runuser -l ana -c 'python3 -m venv --without-pip venv; mkdir -m 700 .ssh; "
              "ssh-keygen -q -t ed25519 -N \"\" -f .ssh/id_ed25519'")  # fmt: skip
    copy(guest, work / "site", f"{HOME}/venv/lib/python{version}/site-packages")
    copy(guest, Path.home() / ".cache/spark-deploy", f"{HOME}/.cache/spark-deploy")
    commands = {"spark-deploy": "spark_deploy", "pyinfra": "pyinfra"}
    for command, module in commands.items():
        text = f'#!/bin/sh\nexec {HOME}/venv/bin/python -m {module} "$@"\n'
        guest.run(f"printf %s {shlex.quote(text)} > {HOME}/venv/bin/{command}; "
                  f"chmod 755 {HOME}/venv/bin/{command}")  # fmt: skip
    guest.run(f"chown -R ana: {HOME}")


def copy(guest, source, target):
    unpack = [*guest.login(), f"sudo -n sh -c 'mkdir -p {target} && tar -C {target} -xf -'"]
    with subprocess.Popen(["tar", "-C", source, "-cf", "-", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(unpack, stdin=tar.stdout, check=True, timeout=300)


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    new = [word for name in SPARE for word in ("--bootstrap-guest", name)]
    lab("up", LAPTOP, *SPARE, "--fresh", *new, "--engine", "stub")
    made = User(guest_named(LAPTOP))
    install(made.guest, tmp_path_factory.mktemp("install"))
    yield made
    lab("down", LAPTOP, *SPARE)


def add_lab_settings(user, work):
    (work / "group_vars").mkdir(parents=True)
    site = Site(work / "lab", hosts=list(SPARE))
    write_lab_settings(work, site.root / "inventory/lab.py")
    settings = yaml.safe_load((work / "group_vars/spark.yml").read_text())
    settings["ssh"].pop("key_file")
    user.writes(f"{FOLDER}/group_vars/spark.yml", yaml.safe_dump(settings), "644")


def answers(user, host):
    done = user.types(f"spark-deploy ask '{CAPITAL}' {host}")
    return done.returncode == 0 and "Paris" in done.stdout


def release():
    units = "systemctl list-units --plain --no-legend --state=active 'spark-serve@*'"
    return lab("ssh", "--root", SPARE[0], units).partition(".service")[0]


def test_user_gets_first_answer_after_two_commands(user, tmp_path):
    address, login = guest_named(SPARE[0]).ip, info()["ssh"]["user"]
    user.answers_bootstrap_of(SPARE[0])
    init = readme_command("init").replace("192.168.1.21", address).replace("nvidia", login)
    started = time.monotonic()
    done = user.types(f"{init} --model lab-stub")
    assert done.returncode == 0, done.stderr
    add_lab_settings(user, tmp_path)
    up = user.types("spark-deploy up -y")
    assert up.returncode == 0, up.stdout[-4000:] + up.stderr[-2000:]
    assert re.search(r"asked 'What is .*', answered '35352137' at [\d.]+ tok/s", up.stdout)
    assert len(user.lines) == 2
    sys.stdout.write(f"first answer after {time.monotonic() - started:.0f} s\n")


def test_failed_switch_keeps_the_old_model_serving(user):
    path = f"{FOLDER}/group_vars/all.yml"
    before = user.guest.run(f"cat {path}")
    fault = "engine:\n  environment: {STUB_FAULT: garbage}\ncheck: {timeout_s: 10}\n"
    user.writes(path, f"{before}\n{fault}", "644")
    failed = user.types("spark-deploy up -y")
    assert failed.returncode == 1, failed.stdout[-4000:]
    assert "spark-1 still serves lab-stub" in failed.stdout + failed.stderr
    assert answers(user, "spark-1")
    user.writes(path, before, "644")


def test_readme_commands_switch_the_model_and_roll_back(user):
    first = release()
    for line in readme_command("use").replace("qwen3.5-35b", "lab-stub/agent").split(" && "):
        done = user.types(f"{line} -y" if line.endswith(" up") else line)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert release() != first
    done = user.types(f"{readme_command('rollback')} -y")
    assert done.returncode == 0, done.stderr
    assert release() == first


def test_user_adds_a_second_host_with_one_line(user):
    address, login = guest_named(SPARE[1]).ip, info()["ssh"]["user"]
    user.answers_bootstrap_of(SPARE[1])
    path = f"{FOLDER}/hosts.yml"
    hosts = user.guest.run(f"cat {path}").rstrip()
    user.writes(path, f"{hosts}\n  spark-2: {{address: {address}, user: {login}}}\n", "644")
    up = user.types("spark-deploy up -y")
    assert up.returncode == 0, up.stdout[-4000:] + up.stderr[-2000:]
    assert answers(user, "spark-2")
