import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_deploy.cli.connect import ssh_command
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError
from spark_deploy.inventory import command_line, groups, host_names
from spark_deploy.inventory.groups import groups_from
from spark_deploy.inventory.host_names import HostContext
from spark_deploy.inventory.plans import read_inventory
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from tests.unit.planning.plans import CATALOG, PAYLOAD, made_up_lock, settings_of


def data_of(text, host):
    part = text.split(f"[{host}]")[1].split("--> Data:")[1]
    return json.JSONDecoder().raw_decode(part[part.index("{") :])[0]


@pytest.mark.slow
def test_uses_group_vars_next_to_the_inventory(repository):
    repository.write("group_vars/spark.yml", "profile: base\nssh: {user: me}\n")
    done = repository.pyinfra()
    assert done.returncode == 0, done.stderr
    data = data_of(done.stdout + done.stderr, "spark-2")
    assert (data["profile"], data["model"]) == ("base", "qwen3.5-122b")
    assert (data["ssh_user"], data["_sudo"]) == ("me", True)
    assert data["ssh_strict_host_key_checking"] == "yes"


def test_root_login_does_not_use_sudo(repository, monkeypatch):
    repository.write("host_vars/spark-1.yml", "ssh: {user: root}\n")
    repository.write("home/.ssh/config", "Host spark-2\n  User root\n")
    monkeypatch.setenv("HOME", str(repository.root / "home"))
    groups.get_ssh_config.cache.clear()
    assert [data["_sudo"] for data in repository.read().values()] == [False, False]
    repository.write("home/.ssh/config", "Host spark-2\n  User ann\n")
    groups.get_ssh_config.cache.clear()
    assert repository.read()["spark-2"]["_sudo"] is True
    groups.get_ssh_config.cache.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "login", "sudo"), [("root", "ann", True), ("ann", "root", False)]
)
def test_login_user_on_the_command_line_determines_whether_sudo_is_used(
    repository, settings, login, sudo
):
    repository.write("group_vars/spark.yml", f"ssh: {{user: {settings}}}\n")
    data = read_inventory(repository.inventory, data=[f"ssh_user={login}"])
    assert data["spark-1"]["_sudo"] is sudo
    done = repository.pyinfra("--ssh-user", login)
    assert data_of(done.stdout + done.stderr, "spark-1")["_sudo"] is sudo


def test_login_user_is_read_from_the_given_ssh_config(repository, tmp_path):
    repository.write("ssh/config", "Host spark-*\n  User root\n")
    data = {"spark-1": {"ssh_config_file": str(tmp_path / "ssh/config")}}
    made = groups_from({"spark": ["spark-1"]}, file=str(repository.inventory), host_data=data)
    [(_, host)] = made["spark"][0]
    assert host["_sudo"] is False
    assert ssh_command(SimpleNamespace(name="spark-1", data=host))[:3] == [
        "ssh", "-F", str(tmp_path / "ssh/config")
    ]  # fmt: skip


def test_settings_are_readable_by_a_user_without_login_name(repository, monkeypatch):
    def refuse():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(groups.getpass, "getuser", refuse)
    assert repository.read()["spark-1"]["_sudo"] is True


def test_validates_data_given_on_the_command_line(repository):
    done = repository.pyinfra("--data", "profile=v9", "--data", "serve.port=http")
    assert done.returncode == 1
    assert '--data: serve.port: "http" is not a whole number' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": ["sprk-1"]}, "--limit sprk-1: matches no host or group"),
        ({"limit": ["spark-1"], "exclude": ["sprk-1"]}, "--exclude sprk-1: matches no host"),
        ({"exclude": ["spark-*"]}, "excludes every host"),
        ({"limit": ["spark-1"], "exclude": ["spark-1"]}, "excludes every host"),
    ],
)
def test_rejects_patterns_that_match_no_host(repository, options, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        read_inventory(repository.inventory, **options)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ["spark-1", "spark-2"]),
        ({"limit": ["spark-*"], "exclude": ["spark-2"]}, ["spark-1"]),
        ({"limit": ["spark", "all", "sparks"], "exclude": ["spark-1"]}, ["spark-2"]),
    ],
)
def test_limit_and_exclude_select_hosts(repository, options, chosen):
    assert list(read_inventory(repository.inventory, **options)) == chosen


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"ssh.port={server.getsockname()[1]}"


