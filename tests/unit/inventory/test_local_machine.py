import os

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.inventory.login import PASSWORD_FILE_VARIABLE
from tests import forked

BOOTSTRAP = str(CHECKOUT / "deploys/bootstrap.py")
SUDO_REFUSED = "#!/bin/sh\necho 'ann may not run sudo here' >&2\nexit 1\n"
# Needs a password until the rule exists; records its arguments and environment.
SUDO_WITH_PASSWORD = """#!/bin/sh
env | cat - >> $ROOT/seen; echo "$*" >> $ROOT/seen
case "$*" in
  *-S*) read -r given; [ "$given" = geheim ] || { echo 'Sorry, try again.' >&2; exit 1; }
        touch $ROOT/rule;;
  *) [ -e $ROOT/rule ] || { echo 'sudo: a password is required' >&2; exit 1; };;
esac
"""
ORDINARY_USER = "#!/bin/sh\ncase $* in -un) echo ann;; *) echo 1000;; esac\n"


class Machine:
    def __init__(self, repository):
        self.repository, self.root = repository, repository.root
        for folder in ("home", "bin"):
            (self.root / folder).mkdir()
        self.add_program("sudo", SUDO_REFUSED)
        self.repository.list_hosts('["@local"]')

    def add_program(self, name, text):
        path = self.root / "bin" / name
        path.write_text(text.replace("$ROOT", str(self.root)))
        path.chmod(0o755)

    def run(self, *words, **variables):
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        env = {"HOME": str(self.root / "home"), "PATH": path, **variables}
        return forked.run(words, cwd=self.root, env=env)


@pytest.fixture
def machine(repository):
    return Machine(repository)


@pytest.fixture
def ordinary(machine):
    machine.add_program("sudo", SUDO_WITH_PASSWORD)
    machine.add_program("id", ORDINARY_USER)
    for name, word in {"right": "geheim", "wrong": "other"}.items():
        (machine.root / name).write_text(f"{word}\n")
    return machine


@pytest.mark.parametrize(
    ("file", "error"),
    [("right", ""), ("wrong", "sudo: rejected the password"), ("", PASSWORD_FILE_VARIABLE)],
)
def test_bootstrap_installs_the_sudo_rule_and_never_shows_the_password(ordinary, file, error):
    variables = {PASSWORD_FILE_VARIABLE: str(ordinary.root / file)} if file else {}
    done = ordinary.run("pyinfra", "sparks.py", BOOTSTRAP, "-y", "-vvv", "--debug", **variables)
    assert (done.returncode == 0) == (ordinary.root / "rule").exists() == (not error), done.stderr
    assert error in done.stdout + done.stderr
    output = done.stdout + done.stderr + (ordinary.root / "seen").read_text()
    assert "-k -n true" in output
    assert "geheim" not in output
    assert not list((ordinary.root / "home").iterdir())


def test_bootstrap_changes_nothing_if_sudo_works_without_a_password(ordinary):
    (ordinary.root / "rule").touch()
    done = ordinary.run("pyinfra", "sparks.py", BOOTSTRAP, "-y")
    assert done.returncode == 0, done.stderr
    assert "-S" not in (ordinary.root / "seen").read_text()
    assert not list((ordinary.root / "home").iterdir())


@pytest.mark.parametrize("sudo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_status_reports_missing_sudo_in_one_line(machine, sudo):
    if sudo:
        text = machine.repository.inventory.read_text().rstrip().removesuffix(")")
        machine.repository.write(
            "sparks.py", f'{text}, host_data={{"@local": {{"_sudo": True}}}})\n'
        )
    done = machine.run("spark_deploy", "status", "sparks.py")
    expected = "sudo is missing or requires" if sudo or os.geteuid() else "not set up yet"
    assert done.returncode == 1
    assert expected in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "No hosts remaining" not in done.stdout + done.stderr
