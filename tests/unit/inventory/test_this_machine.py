"""``@local``, the machine that runs the deploy, through pyinfra and `spark-deploy` themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.inventory.login import PASSWORD_FILE_VARIABLE
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

    def run(self, *words: str, **given: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        env = {"HOME": str(self.root / "home"), "PATH": path, **given}
        return forked.run(words, cwd=self.root, env=env)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def bootstrap_of(here: Here, inventory: str) -> subprocess.CompletedProcess[str]:
    return here.run("pyinfra", inventory, str(CHECKOUT / "deploys/bootstrap.py"), "--dry")


# Asks for a password until the rule is there; notes its arguments and environment.
ASKING_SUDO = """#!/bin/sh
env | cat - >> $HERE/seen; echo "$*" >> $HERE/seen
case "$*" in
  *-S*) read -r given; [ "$given" = geheim ] || { echo 'Sorry, try again.' >&2; exit 1; }
        touch $HERE/rule;;
  *) [ -e $HERE/rule ] || { echo 'sudo: a password is required' >&2; exit 1; };;
esac
"""
ORDINARY = "#!/bin/sh\ncase $* in -un) echo ann;; *) echo 1000;; esac\n"


@pytest.fixture
def ordinary(here: Here) -> Here:
    """The machine of a user who is not root; sudo and id are stand-ins."""
    for name, text in {"sudo": ASKING_SUDO, "id": ORDINARY}.items():
        (here.root / "bin" / name).write_text(text.replace("$HERE", str(here.root)))
        (here.root / "bin" / name).chmod(0o755)
    for name, word in {"right": "geheim", "wrong": "other"}.items():
        (here.root / name).write_text(f"{word}\n")
    return here


@pytest.mark.parametrize(
    ("file", "error"),
    [("right", ""), ("wrong", "sudo: refuses the password"), ("", PASSWORD_FILE_VARIABLE)],
)
def test_bootstrap_installs_the_sudo_rule_with_the_password_of_an_ordinary_user(
    ordinary: Here, file: str, error: str
) -> None:
    given = {PASSWORD_FILE_VARIABLE: str(ordinary.root / file)} if file else {}
    words = (str(ordinary.inventory), str(CHECKOUT / "deploys/bootstrap.py"), "-y", "-vvv")
    done = ordinary.run("pyinfra", *words, "--debug", **given)
    assert (done.returncode == 0) == (ordinary.root / "rule").exists() == (not error), done.stderr
    assert error in done.stdout + done.stderr
    shown = done.stdout + done.stderr + (ordinary.root / "seen").read_text()
    assert "-k -n true" in shown
    assert "geheim" not in shown
    assert not list((ordinary.root / "home").iterdir())


def test_bootstrap_needs_an_inventory_that_lists_this_machine(here: Here) -> None:
    done = bootstrap_of(here, "@local")
    assert done.returncode != 0
    assert "list '@local'" in done.stderr


def test_bootstrap_of_a_machine_whose_sudo_is_free_changes_nothing(ordinary: Here) -> None:
    (ordinary.root / "rule").touch()
    words = (str(ordinary.inventory), str(CHECKOUT / "deploys/bootstrap.py"), "-y")
    done = ordinary.run("pyinfra", *words)
    assert done.returncode == 0, done.stderr
    assert "-S" not in (ordinary.root / "seen").read_text()
    assert not list((ordinary.root / "home").iterdir())


def test_status_of_this_machine_asks_for_sudo_only_who_is_not_root(here: Here) -> None:
    done = here.run("spark_deploy", "status", str(here.inventory))
    said = "not set up yet" if os.geteuid() == 0 else "sudo is missing or asks"
    assert done.returncode == 1
    assert said in done.stdout, done.stdout + done.stderr
    assert "No hosts remaining" not in done.stdout + done.stderr


def test_a_host_whose_sudo_refuses_gets_one_clear_line(here: Here) -> None:
    here.write({"@local": {"_sudo": True}})
    done = here.run("spark_deploy", "status", str(here.inventory))
    assert done.returncode == 1
    assert "@local: query failed: a command failed on the host, or sudo is missing" in done.stdout
    assert "`sudo: false`" in done.stdout
    assert "Traceback" not in done.stderr
    assert "No hosts remaining" not in done.stdout + done.stderr
