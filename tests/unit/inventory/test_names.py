"""Mistakes in an inventory that would otherwise go unnoticed: none of them gets a connection."""

import os
import subprocess
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError
from spark_deploy.inventory import groups
from spark_deploy.inventory.groups import groups_from
from spark_deploy.inventory.plans import read_inventory
from tests import forked

OURS = """
import sys as _sys
_sys.path.insert(0, {checkout!r})
from spark_deploy.inventory import group_from as _group_from
spark = _group_from("spark", hosts={hosts}, file=__file__)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A repository of a user's own, with an inventory of two hosts."""
    for folder in ("group_vars", "host_vars"):
        (tmp_path / folder).mkdir()
    write(tmp_path, '["spark-1", "spark-2"]')
    return tmp_path


def write(own: Path, hosts: str) -> None:
    (own / "sparks.py").write_text(OURS.format(checkout=str(CHECKOUT), hosts=hosts))


def refused(own: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        read_inventory(own / "sparks.py")
    return str(caught.value)


LISTS = {
    "no host": ("[]", "the list is empty", "name at least one host"),
    "a login": ('["spark@spark-1"]', "'spark@spark-1': holds a login", "ssh: {user: spark}"),
    "a port": ('["spark-1:2222"]', "holds a port", "ssh: {port: 2222}"),
    "a comma forgotten": (
        '["spark-1" "spark-2"]',
        'sparks.py: hosts of spark line 5: "spark-1" and "spark-2" are one name',
        "put a comma between them",
    ),
    "a comma forgotten at a line's end": (
        '[\n    "alpha"  # upstairs\n    "beta",\n]',
        'line 6: "alpha" and "beta" are one name',
        "put a comma",
    ),
    "a host twice": ('["spark-1", "spark-1"]', "spark-1: is listed twice", "list it once"),
    "one text": ('"spark-1"', "'spark-1' is no list", "write hosts=["),
    "nothing": ("None", "None is no list", "write hosts=["),
    "a list in the list": ('[["spark-1"]]', "['spark-1'] is no name", "as text in quotes"),
    "a mapping in the list": ('[{"spark-1": {}}]', "is no name", "as text in quotes"),
    "a number": ("[7]", "7 is no name", "as text in quotes"),
    "no name": ('[""]', "'': is no name", "such as spark-1"),
    "an option of ssh": ('["-oProxyCommand=x"]', "is no name or address", "such as spark-1"),
    "an address cut short": ('["192.168.1"]', "is no name or address", "such as spark-1"),
    "a misspelt connector": ('["@locl"]', "only @local works here", "write @local"),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_of_hosts_that_is_none_is_refused_in_one_line(own, case):
    hosts, what, fix = LISTS[case]
    write(own, hosts)
    message = refused(own)
    assert what in message
    assert f"\n  fix: {fix}" in message or fix in message.partition("fix: ")[2]
    assert message.count("fix:") == 1


@pytest.mark.parametrize("host", ["spark-1", "Spark_1.lan", "10.0.0.7", "fe80::1", "@local"])
def test_names_and_addresses_of_hosts_are_taken(own, host):
    write(own, f'["{host}"]')
    assert list(read_inventory(own / "sparks.py")) == [host]


def test_a_text_that_is_joined_on_purpose_and_is_no_host_is_nobodys_mistake(own):
    write(own, '["spark-1"]')
    with (own / "sparks.py").open("a") as file:
        file.write('_note = "one " "two"\n')
    assert list(read_inventory(own / "sparks.py")) == ["spark-1"]


STRAY = {
    "group_vars/sparks.yml": (
        "belongs to no group of sparks.py",
        "did you mean group_vars/spark.yml?",
    ),
    "group_vars/elsewhere.yml": ("belongs to no group", "rename or remove it"),
    "group_vars/spark.yaml": ("is not read", "write it as group_vars/spark.yml"),
    "group_vars/all.yaml": ("is not read", "write it as group_vars/all.yml"),
    "group_vars/spark/main.yml": ("group_vars/spark: is not read", "group_vars/spark.yml"),
    "host_vars/spark1.yml": ("belongs to no host", "did you mean host_vars/spark-1.yml?"),
    "host_vars/spark-1": ("is not read", "write it as host_vars/spark-1.yml"),
    "host_vars/spark-1.json": ("is not read", "write it as host_vars/spark-1.yml"),
}


@pytest.mark.parametrize("name", STRAY)
def test_a_file_of_settings_that_nobody_reads_is_refused(own, name):
    what, fix = STRAY[name]
    (own / name).parent.mkdir(exist_ok=True)
    (own / name).write_text("profile: base\n")
    message = refused(own)
    assert what in message
    assert fix in message
    assert message.count("fix:") == 1


def test_files_that_are_read_and_notes_beside_them_are_taken(own):
    for name in ("group_vars/spark.yml", "group_vars/all.yml", "host_vars/spark-2.yml"):
        (own / name).write_text("profile: base\n")
    for name in ("group_vars/README.md", "host_vars/.gitkeep", "group_vars/spark.yml.bak"):
        (own / name).write_text("words")
    assert len(read_inventory(own / "sparks.py")) == 2


def test_another_inventory_beside_may_have_files_of_its_own(own):
    (own / "group_vars/office.yml").write_text("profile: base\n")
    (own / "host_vars/desk-1.yml").write_text("profile: base\n")
    assert refused(own).count("belongs to no") == 2
    (own / "office.py").write_text('office = _group_from("office", hosts=["desk-1"])')
    assert len(read_inventory(own / "sparks.py")) == 2


def test_strays_are_told_together_with_the_mistakes_in_other_files(own):
    (own / "group_vars/sparks.yml").write_text("profile: base\n")
    (own / "group_vars/spark.yml").write_text("profil: base\n")
    assert refused(own).count("fix:") == 2


PLAIN = {
    "a list": ('rack = ["spark-1", "spark-2"]', ["spark-1", "spark-2"]),
    "a list with data": ('rack = [("spark-1", {"ssh_hostname": "10.0.0.1"})]', ["spark-1"]),
    "a group with data": ('rack = (["spark-1"], {"ssh_user": "ann"})', ["spark-1"]),
    "a host in two groups": ('a = ["spark-1"]\nb = ["spark-1", "spark-2"]', ["spark-1", "spark-2"]),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_plain_inventory_of_pyinfra_can_be_looked_at(own, case):
    text, hosts = PLAIN[case]
    (own / "sparks.py").write_text(text)
    (own / "group_vars/all.yml").write_text("profile: base\n")
    found = read_inventory(own / "sparks.py")
    assert list(found) == hosts
    assert {one["profile"] for one in found.values()} == {"base"}


def test_data_of_a_plain_inventory_says_how_to_connect(own):
    (own / "sparks.py").write_text(
        'rack = ([("spark-1", {"ssh_port": 2222})], {"ssh_user": "ann"})'
    )
    [data] = read_inventory(own / "sparks.py").values()
    assert (data["ssh_user"], data["ssh_port"]) == ("ann", 2222)


def test_names_instead_of_a_file_can_be_looked_at(own, monkeypatch):
    monkeypatch.chdir(own)
    assert list(read_inventory(Path("spark-1,spark-2"))) == ["spark-1", "spark-2"]
    assert list(read_inventory(Path("@local"))) == ["@local"]


BROKEN = {
    "not Python": ("hosts = [\n", "sparks.py line 1: cannot be run: SyntaxError"),
    "a module that is not there": ("\nimport nothere", "line 2: cannot be run: ModuleNotFound"),
    "an error of its own": ("{}['x']", "line 1: cannot be run: KeyError: 'x'"),
    "no host at all": ("_hosts = ['spark-1']", "names no host"),
    "an empty file": ("", "names no host"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_inventory_that_cannot_be_run_is_one_line(own, case):
    text, what = BROKEN[case]
    (own / "sparks.py").write_text(text)
    assert what in refused(own)


def test_an_error_of_this_package_does_not_blame_the_inventory(own, monkeypatch):
    def fail(*_args, **_options):
        raise TypeError("unable to evaluate a type")

    monkeypatch.setattr(groups, "load_hosts", fail)
    with pytest.raises(TypeError, match="unable to evaluate"):
        read_inventory(own / "sparks.py")


def test_a_host_in_two_groups_of_ours_is_refused(own):
    with pytest.raises(SettingsError, match="is in the groups a and b"):
        groups_from({"a": ["spark-1"], "b": ["spark-1"]}, file=str(own / "sparks.py"))


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return forked.run(words, cwd=cwd, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "fix"),
    [
        ("inventory/sprak.py", "did you mean inventory/spark.py?"),
        ("spark.py", "did you mean inventory/spark.py?"),
        ("no-such-host.invalid", "name an inventory file"),
    ],
)
def test_pyinfra_with_an_inventory_that_is_not_there_is_red(named, fix):
    """pyinfra itself does nothing then, and exits 0."""
    done = run("pyinfra", named, "deploy.py", "-y", cwd=CHECKOUT)
    assert done.returncode == 1, done.stderr
    assert f"{named}: is not an inventory file" in done.stderr
    assert fix in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("text", ["hosts = []", "rack = ([], {'a': 1})", "", "_hosts = ['a']"])
def test_pyinfra_with_a_plain_inventory_without_a_host_is_red(own, text):
    with_our_config(own)
    (own / "empty.py").write_text(text)
    done = run("pyinfra", "empty.py", "debug-inventory", cwd=own)
    assert done.returncode == 1, done.stdout
    assert "empty.py: names no host" in done.stderr


@pytest.mark.slow
def test_pyinfra_with_a_plain_inventory_of_hosts_that_are_none_is_red(own):
    """pyinfra itself ignores such a group and exits 0."""
    with_our_config(own)
    (own / "odd.py").write_text("hosts = [['spark-1']]")
    done = run("pyinfra", "odd.py", "debug-inventory", cwd=own)
    assert done.returncode == 1, done.stdout
    assert "hosts of hosts: ['spark-1'] is no name" in done.stderr
    (own / "odd.py").write_text("ports = [8000]\nhosts = ['spark-1']")
    assert run("pyinfra", "odd.py", "debug-inventory", cwd=own).returncode == 0


def with_our_config(own: Path) -> None:
    (own / "config.py").write_text((CHECKOUT / "config.py").read_text().replace(
        "_pathlib.Path(__file__).resolve().parent", repr(str(CHECKOUT))))  # fmt: skip


@pytest.mark.slow
def test_hosts_and_modules_that_pyinfra_knows_pass(own):
    with_our_config(own)
    (own / "racks.py").write_text('hosts = ["@local"]')
    for named in ("@local", "spark-1,spark-2", "sparks.py", "localhost", "racks.hosts"):
        done = run("pyinfra", named, "debug-inventory", cwd=own)
        assert done.returncode == 0, done.stderr


def test_spark_deploy_with_an_inventory_that_is_not_there_is_red(own):
    done = run("spark_deploy", "status", "inventory/sprak.py", cwd=CHECKOUT)
    assert done.returncode == 1
    assert "did you mean inventory/spark.py?" in done.stderr
