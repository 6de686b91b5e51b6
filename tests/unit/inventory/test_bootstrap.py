from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from paramiko import ECDSAKey, Ed25519Key
from paramiko.hostkeys import HostKeyEntry, HostKeys
from pyinfra.api.inventory import Inventory
from pyinfra.connectors.sshuserclient.client import get_ssh_config

from spark_deploy.config.errors import SettingsError
from spark_deploy.hosts.access import explain_sudo_error
from spark_deploy.inventory import bootstrap, groups, host_keys, login
from spark_deploy.inventory.host_keys import Endpoint, HostKey
from spark_deploy.inventory.login import (
    PASSWORD_FILE_VARIABLE,
    LoginResult,
    PasswordPrompt,
    find_public_key,
)


def never(*_):
    pytest.fail("was called")


class Terminal:
    def __init__(self, password="x", answer="y"):
        self.password, self.answer = password, answer
        self.prompts: list[str] = []

    def ask(self, text):
        self.prompts.append(text)
        return self.password

    def prepare(self, hosts):
        prompt = PasswordPrompt(self.ask)
        return bootstrap.prepare(hosts, prompt=prompt, confirm=lambda _: self.answer)


def contact_in(data, name):
    return bootstrap.contact_of(Inventory((list(data.items()), {})).get_host(name))


def host_key(path, state, name="10.0.0.1", recorded=None):
    endpoint = Endpoint("spark-1", "10.0.0.1", "ann", None, str(path), None, None)
    return HostKey(endpoint, name, path, state, ECDSAKey.generate(), recorded)


def set_terminal(monkeypatch, *, present):
    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"isatty": lambda self: present})())


@pytest.fixture
def tty(monkeypatch):
    set_terminal(monkeypatch, present=True)
    monkeypatch.delenv(PASSWORD_FILE_VARIABLE, raising=False)
    return Terminal()


@pytest.fixture
def no_tty(monkeypatch, tmp_path):
    set_terminal(monkeypatch, present=False)
    (tmp_path / "password").write_text("secret word\nsecond line\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    monkeypatch.setenv(bootstrap.HOST_KEYS_FILE_VARIABLE, str(tmp_path / "host_keys"))


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    (tmp_path / "id.pub").write_text("ssh-ed25519 AAAA ann@desk\n")
    keys = {f"{name}.test": ECDSAKey.generate() for name in ("spark-1", "spark-2", "ready")}
    lines = [HostKeyEntry([name], key).to_line() for name, key in keys.items()]
    (tmp_path / "host_keys").write_text("".join(lines))

    def query(e):
        return HostKey(e, e.hostname, Path(e.known_hosts), "new", keys[e.hostname], None)

    monkeypatch.setattr(bootstrap, "query_host_key", query)
    monkeypatch.setattr(bootstrap, "accepts_password", lambda e, password: password != "wrong")
    monkeypatch.setattr(
        bootstrap, "try_key", lambda e: LoginResult(e.host == "ready", e.host == "ready")
    )
    return {
        name.removesuffix(".test"): {
            "ssh_hostname": name,
            "ssh_user": "ann",
            "ssh_key": str(tmp_path / "id"),
            "ssh_known_hosts_file": str(tmp_path / "known_hosts"),
        }
        for name in keys
    }


def test_records_confirmed_host_keys(tmp_path):
    path = tmp_path / "ssh" / "known_hosts"
    first, second = host_key(path, "new"), host_key(path, "new", name="[10.0.0.2]:2222")
    host_keys.record_host_keys([first])
    path.write_text(path.read_text().rstrip("\n"))  # people edit these files
    host_keys.record_host_keys([second])
    known = HostKeys(str(path))
    assert known.check("10.0.0.1", first.key)
    assert known.check("[10.0.0.2]:2222", second.key)


def test_rejects_changed_host_key_and_prints_both_fingerprints(tmp_path):
    key = host_key(tmp_path / "known_hosts", "changed", recorded=ECDSAKey.generate())
    (problem,) = host_keys.changed_key_problems([key])
    assert key.fingerprint in problem.what
    assert host_keys.fingerprint(key.recorded) in problem.what
    assert "ssh-keygen" in problem.fix
    assert "-R '10.0.0.1'" in problem.fix


def test_fingerprint_matches_ssh_keygen():
    line = "h ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJFfMrpNeTelRflm0IbZ9HE5k8PQkXtrcxHQridZPhsA"
    key = HostKeyEntry.from_line(line).key
    assert isinstance(key, Ed25519Key)
    expected = "ssh-ed25519 SHA256:YxkaboBWNOhhcME+pW0TApsKDpPRaR+iskMAH5cHYSY"
    assert host_keys.fingerprint(key) == expected


def test_one_prompt_covers_all_hosts_that_need_a_password(tty, hosts):
    data = tty.prepare(hosts)
    assert len(tty.prompts) == 1
    assert "spark-1, spark-2" in tty.prompts[0]
    assert set(data["ready"]) == {bootstrap.CONTACT_KEY}
    assert data["spark-1"]["ssh_password"] == "x"
    assert data["spark-1"]["_sudo"] is False


def test_inventory_groups_in_one_command_share_the_password(tty, hosts):
    def prompt():
        return groups._once_per_command("password", lambda: PasswordPrompt(tty.ask))

    for expected in (1, 2):
        with click.Context(click.Command("pyinfra")):
            for name in ("spark-1", "spark-2", "ready"):
                bootstrap.prepare({name: hosts[name]}, prompt=prompt(), confirm=lambda _: "y")
        assert len(tty.prompts) == expected
    assert prompt() is not prompt()


def test_password_rejected_three_times_by_every_host_ends_the_run(tty, hosts):
    tty.password = "wrong"
    with pytest.raises(SettingsError, match="rejected by spark-1, spark-2"):
        tty.prepare(hosts)
    assert len(tty.prompts) == 3


def test_only_hosts_that_reject_a_password_need_another(tty, hosts, monkeypatch):
    right = {"spark-1": "one", "spark-2": "two"}
    typed = iter(["one", "wrong", "two"])
    monkeypatch.setattr(
        bootstrap, "accepts_password", lambda e, password: password == right[e.host]
    )
    monkeypatch.setattr(tty, "ask", lambda text: tty.prompts.append(text) or next(typed))
    data = tty.prepare(hosts)
    assert {name: data[name]["ssh_password"] for name in right} == right
    assert ["spark-1" in prompt for prompt in tty.prompts] == [True, False, False]


@pytest.mark.usefixtures("no_tty")
def test_a_password_file_is_read_once(hosts, tmp_path):
    (tmp_path / "password").write_text("wrong\n")
    with pytest.raises(SettingsError, match="rejected by spark-1, spark-2"):
        bootstrap.prepare(hosts, prompt=PasswordPrompt(never), confirm=never)


def test_run_continues_if_one_host_rejects_the_password(tty, hosts, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "accepts_password", lambda e, _: e.host == "spark-1")
    assert "spark-1" in tty.prepare(hosts)
    assert "spark-2: password rejected" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["n", ""])
