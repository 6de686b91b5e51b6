"""Bootstrap trusts no changed key, asks for one password once, and never shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from paramiko import ECDSAKey, Ed25519Key
from paramiko.hostkeys import HostKeyEntry, HostKeys
from pyinfra.api.inventory import Inventory

from spark_deploy.config.errors import SettingsError
from spark_deploy.hosts.access import explain_sudo_error, sudoers
from spark_deploy.inventory import bootstrap, host_keys
from spark_deploy.inventory import groups as inventory
from spark_deploy.inventory.host_keys import Endpoint, Seen
from spark_deploy.inventory.login import PASSWORD_FILE_VARIABLE, Access, Asked, public_key


def new_key() -> Any:
    return ECDSAKey.generate()


def seen(path: Path, state: Any, name: str = "10.0.0.1", **given: Any) -> Seen:
    endpoint = Endpoint("spark-1", "10.0.0.1", "ann", None, str(path), None, None)
    return Seen(endpoint, name, path, state, given.get("key", new_key()), given.get("recorded"))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_FILE_VARIABLE, raising=False)


def prepare(hosts: dict[str, dict[str, Any]], ask: Any = None) -> dict[str, dict[str, Any]]:
    asked = Asked(ask) if ask else Asked()
    return bootstrap.prepare(hosts, asked=asked, confirm=lambda _: "y")


def contact_in(data: dict[str, dict[str, Any]], name: str) -> bootstrap.Contact:
    """Return what the deploy finds in pyinfra's data of a host."""
    inventory = Inventory(([(host, more) for host, more in data.items()], {}))
    return bootstrap.contact_of(inventory.get_host(name))


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", type("Tty", (), {"isatty": lambda self: True})())


@pytest.fixture
def new_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Two hosts that want a password; one host that is ready; key and known_hosts in tmp_path."""
    monkeypatch.setattr(bootstrap, "takes_password", lambda e, password: password != "wrong")
    (tmp_path / "id.pub").write_text("ssh-ed25519 AAAA ann@desk\n")
    names = ("spark-1", "spark-2", "ready")
    keys = {f"{name}.example.test": new_key() for name in names}
    monkeypatch.setattr(
        bootstrap,
        "look",
        lambda e: Seen(e, e.hostname, Path(e.known_hosts), "new", keys[e.hostname], None),
    )
    (tmp_path / "host_keys").write_text(
        "".join(f"{HostKeyEntry([name], key).to_line()}" for name, key in keys.items())
    )
    monkeypatch.setattr(
        bootstrap,
        "try_key",
        lambda e: Access(e.host == "ready", e.host == "ready"),
    )
    return {
        name: {
            "ssh_hostname": f"{name}.example.test",
            "ssh_user": "ann",
            "ssh_key": str(tmp_path / "id"),
            "ssh_known_hosts_file": str(tmp_path / "known_hosts"),
        }
        for name in names
    }


def test_a_new_host_key_is_recorded_once_it_is_agreed_to(tmp_path: Path) -> None:
    path = tmp_path / "ssh" / "known_hosts"
    first, second = seen(path, "new"), seen(path, "new", name="[10.0.0.2]:2222")
    host_keys.record([first])
    path.write_text(path.read_text().rstrip("\n"))  # people edit these files
    host_keys.record([second])
    known = HostKeys(str(path))
    assert known.check("10.0.0.1", first.key)
    assert known.check("[10.0.0.2]:2222", second.key)


def test_a_changed_host_key_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    item = seen(tmp_path / "known_hosts", "changed", recorded=new_key())
    (problem,) = host_keys.problems_of([item])
    assert item.fingerprint in problem.what
    assert host_keys.describe(item.recorded) in problem.what
    assert "ssh-keygen" in problem.fix
    assert "-R '10.0.0.1'" in problem.fix


def test_fingerprints_read_as_ssh_keygen_prints_them() -> None:
    line = "h ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJFfMrpNeTelRflm0IbZ9HE5k8PQkXtrcxHQridZPhsA"
    entry = HostKeyEntry.from_line(line)
    assert isinstance(entry.key, Ed25519Key)
    wanted = "ssh-ed25519 SHA256:YxkaboBWNOhhcME+pW0TApsKDpPRaR+iskMAH5cHYSY"
    assert host_keys.describe(entry.key) == wanted


@pytest.mark.usefixtures("_terminal")
def test_the_password_is_asked_once_for_all_hosts_that_need_it(new_hosts) -> None:
    asked = []
    data = prepare(new_hosts, ask=lambda text: asked.append(text) or "x")
    assert len(asked) == 1
    assert "spark-1, spark-2" in asked[0]
    assert set(data["ready"]) == {bootstrap.CONTACT_KEY}
    assert data["spark-1"]["ssh_password"] == "x"
    assert data["spark-1"]["_sudo"] is False


@pytest.mark.usefixtures("_terminal")
def test_a_password_that_every_host_refuses_ends_the_run_before_any_change(new_hosts) -> None:
    with pytest.raises(SettingsError, match="refused by spark-1, spark-2"):
        prepare(new_hosts, ask=lambda _: "wrong")


@pytest.mark.usefixtures("_terminal")
def test_a_host_with_another_password_does_not_stop_the_others(
    new_hosts, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(bootstrap, "takes_password", lambda e, _: e.host == "spark-1")
    assert "spark-1" in prepare(new_hosts, ask=lambda _: "x")
    assert "spark-2 refuses this password" in capsys.readouterr().err


@pytest.mark.usefixtures("_terminal")
def test_a_second_group_does_not_ask_again(new_hosts) -> None:
    asked = []
    password = Asked(lambda text: asked.append(text) or "x")
    for name in ("spark-1", "spark-2"):
        bootstrap.prepare({name: new_hosts[name]}, asked=password, confirm=lambda _: "y")
    assert len(asked) == 1
    assert "ann on spark-1" in asked[0]


@pytest.mark.usefixtures("_terminal")
def test_new_keys_that_nobody_agrees_to_are_not_recorded(new_hosts, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not agreed"):
        bootstrap.prepare(new_hosts, asked=Asked(), confirm=lambda _: "n")
    assert not (tmp_path / "known_hosts").exists()


@pytest.mark.usefixtures("_terminal")
def test_without_a_key_of_ours_nothing_is_asked(new_hosts, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    asked: list[str] = []
    keyless = {name: {**data, "ssh_key": None} for name, data in new_hosts.items()}
    with pytest.raises(SettingsError, match="run `ssh-keygen -t ed25519`"):
        bootstrap.prepare(
            keyless, asked=Asked(lambda text: asked.append(text) or "x"),
            confirm=lambda text: asked.append(text) or "y",
        )  # fmt: skip
    assert not asked


@pytest.fixture
def _pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", type("Pipe", (), {"isatty": lambda self: False})())


@pytest.fixture
def _compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The keys of the new hosts, as a person read them at the machines."""
    monkeypatch.setenv(bootstrap.HOST_KEYS_FILE_VARIABLE, str(tmp_path / "host_keys"))