def test_rejects_incompatible_model_and_profile_before_connecting(repository, port):
    repository.list_hosts('["127.0.0.1"]')
    wrong = ("--data", port, "--data", "model=qwen3.5-397b", "-y")
    refused = repository.pyinfra(*wrong, deploy=str(CHECKOUT / "deploy.py"))
    assert refused.returncode == 1
    assert "model qwen3.5-397b with profile v2: does not fit on one host" in refused.stderr
    assert "Connecting" not in refused.stderr
    tried = repository.pyinfra("--data", port, "-y", deploy=str(CHECKOUT / "deploy.py"))
    assert tried.returncode == 1
    assert "[127.0.0.1] unreachable: [127.0.0.1]:" in tried.stderr


@pytest.mark.parametrize("name", ["rollback", "rotate_key", "unbootstrap", "uninstall"])
def test_deploys_that_need_no_plan_accept_incompatible_model_and_profile(name):
    arguments = {"operations": (str(CHECKOUT / f"deploys/{name}.py"),)}
    assert not command_line.requires_valid_models(arguments)


def test_reports_closed_connection_in_one_line(repository):
    repository.list_hosts('["127.0.0.1"]')

    def hang_up(listener):
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as host:
        threading.Thread(target=hang_up, args=(host,), daemon=True).start()
        port = f"ssh.port={host.getsockname()[1]}"
        tried = repository.pyinfra("--data", port, "-y", deploy=str(CHECKOUT / "deploy.py"))
    assert "[127.0.0.1] unreachable: [127.0.0.1]:" in tried.stderr
    assert "Traceback" not in tried.stderr


def test_shipped_inventory_can_be_read_from_any_folder(repository):
    done = repository.run("pyinfra", str(CHECKOUT / "inventory/spark.py"), "debug-inventory")
    assert done.returncode == 0, done.stderr