def test_unconfirmed_host_keys_are_not_recorded(tty, hosts, tmp_path, answer):
    tty.answer = answer
    with pytest.raises(SettingsError, match="not confirmed"):
        tty.prepare(hosts)
    assert not (tmp_path / "known_hosts").exists()


def test_does_not_prompt_for_a_password_if_no_key_is_to_be_installed(
    tty, hosts, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    keyless = {name: {**data, "ssh_key": None} for name, data in hosts.items()}
    with pytest.raises(SettingsError, match="run `ssh-keygen -t ed25519`"):
        bootstrap.prepare(keyless, prompt=PasswordPrompt(never), confirm=never)


@pytest.mark.usefixtures("no_tty")
def test_never_sends_password_to_host_with_unconfirmed_key(hosts, monkeypatch, tmp_path):
    monkeypatch.delenv(bootstrap.HOST_KEYS_FILE_VARIABLE)
    for contact in ("try_key", "accepts_password"):
        monkeypatch.setattr(bootstrap, contact, never)
    with pytest.raises(SettingsError, match="-y does not confirm it") as refused:
        bootstrap.prepare(hosts, prompt=PasswordPrompt(), confirm=never)
    assert bootstrap.HOST_KEYS_FILE_VARIABLE in str(refused.value)
    assert not (tmp_path / "known_hosts").exists()


@pytest.mark.usefixtures("no_tty")
def test_accepts_only_host_keys_listed_in_the_given_file(hosts, tmp_path):
    bootstrap.prepare(hosts, prompt=PasswordPrompt(), confirm=never)
    assert (tmp_path / "known_hosts").read_text().count("\n") == 3
    (tmp_path / "known_hosts").unlink()
    lines = (tmp_path / "host_keys").read_text().splitlines()
    lines[0] = HostKeyEntry(["spark-1.test"], ECDSAKey.generate()).to_line().strip()
    (tmp_path / "host_keys").write_text("\n".join(lines) + "\n")
    with pytest.raises(SettingsError, match="may be intercepted"):
        bootstrap.prepare(hosts, prompt=PasswordPrompt(), confirm=lambda _: "y")
    assert not (tmp_path / "known_hosts").exists()


@pytest.mark.usefixtures("no_tty")
def test_password_read_from_a_file_is_printed_as_stars(hosts):
    data = bootstrap.prepare(hosts, prompt=PasswordPrompt(), confirm=never)
    assert data["spark-2"]["ssh_password"] == "secret word"
    assert contact_in(data, "spark-2").password.unmask() == "secret word"
    assert "secret" not in f"{data!r} {data} {contact_in(data, 'spark-1')!r}"


@pytest.mark.usefixtures("no_tty")
def test_error_about_a_missing_terminal_mentions_the_password_file(hosts, monkeypatch):
    monkeypatch.delenv(PASSWORD_FILE_VARIABLE)
    with pytest.raises(SettingsError, match=PASSWORD_FILE_VARIABLE):
        bootstrap.prepare(hosts, prompt=PasswordPrompt(), confirm=never)


def test_creates_the_deploy_account_through_the_existing_login(tty, hosts, monkeypatch):
    logins = []
    ann, none = (
        LoginResult(logs_in=True, passwordless_sudo=False),
        LoginResult(logs_in=False, passwordless_sudo=False),
    )
    monkeypatch.setattr(
        bootstrap, "try_key", lambda e: logins.append(e.user) or (ann if e.user is None else none)
    )
    data = tty.prepare({"spark-1": {**hosts["spark-1"], "ssh_user": "spark-deploy"}})
    assert logins == ["spark-deploy", None]
    assert data["spark-1"]["ssh_user"] is None
    assert "ssh_password" not in data["spark-1"]
    contact = contact_in(data, "spark-1")
    assert contact.password.unmask() == "x"
    assert contact.endpoint.user == "spark-deploy"
    assert not contact.ready


@pytest.mark.parametrize("passwordless_sudo", [True, False])
def test_local_machine_needs_only_the_sudo_password(passwordless_sudo, tty, monkeypatch):
    monkeypatch.setattr(bootstrap, "try_key", lambda e: LoginResult(e.is_local, passwordless_sudo))
    data = tty.prepare({"@local": {}})["@local"]
    contact = data.pop(bootstrap.CONTACT_KEY)
    assert contact.ready == passwordless_sudo
    assert len(tty.prompts) == (not passwordless_sudo)
    assert data == ({} if passwordless_sudo else {"_sudo": False})
    assert passwordless_sudo or contact.password.unmask() == "x"


def test_rejects_a_host_from_a_different_inventory():
    with pytest.raises(SettingsError, match="spark-1: is not listed in an inventory file"):
        contact_in({"spark-1": {}}, "spark-1")


def test_public_key_is_read_from_a_file_the_ssh_config_or_the_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    get_ssh_config.cache.clear()
    spark = Endpoint("spark-1", "10.0.0.1", "ann", None, None, str(tmp_path / "config"), None)
    with pytest.raises(SettingsError, match="ssh-keygen -t ed25519"):
        find_public_key(spark)
    with pytest.raises(SettingsError, match=f"ssh-keygen -t ed25519 -f {tmp_path}/none"):
        find_public_key(replace(spark, key_file=str(tmp_path / "none")))
    key, held = ECDSAKey.generate(), ECDSAKey.generate()
    monkeypatch.setattr(login, "Agent", lambda: SimpleNamespace(get_keys=lambda: [held]))
    assert find_public_key(spark) == f"{held.get_name()} {held.get_base64()}"
    key.write_private_key_file(str(tmp_path / "id"))
    derived = find_public_key(replace(spark, key_file=str(tmp_path / "id")))
    assert derived == f"{key.get_name()} {key.get_base64()}"
    (tmp_path / "work.pub").write_text("ssh-ed25519 AAAA work\n")
    (tmp_path / "config").write_text("Host 10.0.0.1\n  IdentityFile ~/work\n")
    get_ssh_config.cache.clear()
    assert find_public_key(spark) == "ssh-ed25519 AAAA work"


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("Sorry, try again.\nsudo: no password was provided", "rejected the password"),
        ("sudo: 1 incorrect password attempt", "rejected the password"),
        ("ann is not in the sudoers file.", "not allowed to use sudo"),
        ("visudo rejected the rule", "was not activated"),
    ],
)
def test_explains_sudo_errors(output, cause):
    assert cause in explain_sudo_error(output).what


def test_only_bootstrap_contacts_hosts_while_the_inventory_is_read():
    for deploy in ("deploys/bootstrap.py", "/opt/x/deploys/bootstrap.py"):
        assert groups._is_bootstrap({"operations": (deploy,)})
    for operations in (("deploy.py",), ("debug-inventory", "deploys/bootstrap.py"), ()):
        assert not groups._is_bootstrap({"operations": operations})