@pytest.mark.usefixtures("_pipe")
def test_no_password_goes_to_a_host_whose_key_nobody_saw(
    new_hosts, monkeypatch, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("secret\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    for contact in ("try_key", "takes_password"):
        monkeypatch.setattr(bootstrap, contact, lambda *_: pytest.fail("was contacted"))
    # As `-y` has it: nobody is asked.
    with pytest.raises(SettingsError, match="which -y does not do") as refused:
        bootstrap.prepare(new_hosts, asked=Asked(), confirm=lambda _: pytest.fail("asked"))
    assert bootstrap.HOST_KEYS_FILE_VARIABLE in str(refused.value)
    assert not (tmp_path / "known_hosts").exists()


@pytest.mark.usefixtures("_pipe", "_compared")
def test_a_key_that_was_brought_along_is_recorded_and_another_one_is_refused(
    new_hosts, monkeypatch, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("secret\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    asked = Asked()
    bootstrap.prepare(new_hosts, asked=asked, confirm=lambda _: pytest.fail("asked"))
    assert (tmp_path / "known_hosts").read_text().count("\n") == 3

    (tmp_path / "known_hosts").unlink()
    lines = (tmp_path / "host_keys").read_text().splitlines()
    others = HostKeyEntry(["spark-1.example.test"], new_key()).to_line()
    (tmp_path / "host_keys").write_text("\n".join([others.strip(), *lines[1:]]) + "\n")
    with pytest.raises(SettingsError, match="someone may stand between"):
        bootstrap.prepare(new_hosts, asked=asked, confirm=lambda _: "y")
    assert not (tmp_path / "known_hosts").exists()


@pytest.mark.usefixtures("_pipe", "_compared")
def test_without_a_terminal_the_way_to_give_a_password_is_named(new_hosts) -> None:
    with pytest.raises(SettingsError, match=PASSWORD_FILE_VARIABLE):
        prepare(new_hosts)


@pytest.mark.usefixtures("_pipe", "_compared")
def test_a_password_file_serves_where_there_is_no_terminal(
    new_hosts, monkeypatch, tmp_path
) -> None:
    (tmp_path / "password").write_text("pass word\nsecond line\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    data = prepare(new_hosts)
    assert data["spark-2"]["ssh_password"] == "pass word"
    assert contact_in(data, "spark-2").password.unmask() == "pass word"


@pytest.mark.usefixtures("_compared")
def test_debug_output_shows_stars_for_the_password(new_hosts, monkeypatch, tmp_path) -> None:
    (tmp_path / "password").write_text("geheim\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    data = prepare(new_hosts)
    assert "geheim" not in f"{data!r} {data} {contact_in(data, 'spark-1')!r}"


@pytest.mark.usefixtures("_terminal")
def test_the_account_for_deploys_is_made_by_the_login_there_is_and_proven_by_its_own(
    new_hosts, monkeypatch
) -> None:
    logins = []
    ann = Access(logs_in=True, sudo_free=False)
    none = Access(logs_in=False, sudo_free=False)
    monkeypatch.setattr(
        bootstrap, "try_key", lambda e: logins.append(e.user) or (ann if e.user is None else none)
    )
    hosts = {"spark-1": {**new_hosts["spark-1"], "ssh_user": "spark-deploy"}}
    data = prepare(hosts, ask=lambda _: "x")
    assert logins == ["spark-deploy", None]
    assert data["spark-1"]["ssh_user"] is None  # whom ~/.ssh/config names
    assert "ssh_password" not in data["spark-1"]  # a key is enough for that login
    contact = contact_in(data, "spark-1")
    assert contact.password.unmask() == "x"
    assert contact.endpoint.user == "spark-deploy"
    assert not contact.ready


@pytest.mark.usefixtures("_compared")
def test_hosts_that_are_ready_ask_nobody(new_hosts) -> None:
    def nobody(_: str) -> str:
        raise AssertionError("asked")

    data = prepare({"ready": new_hosts["ready"]}, ask=nobody)
    assert contact_in(data, "ready").password is None


@pytest.mark.usefixtures("_terminal")
@pytest.mark.parametrize("sudo_free", [True, False])
def test_this_machine_needs_neither_key_nor_login_but_a_password_for_sudo(
    sudo_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "try_key", lambda e: Access(e.is_local, sudo_free))
    asked: list[str] = []
    data = prepare({"@local": {}}, ask=lambda text: asked.append(text) or "x")
    contact = contact_in(data, "@local")
    assert contact.ready == sudo_free
    assert len(asked) == (0 if sudo_free else 1)
    assert set(data["@local"]) == {bootstrap.CONTACT_KEY} | (set() if sudo_free else {"_sudo"})
    assert sudo_free or (contact.password.unmask(), data["@local"]["_sudo"]) == ("x", False)


def test_a_host_that_nobody_looked_at_is_a_clear_error() -> None:
    with pytest.raises(SettingsError, match="spark-1: no inventory file of ours named this host"):
        contact_in({"spark-1": {}}, "spark-1")


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="ssh-keygen -t ed25519"):
        public_key(None, home=tmp_path)
    with pytest.raises(SettingsError, match=f"ssh-keygen -t ed25519 -f {tmp_path}/none"):
        public_key(str(tmp_path / "none"))


def test_the_public_key_is_made_from_the_private_one_when_it_has_no_file(tmp_path: Path) -> None:
    key = new_key()
    key.write_private_key_file(str(tmp_path / "id"))
    assert public_key(str(tmp_path / "id")) == f"{key.get_name()} {key.get_base64()}"


def test_the_sudo_rule_is_one_line_for_one_user() -> None:
    rules = [line for line in sudoers("ann").splitlines() if not line.startswith("#")]
    assert rules == ["ann ALL=(ALL:ALL) NOPASSWD: ALL"]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("Sorry, try again.\nsudo: no password was provided", "refuses the password"),
        ("sudo: 1 incorrect password attempt", "refuses the password"),
        ("ann is not in the sudoers file.", "may not use sudo"),
        ("visudo refuses the rule", "was not activated"),
    ],
)
def test_what_sudo_says_is_told_apart(output: str, words: str) -> None:
    assert words in explain_sudo_error(output).what


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ["spark-1", "spark-2", "head"]),
        ({"limit": ["spark-*"]}, ["spark-1", "spark-2"]),
        ({"limit": ["spark"], "exclude": ["spark-2"]}, ["spark-1"]),
        ({"limit": ["all"], "exclude": ["head"]}, ["spark-1", "spark-2"]),
    ],
)
def test_only_hosts_of_this_run_are_contacted(options, chosen) -> None:
    groups = {"spark": ["spark-1", "spark-2"], "heads": ["head"]}
    assert inventory.chosen_hosts(options, groups, "site") == chosen


def test_no_other_deploy_makes_a_first_contact() -> None:
    assert inventory._is_bootstrap({"operations": ("deploys/bootstrap.py",)})
    assert inventory._is_bootstrap({"operations": ("/opt/x/deploys/bootstrap.py",)})
    assert not inventory._is_bootstrap({"operations": ("deploy.py",)})
    assert not inventory._is_bootstrap({"operations": ("debug-inventory", "deploys/bootstrap.py")})
    assert not inventory._is_bootstrap({})


def test_groups_of_one_command_share_the_password_and_the_next_command_asks_anew() -> None:
    def asked() -> Asked:
        return inventory._of_this_run("password", Asked)

    with click.Context(click.Command("pyinfra")):
        first, second = asked(), asked()
    with click.Context(click.Command("pyinfra")):
        later = asked()
    assert first is second
    assert later is not first
    assert asked() is not asked(), "without a command nobody keeps it"
