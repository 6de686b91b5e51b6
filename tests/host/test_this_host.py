"""``@local``: a guest runs pyinfra on itself.

The first test runs as root, the others as a user whose sudo requires a password.
"""

import json
import secrets
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.paths import USER
from spark_deploy.hosts.payload import site_archive
from spark_deploy.inventory.login import PASSWORD_FILE_VARIABLE
from tests.host.gateway_host import NAME
from tests.labkit import CHECKOUT, STATE, Guest, Site, guest_named, lab
from tests.runs import Run, Silence

# Root must work without sudo.
NO_SUDO = (
    "mkdir -p /opt/bin && printf '#!/bin/sh\\nexit 1\\n' > /opt/bin/sudo && chmod +x /opt/bin/sudo"
)


@dataclass
class Inside:
    site: Site
    guest: Guest

    def deploy(self, user="root"):
        self.copy(self.site.root / "group_vars")
        return self.pyinfra("deploy.py", user=user)

    def pyinfra(self, deploy, *, user=USER, environment=""):
        result = self.run(f"{environment}{self.command(deploy, '--json', user=user)}")
        document = json.loads(result.stdout) if result.returncode == 0 else {}
        return Run(result.returncode, document, result.stderr, 0.0, Silence(0.0, ""))

    def command(self, deploy, *options, user):
        path = f"{'/opt/bin:' if user == 'root' else ''}/usr/sbin:/usr/bin:/sbin:/bin"
        line = [
            "env", f"PYTHONPATH={CHECKOUT}:{CHECKOUT}/files/contract", f"PATH={path}",
            sys.executable, "-m", "pyinfra", str(self.site.root / "inventory/lab.py"),
            str(CHECKOUT / deploy), "-y", *options,
        ]  # fmt: skip
        login = "" if user == "root" else f"runuser -u {user} -w {PASSWORD_FILE_VARIABLE} -- "
        return f"cd {self.site.root} && {login}{shlex.join(line)}"

    def run(self, script):
        return subprocess.run(
            [sys.executable, "-m", "lab", "ssh", "--root", NAME, script],
            cwd=CHECKOUT, capture_output=True, text=True, timeout=600, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def copy(self, *paths):
        names = " ".join(shlex.quote(str(path).lstrip("/")) for path in paths)
        unpack = f"{shlex.quote(sys.executable)} -m lab ssh --root {NAME} tar -C / -xf -"
        left_out = "--exclude=.git --exclude=.venv/lib64 --exclude=__pycache__ --exclude=test"
        subprocess.run(
            ["bash", "-c", f"set -o pipefail; tar -C / {left_out} -cf - {names} | {unpack}"],
            cwd=CHECKOUT, check=True, timeout=300,
        )  # fmt: skip


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    lab("up", NAME, "--fresh", "--engine", "stub")
    guest = guest_named(NAME)
    site = Site(tmp_path_factory.mktemp("inside"), hosts=["@local"])
    site.choose(model="lab-stub", profile="v2")
    inventory = site.root / "inventory/lab.py"
    text = inventory.read_text()
    listed = 'hosts=[_guest["name"] for _guest in _lab["guests"]]'
    assert listed in text
    inventory.write_text(
        text.replace(listed, 'hosts=["@local"]').partition("    host_data=")[0] + ")\n"
    )
    own_machine = Inside(site, guest)
    # Resolved, because the virtual environment may be a link.
    pythons = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()} - {Path("/usr")}
    # Guests cannot reach the package index.
    shown = guest.run("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'; uname -m")
    wheels, _ = site_archive("files/checkpoint/requirements.txt", *shown.splitlines())
    own_machine.copy(CHECKOUT, *pythons, site.root, STATE / "lab.json", wheels)
    guest.run(NO_SUDO)
    return own_machine


def test_root_deploys_to_the_local_host_without_sudo(inside):
    inside.deploy().assert_succeeded()
    release = inside.guest.release()
    inside.deploy().assert_unchanged()

    inside.site.choose(profile="v2-tq")
    inside.deploy().assert_succeeded()
    assert inside.guest.release() != release
    inside.deploy().assert_unchanged()


