"""A host with passwords becomes one without, once, and nobody sees the password."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labkit import SPARE, Site, info, lab
from tests.runs import Run

GUEST = SPARE[1]


class NewHost:
    """A guest as new as a Spark out of the box, with a known_hosts file of its own."""

    def __init__(self, root: Path):
        lab("up", GUEST, "--fresh", "--bootstrap-guest", GUEST)
        self.site = Site(root, hosts=[GUEST])
        self.known_hosts = root / "known_hosts"
        self.known_hosts.unlink()  # nobody has seen it yet
        self.about = next(guest for guest in info()["guests"] if guest["name"] == GUEST)
        self.password = root / "password"
        self.password.touch(mode=0o600)
        self.password.write_text(self.about["password"] + "\n")
        # What a person reads at the machine.
        self.host_keys = root / "host_keys"
        self.host_keys.write_text(f"{self.about['ip']} {self.about['host_key']}\n")

    def bootstrap(
        self, *arguments: str, password: Path | None = None, compared: bool = True
    ) -> Run:
        env = {"SPARK_BOOTSTRAP_PASSWORD_FILE": str(password)} if password else {}
        if compared:
            env["SPARK_BOOTSTRAP_HOST_KEYS_FILE"] = str(self.host_keys)
        return self.site.deploy(*arguments, deploy="deploys/bootstrap.py", env=env)

    def console(self, command: str) -> str:
        """Run a command at the machine itself, without SSH."""
        return lab("ssh", "--root", GUEST, command)

    def by_hand(self, user: str) -> subprocess.CompletedProcess[str]:
        """Log in by the plain client: recorded host key and our key, and become root."""
        return subprocess.run(
            ["ssh", "-i", info()["ssh"]["key"], "-o", f"UserKnownHostsFile={self.known_hosts}",
             "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes",
             f"{user}@{self.about['ip']}", "sudo -n id -u"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip

    def choose_account(self) -> None:
        """Have deploys log in with an account of their own, as a new site has it."""
        folder = self.site.root / "host_vars"
        folder.mkdir(exist_ok=True)
        ssh = f"{{user: spark-deploy, first_user: {self.about['user']}}}"
        (folder / f"{GUEST}.yml").write_text(f"ssh: {ssh}\n")

    def take_back(self, *arguments: str) -> Run:
        return self.site.deploy(*arguments, deploy="deploys/unbootstrap.py")


@pytest.fixture(scope="module")
def new_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewHost]:
    yield NewHost(tmp_path_factory.mktemp("site"))
    lab("down", GUEST)


def test_a_host_key_that_nobody_compared_is_sent_no_password(new_host: NewHost) -> None:
    run = new_host.bootstrap(password=new_host.password, compared=False)
    assert run.exit_code != 0
    assert "which -y does not do" in run.stderr
    assert not new_host.known_hosts.exists()
    # Its own log says who knocked: nobody tried a password.
    said = new_host.console("journalctl -u ssh -o cat --no-pager")
    assert "password" not in said.lower()


def test_a_wrong_password_changes_nothing(new_host: NewHost, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("not it\n")
    run = new_host.bootstrap(password=tmp_path / "wrong")
    assert run.exit_code != 0
    assert f"password: refused by {GUEST}" in run.stderr
    assert "authorized_keys" not in new_host.console("ls -A /home/spark/.ssh 2>/dev/null || :")


def test_one_password_makes_passwords_superfluous(new_host: NewHost) -> None:
    run = new_host.bootstrap("-vvv", "--debug", password=new_host.password)
    assert run.exit_code == 0, run.stderr[-3000:]
    assert len(run.changed) == 3
    assert new_host.about["password"] not in run.stderr + str(run.document)
    journal = new_host.console("journalctl -o cat --no-pager; cat /etc/sudoers.d/*")
    assert new_host.about["password"] not in journal
    assert new_host.console("visudo -cq && echo valid").strip() == "valid"
    by_hand = new_host.by_hand(new_host.about["user"])
    assert by_hand.stdout.strip() == "0", by_hand.stderr


def test_the_recorded_key_is_the_one_the_machine_has(new_host: NewHost) -> None:
    assert new_host.about["host_key"] in new_host.known_hosts.read_text()


def test_a_second_run_asks_for_nothing_and_changes_nothing(new_host: NewHost) -> None:
    again = new_host.bootstrap()
    assert (again.exit_code, again.changed) == (0, [])


def test_a_host_key_that_changed_is_refused(new_host: NewHost) -> None:
    kept = new_host.known_hosts.read_text()
    other = next(g for g in info()["guests"] if g["name"] != GUEST and g["host_key"])
    new_host.known_hosts.write_text(f"{new_host.about['ip']} {other['host_key']}\n")
    try:
        run = new_host.bootstrap(password=new_host.password)
        left = new_host.known_hosts.read_text()
    finally:
        new_host.known_hosts.write_text(kept)
    assert run.exit_code != 0
    assert "someone stands between" in run.stderr
    assert "ssh-keygen -f" in run.stderr
    assert new_host.about["host_key"] not in left


def test_a_host_bootstrapped_before_gets_an_account_for_deploys_alone(new_host: NewHost) -> None:
    new_host.choose_account()
    run = new_host.bootstrap()  # the key of the earlier one does it, without a password
    assert run.exit_code == 0, run.stderr[-3000:]
    assert len(run.changed) == 2
    assert "that gave another account root" in run.stderr
    assert new_host.by_hand("spark-deploy").stdout.strip() == "0"
    assert "password is required" in new_host.by_hand(new_host.about["user"]).stderr
    again = new_host.bootstrap()
    assert (again.exit_code, again.changed) == (0, [])


def test_the_account_s_key_is_refused_from_another_address(new_host: NewHost) -> None:
    key = Path(info()["ssh"]["key"]).read_text()
    said = new_host.console(
        f"umask 077; cat > /root/stolen <<'KEY'\n{key}KEY\n"
        "ssh -i /root/stolen -o BatchMode=yes -o StrictHostKeyChecking=no -o IdentitiesOnly=yes"
        " spark-deploy@127.0.0.1 id -u 2>&1; rm -f /root/stolen"
    )
    assert "Permission denied" in said
    assert new_host.console("stat -c %U:%a /var/lib/spark-deploy/.ssh/authorized_keys") == (
        "root:644\n"
    )


def test_what_was_granted_is_taken_back_and_can_be_granted_again(new_host: NewHost) -> None:
    dry = new_host.site.deploy(dry=True, deploy="deploys/unbootstrap.py")
    assert dry.exit_code == 0, dry.stderr[-3000:]
    assert new_host.by_hand("spark-deploy").stdout.strip() == "0"
    run = new_host.take_back()
    assert run.exit_code == 0, run.stderr[-3000:]
    assert "our key opens nothing here any more" in run.stderr
    assert "Permission denied" in new_host.by_hand("spark-deploy").stderr
    left = new_host.console(
        "ls -d /var/lib/spark-deploy /etc/sudoers.d/90-spark-deploy 2>&1; getent passwd"
        " spark-deploy; visudo -cq && echo valid"
    )
    assert left.count("No such file") == 2
    assert left.strip().splitlines()[-1] == "valid"
    again = new_host.bootstrap(password=new_host.password)
    assert again.exit_code == 0, again.stderr[-3000:]
    assert new_host.by_hand("spark-deploy").stdout.strip() == "0"
