"""``@local``, the machine a run stands on: pyinfra and `spark-deploy` themselves, looking only."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from spark_deploy.checkout import CHECKOUT
from tests import forked

INVENTORY = """
import sys as _sys
_sys.path.insert(0, {checkout!r})
from spark_deploy.inventory.groups import group_from as _group_from
spark = _group_from("spark", hosts=["@local"], file=__file__, host_data={host_data!r})
"""
REFUSING_SUDO = "#!/bin/sh\necho 'ann may not run sudo here' >&2\nexit 1\n"


class Here:
    """A repository that lists this machine; its home and its sudo are not the real ones."""

    def __init__(self, root: Path) -> None:
        self.root, self.inventory = root, root / "inventory.py"
        for folder in ("group_vars", "home", "bin"):
            (root / folder).mkdir()
        (root / "bin/sudo").write_text(REFUSING_SUDO)
        (root / "bin/sudo").chmod(0o755)
        self.write({})

    def write(self, host_data: dict[str, dict[str, bool]]) -> None:
        text = INVENTORY.format(checkout=str(CHECKOUT), host_data=host_data)
        self.inventory.write_text(text)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        env = {"HOME": str(self.root / "home"), "PATH": path}
        return forked.run(words, cwd=self.root, env=env)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def bootstrap_of(here: Here, inventory: str) -> subprocess.CompletedProcess[str]:
    return here.run("pyinfra", inventory, str(CHECKOUT / "deploys/bootstrap.py"), "--dry")


@pytest.mark.parametrize("named", ["in an inventory", "as pyinfra's own word"])
def test_bootstrap_has_nothing_to_do_here_and_says_so(here: Here, named: str) -> None:
    inventory = str(here.inventory) if named == "in an inventory" else "@local"
    done = bootstrap_of(here, inventory)
    assert done.returncode == 0, done.stderr
    assert "[@local] nothing to bootstrap" in done.stderr
    assert "Install our key" not in done.stdout + done.stderr
    assert not list((here.root / "home").iterdir())


def test_status_of_this_machine_asks_for_sudo_only_who_is_not_root(here: Here) -> None:
    done = here.run("spark_deploy", "status", str(here.inventory))
    said = "nothing of ours is installed yet" if os.geteuid() == 0 else "sudo is missing or asks"
    assert done.returncode == 1
    assert said in done.stdout, done.stdout + done.stderr
    assert "No hosts remaining" not in done.stdout + done.stderr


def test_a_host_whose_sudo_refuses_gets_one_clear_line(here: Here) -> None:
    here.write({"@local": {"_sudo": True}})
    done = here.run("spark_deploy", "status", str(here.inventory))
    assert done.returncode == 1
    assert "@local: cannot be asked: a command failed there, or sudo is missing" in done.stdout
    assert "set `sudo: false` where the login user is root" in done.stdout
    assert "Traceback" not in done.stderr
    assert "No hosts remaining" not in done.stdout + done.stderr