RULE = "/etc/sudoers.d/90-spark-deploy"
# Records arguments and environments of all processes while bootstrap runs.
SPY = """
(while [ ! -e /root/enough ]; do cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; sleep 0.05; done
 ) 2>/dev/null > /root/shown &
"""


@pytest.fixture(scope="module")
def password(inside):
    word = secrets.token_urlsafe(12)
    readable = " ".join(str(path) for path in Path(sys.base_prefix).parents[:-1])
    result = inside.run(
        f"set -e; echo {USER}:{word} | chpasswd; rm /etc/sudoers.d/90-lab; umask 077; "
        f"echo {word} > /home/{USER}/right; echo other > /home/{USER}/wrong; "
        f"chmod a+x {readable} $(dirname {inside.site.root}) $(dirname $(dirname "
        f"{inside.site.root})); chmod a+r {STATE}/lab.json; "
        # The wheels that replace the package index.
        f"cp -r {Path.home()}/.cache /home/{USER}/; chown -R {USER} {inside.site.root} /home/{USER}"
    )
    assert result.returncode == 0, result.stderr
    return word


def sudo_rule(inside):
    return inside.run(f"cat {RULE} 2>/dev/null").stdout


def test_preflight_suggests_bootstrap_if_local_sudo_needs_a_password(inside, password):
    run = inside.deploy(user=USER)
    assert run.exit_code != 0
    assert "deploys/bootstrap.py" in run.stderr


@pytest.mark.parametrize(
    ("file", "fix"), [("", PASSWORD_FILE_VARIABLE), ("wrong", "right password")]
)
def test_local_bootstrap_without_the_right_password_changes_nothing(inside, password, file, fix):
    export = f"export {PASSWORD_FILE_VARIABLE}=/home/{USER}/{file}; " if file else ""
    run = inside.pyinfra("deploys/bootstrap.py", environment=export)
    assert run.exit_code != 0
    assert fix in run.stderr
    assert "Traceback" not in run.stderr
    assert sudo_rule(inside) == ""


def test_local_bootstrap_asks_once_for_the_password_and_installs_sudo_rule(inside, password):
    command = inside.command("deploys/bootstrap.py", "-vvv", "--debug", user=USER)
    result = inside.run(
        f"{SPY} touch /root/log; {{ until grep -q 'login and sudo' /root/log; do sleep 0.2; "
        f"done; sleep 1; cat /home/{USER}/right; }} | timeout 120 script -qefc "
        f"{shlex.quote(command)} /root/log; rc=$?; touch /root/enough; wait; exit $rc"
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert result.stdout.count("login and sudo") == 1
    assert f"{USER} ALL=" in sudo_rule(inside)
    recorded = inside.run("cat /root/shown /root/log; journalctl -o cat --no-pager").stdout
    assert "visudo" in recorded
    assert password not in recorded
    assert inside.run(f"visudo -cq; stat -c '%a %U' {RULE}; ls {RULE}*").stdout == (
        f"440 root\n{RULE}\n"
    )
    inside.pyinfra("deploys/bootstrap.py").assert_unchanged()


def test_user_deploys_to_the_local_host_after_bootstrap(inside, password):
    inside.site.choose(profile="v2")
    release = inside.guest.release()
    inside.deploy(user=USER).assert_succeeded()
    assert inside.guest.release() != release
    inside.deploy(user=USER).assert_unchanged()


def test_local_unbootstrap_removes_sudo_rule_and_keeps_unmanaged_keys(inside, password):
    keys = f"/home/{USER}/.ssh/authorized_keys"
    before = inside.run(f"cat {keys}").stdout
    assert before
    inside.pyinfra("deploys/unbootstrap.py").assert_succeeded()
    assert sudo_rule(inside) == ""
    assert inside.run(f"cat {keys}").stdout == before
