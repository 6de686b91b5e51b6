"""``@local``: the host is the machine that pyinfra runs on; here that machine is a guest."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from spark_deploy.payload.content import site_archive
from tests.host.conftest import NAME
from tests.labkit import CHECKOUT, STATE, Guest, Site, guest_named, lab
from tests.runs import Run, Silence

# Whoever is root needs no sudo, and there may be none.
NO_SUDO = (
    "mkdir -p /opt/bin && printf '#!/bin/sh\\nexit 1\\n' > /opt/bin/sudo && chmod +x /opt/bin/sudo"
)


@dataclass
class Inside:
    """A guest with this checkout, its Python and a user's repository that lists ``@local``."""

    site: Site
    guest: Guest

    def deploy(self) -> Run:
        """Run pyinfra as root in the guest, on itself."""
        self.take(self.site.root / "group_vars")
        words = [
            "env", f"PYTHONPATH={CHECKOUT}:{CHECKOUT}/files/contract",
            "PATH=/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            sys.executable, "-m", "pyinfra", str(self.site.root / "inventory/lab.py"),
            str(CHECKOUT / "deploy.py"), "-y", "--json",
        ]  # fmt: skip
        script = f"cd {self.site.root} && exec {shlex.join(words)}"
        done = subprocess.run(
            [sys.executable, "-m", "lab", "ssh", "--root", NAME, script],
            cwd=CHECKOUT, capture_output=True, text=True, timeout=600, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        document = json.loads(done.stdout) if done.stdout.strip() else {}
        return Run(done.returncode, document, done.stderr, 0.0, Silence(0.0, ""))

    def take(self, *paths: Path) -> None:
        """Copy files and folders to the same places in the guest."""
        names = " ".join(shlex.quote(str(path).lstrip("/")) for path in paths)
        unpack = f"{shlex.quote(sys.executable)} -m lab ssh --root {NAME} tar -C / -xf -"
        left_out = "--exclude=.git --exclude=.venv/lib64 --exclude=__pycache__ --exclude=test"
        subprocess.run(
            ["bash", "-c", f"set -o pipefail; tar -C / {left_out} -cf - {names} | {unpack}"],
            cwd=CHECKOUT, check=True, timeout=300,
        )  # fmt: skip


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Inside:
    lab("up", NAME, "--fresh", "--engine", "stub")
    guest = guest_named(NAME)
    site = Site(tmp_path_factory.mktemp("inside"), hosts=["@local"])
    inventory = site.root / "inventory/lab.py"
    text = inventory.read_text()
    listed = 'hosts=[_guest["name"] for _guest in _lab["guests"]]'
    assert listed in text
    inventory.write_text(
        text.replace(listed, 'hosts=["@local"]').partition("    host_data=")[0] + ")\n"
    )
    made = Inside(site, guest)
    # Resolved: the environment of a worktree may be a link to another's.
    pythons = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()} - {Path("/usr")}
    # A guest reaches the lab alone; a Spark that deploys itself asks the index for these wheels.
    shown = guest.run("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'; uname -m")
    wheels = site_archive("files/checkpoint/requirements.txt", *shown.splitlines())
    made.take(CHECKOUT, *pythons, site.root, STATE / "lab.json", wheels.path)
    guest.run(NO_SUDO)
    return made


def test_the_machine_itself_becomes_a_proven_server_without_sudo(inside: Inside) -> None:
    run = inside.deploy()
    assert run.exit_code == 0, run.stderr[-3000:]
    assert "Serve | Serve the release" in " ".join(run.changed)
    [unit] = inside.guest.serving()
    inside.deploy().must_have_changed_nothing()

    inside.site.choose(profile="v2-tq")
    changed = inside.deploy()

    assert changed.exit_code == 0, changed.stderr[-3000:]
    [other] = inside.guest.serving()
    assert other != unit
    inside.deploy().must_have_changed_nothing()