def test_reports_missing_lab_in_one_line(repository, monkeypatch):
    monkeypatch.setenv("SPARK_LAB_DIR", str(repository.root))
    done = repository.run("pyinfra", str(CHECKOUT / "inventory/lab.py"), "debug-inventory")
    assert done.returncode == 1
    assert "lab.json: the lab's state cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_parses_data_options_as_pyinfra_does():
    texts = ["true", "False", "8", "-1", "1.5", '{"a": 1}', "null", "v2", "013", "", "a=b", "1_0"]
    # Importing pyinfra_cli patches the interpreter: not in this process.
    script = (
        "import sys; from pyinfra_cli.util import parse_cli_arg\n"
        "from spark_deploy.inventory.command_line import _parse_value as parse\n"
        "print([text for text in sys.argv[1:] if repr(parse(text)) != repr(parse_cli_arg(text))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *texts], capture_output=True, text=True, cwd=CHECKOUT
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_catalog_next_to_the_inventory_adds_models(repository):
    text = "kind: plain\nsummary: Mine\nchoose_when: it is mine\nrepository: me/mine\n"
    repository.write("catalog/models/mine.yml", text)
    repository.write("group_vars/spark.yml", "model: mine\nprofile: plain\n")
    assert repository.read()["spark-1"]["model"] == "mine"
    repository.write("catalog/models/mine.yml", text.replace("me/mine", "nowhere"))
    assert "catalog/models/mine.yml: repository" in repository.error()


LISTS = {
    "empty": ("[]", "the list is empty", "add a host"),
    "login": ('["spark@spark-1"]', "'spark@spark-1': contains a login", "ssh: {user: spark}"),
    "port": ('["spark-1:2222"]', "contains a port", "ssh: {port: 2222}"),
    "missing comma": ('[\n    "alpha"  # upstairs\n    "beta",\n]',
     'sparks.py: hosts of spark line 6: "alpha" and "beta" are joined', "put a comma between them"),
    "group": ('["spark", "spark-2"]', "spark: would also select spark-2", "rename"),
    "all": ('["all", "spark-2"]', "all: would also select spark-2", "rename"),
    "inventory": ('["sparks", "spark-2"]', "sparks: would also select spark-2", "rename"),
    "duplicate": ('["spark-1", "spark-1"]', "spark-1: is listed twice", "list it once"),
    "text": ('"spark-1"', "expected a list, got 'spark-1'", "write hosts=["),
    "null": ("None", "expected a list, got None", "write hosts=["),
    "nested list": ('[["spark-1"]]', "expected a name, got ['spark-1']", "in quotes"),
    "number": ("[7]", "expected a name, got 7", "in quotes"),
    "empty name": ('[""]', "'': invalid host name", "such as spark-1"),
    "ssh option": ('["-oProxyCommand=x"]', "invalid host name or address", "such as spark-1"),
    "short address": ('["192.168.1"]', "invalid host name or address", "such as spark-1"),
    "wrong connector": ('["@locl"]', "only @local is supported", "write @local"),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTS)
def test_rejects_invalid_host_list_in_one_line(repository, case):
    hosts, what, fix = LISTS[case]
    repository.list_hosts(hosts)
    message = repository.error()
    assert what in message
    assert fix in message.partition("fix: ")[2]
    assert message.count("fix:") == 1


@pytest.mark.parametrize("host", ["spark-1", "Spark_1.lan", "10.0.0.7", "fe80::1", "@local"])
def test_accepts_names_and_addresses(repository, host):
    repository.list_hosts(f'["{host}"]')
    repository.write("sparks.py", repository.inventory.read_text() + '_note = "one " "two"\n')
    assert list(repository.read()) == [host]


STRAY = {
    "group_vars/sparks.yml": ("no group in sparks.py", "did you mean group_vars/spark.yml?"),
    "group_vars/elsewhere.yml": ("matches no group", "rename or remove it"),
    "group_vars/spark.yaml": ("is ignored", "group_vars/spark.yml"),
    "group_vars/spark/main.yml": ("group_vars/spark: is ignored", "group_vars/spark.yml"),
    "host_vars/spark1.yml": ("matches no host in", "did you mean host_vars/spark-1.yml?"),
    "host_vars/spark-1": ("is ignored", "host_vars/spark-1.yml"),
    "host_vars/spark-1.json": ("is ignored", "host_vars/spark-1.yml"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRAY)
def test_rejects_settings_files_that_would_be_ignored(repository, name):
    what, fix = STRAY[name]
    repository.write(name, "profile: base\n")
    message = repository.error()
    assert what in message
    assert fix in message
    assert message.count("fix:") == 1


def test_accepts_notes_among_the_inventory_settings_files(repository):
    for name in ("group_vars/spark.yml", "group_vars/all.yml", "host_vars/spark-2.yml"):
        repository.write(name, "profile: base\n")
    for name in ("group_vars/README.md", "host_vars/.gitkeep", "group_vars/spark.yml.bak"):
        repository.write(name, "words")
    assert len(repository.read()) == 2


def test_accepts_settings_files_of_an_adjacent_inventory(repository):
    repository.write("group_vars/office.yml", "profile: base\n")
    repository.write("host_vars/desk-1.yml", "profil: base\n")
    assert repository.error().count("fix:") == 2
    repository.write("office.py", 'office = _group_from("office", hosts=["desk-1"])')
    assert len(repository.read()) == 2


@pytest.mark.parametrize(
    ("text", "hosts", "connection"),
    [
        ('rack = ["spark-1", "spark-2"]', ["spark-1", "spark-2"], {}),
        ('rack = [("spark-1", {"ssh_port": 2222})]', ["spark-1"], {"ssh_port": 2222}),
        ('rack = (["spark-1"], {"ssh_user": "ann"})', ["spark-1"], {"ssh_user": "ann"}),
        ('a = ["spark-1"]\nb = ["spark-1", "spark-2"]', ["spark-1", "spark-2"], {}),
    ],
    ids=["list", "list with data", "group with data", "host in two groups"],
)
def test_reads_a_plain_pyinfra_inventory(repository, text, hosts, connection):
    repository.write("sparks.py", text)
    repository.write("group_vars/all.yml", "profile: base\n")
    data = repository.read()
    assert list(data) == hosts
    for fields in data.values():
        assert {**fields, "profile": "base", **connection} == fields


def test_reads_host_names_instead_of_a_file(repository, monkeypatch):
    monkeypatch.chdir(repository.root)
    assert list(read_inventory(Path("spark-1,spark-2"))) == ["spark-1", "spark-2"]
    assert list(read_inventory(Path("@local"))) == ["@local"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = [\n", "sparks.py line 1: cannot run: SyntaxError"),
        ("\nimport nothere", "line 2: cannot run: ModuleNotFound"),
        ("{}['x']", "line 1: cannot run: KeyError: 'x'"),
        ("_hosts = ['spark-1']", "lists no host"),
        ("", "lists no host"),
    ],
)
def test_reports_broken_inventory_in_one_line(repository, text, message):
    repository.write("sparks.py", text)
    assert message in repository.error()


def test_reraises_package_errors_unchanged(repository, monkeypatch):
    monkeypatch.setattr(groups, "load_hosts", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        repository.read()


def test_rejects_host_in_two_groups(repository):
    with pytest.raises(SettingsError, match="is in the groups a and b"):
        groups_from({"a": ["spark-1"], "b": ["spark-1"]}, file=str(repository.inventory))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("pyinfra", "inventory/sprak.py", "deploy.py", "-y"), "did you mean inventory/spark.py?"),
        (("pyinfra", "spark.py", "deploy.py", "-y"), "did you mean inventory/spark.py?"),
        (
            ("pyinfra", "no-such-host.invalid", "deploy.py", "-y"),
            "pass the path of an inventory file",
        ),
        (("spark_deploy", "status", "inventory/sprak.py"), "did you mean inventory/spark.py?"),
    ],
)
def test_commands_fail_without_an_inventory(repository, words, fix):
    done = repository.run(*words, cwd=CHECKOUT)
    assert done.returncode == 1, done.stderr
    assert "is not an inventory file" in done.stderr
    assert fix in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = []", "plain.py: lists no host"),
        ("rack = ([], {'a': 1})", "plain.py: lists no host"),
        ("_hosts = ['a']", "plain.py: lists no host"),
        ("hosts = [['spark-1']]", "hosts of hosts: expected a name, got ['spark-1']"),
        ("ports = [8000]\nhosts = ['spark-1']", None),
        ('hosts = ["@local"]', None),
    ],
)
def test_config_py_rejects_plain_inventory_without_hosts(repository, text, message):
    """pyinfra itself would ignore such groups and exit 0."""
    use_our_config(repository)
    repository.write("plain.py", text)
    done = repository.run("pyinfra", "plain.py", "debug-inventory")
    assert done.returncode == (0 if message is None else 1), done.stderr
    assert (message or "") in done.stderr


def use_our_config(repository):
    text = (CHECKOUT / "config.py").read_text()
    folder = "_pathlib.Path(__file__).resolve().parent"
    repository.write("config.py", text.replace(folder, repr(str(CHECKOUT))))


@pytest.mark.slow
@pytest.mark.parametrize("inventory", ["@local", "spark-1,spark-2", "localhost", "racks.hosts"])
def test_config_py_accepts_inventory_with_hosts_and_imported_modules(repository, inventory):
    use_our_config(repository)
    repository.write("racks.py", 'hosts = ["@local"]')
    done = repository.run("pyinfra", inventory, "debug-inventory")
    assert done.returncode == 0, done.stderr


def test_equal_plan_requests_are_planned_once(monkeypatch):
    planned: list[Request] = []
    monkeypatch.setattr(
        host_names, "plan_host", lambda request: planned.append(request) or plan_host(request)
    )
    settings = settings_of()
    request = Request("spark-1", settings, CATALOG, made_up_lock(settings, CATALOG), PAYLOAD)
    context = HostContext(None, CATALOG)
    assert context.plan(request) is context.plan(replace(request))
    other = replace(request, host="spark-2")
    assert context.plan(other).host == "spark-2"
    assert planned == [request, other]
