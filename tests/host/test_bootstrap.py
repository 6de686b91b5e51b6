import subprocess
from pathlib import Path

import pytest

from tests.labkit import SPARE, Site, info, lab

GUEST = SPARE[1]


class NewHost:
    def __init__(self, root):
        lab("up", GUEST, "--fresh", "--bootstrap-guest", GUEST)
        self.site = Site(root, hosts=[GUEST])
        self.known_hosts = root / "known_hosts"
        self.known_hosts.unlink()
        self.about = next(guest for guest in info()["guests"] if guest["name"] == GUEST)
        self.password = root / "password"
        self.password.touch(mode=0o600)
        self.password.write_text(self.about["password"] + "\n")
        self.host_keys = root / "host_keys"
        self.host_keys.write_text(f"{self.about['ip']} {self.about['host_key']}\n")

    def bootstrap(self, *arguments, password=None, confirmed=True):
        env = {"SPARK_BOOTSTRAP_PASSWORD_FILE": str(password)} if password else {}
        if confirmed:
            env["SPARK_BOOTSTRAP_HOST_KEYS_FILE"] = str(self.host_keys)
        return self.site.deploy(*arguments, deploy="deploys/bootstrap.py", env=env)

    def console(self, command):
        return lab("ssh", "--root", GUEST, command)

    def ssh(self, user):
        return subprocess.run(
            ["ssh", "-i", info()["ssh"]["key"], "-o", f"UserKnownHostsFile={self.known_hosts}",
             "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes",
             f"{user}@{self.about['ip']}", "sudo -n id -u"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip

    def use_deploy_account(self):
        folder = self.site.root / "host_vars"
        folder.mkdir(exist_ok=True)
        ssh = f"{{user: spark-deploy, first_user: {self.about['user']}}}"
        (folder / f"{GUEST}.yml").write_text(f"ssh: {ssh}\n")

    def unbootstrap(self, *, dry=False):
        return self.site.deploy(dry=dry, deploy="deploys/unbootstrap.py")


@pytest.fixture(scope="module")
def new_host(tmp_path_factory):
    yield NewHost(tmp_path_factory.mktemp("site"))
    lab("down", GUEST)


def test_bootstrap_sends_no_password_before_the_host_key_is_confirmed(new_host):
    run = new_host.bootstrap(password=new_host.password, confirmed=False)
    assert run.exit_code != 0
    assert not new_host.known_hosts.exists()
    log = new_host.console("journalctl -u ssh -o cat --no-pager")
    assert "password" not in log.lower()


def test_bootstrap_with_a_wrong_password_changes_nothing(new_host, tmp_path):
    (tmp_path / "wrong").write_text("not it\n")
    run = new_host.bootstrap(password=tmp_path / "wrong")
    assert run.exit_code != 0
    assert "authorized_keys" not in new_host.console("ls -A /home/spark/.ssh 2>/dev/null || :")


def test_bootstrap_asks_once_for_the_password_and_never_leaks_it(new_host):
    run = new_host.bootstrap("-vvv", "--debug", password=new_host.password).assert_succeeded()
    assert len(run.changed) == 3
    assert new_host.about["password"] not in run.stderr + str(run.document)
    journal = new_host.console("journalctl -o cat --no-pager; cat /etc/sudoers.d/*")
    assert new_host.about["password"] not in journal
    assert new_host.console("visudo -cq && echo valid").strip() == "valid"
    login = new_host.ssh(new_host.about["user"])
    assert login.stdout.strip() == "0", login.stderr
    assert new_host.about["host_key"] in new_host.known_hosts.read_text()


def test_second_bootstrap_changes_nothing(new_host):
    new_host.bootstrap().assert_unchanged()


def test_bootstrap_rejects_a_changed_host_key(new_host):
    recorded = new_host.known_hosts.read_text()
    other = next(g for g in info()["guests"] if g["name"] != GUEST and g["host_key"])
    new_host.known_hosts.write_text(f"{new_host.about['ip']} {other['host_key']}\n")
    try:
        run = new_host.bootstrap(password=new_host.password)
        left = new_host.known_hosts.read_text()
    finally:
        new_host.known_hosts.write_text(recorded)
    assert run.exit_code != 0
    assert new_host.about["host_key"] not in left


def test_bootstrap_adds_a_deploy_account_to_a_bootstrapped_host(new_host):
    new_host.use_deploy_account()
    run = new_host.bootstrap().assert_succeeded()
    assert len(run.changed) == 2
    assert new_host.ssh("spark-deploy").stdout.strip() == "0"
    assert "password is required" in new_host.ssh(new_host.about["user"]).stderr
    new_host.bootstrap().assert_unchanged()


def test_key_of_the_deploy_account_is_rejected_from_another_address(new_host):
    key = Path(info()["ssh"]["key"]).read_text()
    output = new_host.console(
        f"umask 077; cat > /root/stolen <<'KEY'\n{key}KEY\n"
        "ssh -i /root/stolen -o BatchMode=yes -o StrictHostKeyChecking=no -o IdentitiesOnly=yes"
        " spark-deploy@127.0.0.1 id -u 2>&1; rm -f /root/stolen"
    )
    assert "Permission denied" in output
    assert new_host.console("stat -c %U:%a /var/lib/spark-deploy/.ssh/authorized_keys") == (
        "root:644\n"
    )


def test_unbootstrap_revokes_access_and_bootstrap_restores_it(new_host):
    new_host.unbootstrap(dry=True).assert_succeeded()
    assert new_host.ssh("spark-deploy").stdout.strip() == "0"
    new_host.unbootstrap().assert_succeeded()
    assert "Permission denied" in new_host.ssh("spark-deploy").stderr
    left = new_host.console(
        "ls -d /var/lib/spark-deploy /etc/sudoers.d/90-spark-deploy 2>&1; getent passwd"
        " spark-deploy; visudo -cq && echo valid"
    )
    assert left.count("No such file") == 2
    assert left.strip().splitlines()[-1] == "valid"
    new_host.bootstrap(password=new_host.password).assert_succeeded()
    assert new_host.ssh("spark-deploy").stdout.strip() == "0"
