"""Inventories through pyinfra itself: nothing here gets a connection."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from spark_contract.gateway import Replicas

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError
from spark_deploy.inventory.host_names import KEY
from spark_deploy.inventory.plans import read_inventory
from spark_deploy.plan.gateway import base_urls, gateway_plan
from tests import forked

INVENTORY = """
import sys as _sys
_sys.path.insert(0, {checkout!r})
from spark_deploy.inventory.groups import group_from as _group_from
spark = _group_from("spark", hosts={hosts!r}, file=__file__)
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """An inventory in a user's own repository, with group_vars beside it."""
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/spark.yml").write_text("profile: base\nssh: {user: me}\n")
    path = tmp_path / "sparks.py"
    path.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["spark-1", "spark-2"]))
    return path


def pyinfra(
    inventory: Path, *arguments: str, cwd: Path | None = None, what: str = "debug-inventory"
):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = ["pyinfra", inventory, *arguments, what]
    return forked.run(words, cwd=cwd or inventory.parent, env=environment)


def data_of(text: str, host: str) -> dict:
    part = text.split(f"[{host}]")[1].split("--> Data:")[1]
    return json.JSONDecoder().raw_decode(part[part.index("{") :])[0]


def test_an_inventory_outside_the_checkout_brings_its_own_group_vars(foreign):
    done = pyinfra(foreign)
    assert done.returncode == 0, done.stderr
    data = data_of(done.stdout + done.stderr, "spark-2")
    assert (data["profile"], data["model"]) == ("base", "qwen3.5-122b")
    assert (data["ssh_user"], data["_sudo"]) == ("me", True)
    assert data["ssh_strict_host_key_checking"] == "yes"


def test_the_local_machine_is_a_host_like_any_other(foreign):
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["@local"]))
    done = pyinfra(foreign)
    data = data_of(done.stdout + done.stderr, "@local")
    assert data["profile"] == "base"
    assert not [key for key in data if key.startswith("ssh_")]


def test_data_of_the_command_line_is_validated_too(foreign):
    done = pyinfra(foreign, "--data", "profile=v9", "--data", "serve.port=http")
    assert done.returncode == 1
    assert '--data: serve.port: "http" is not a whole number' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--limit", "--exclude"])
def test_a_pattern_that_matches_nothing_is_refused(foreign, option):
    done = pyinfra(foreign, option, "sprk-1")
    assert done.returncode == 1
    assert f"{option} sprk-1: matches no host or group" in done.stderr
    assert "did you mean spark-1?" in done.stderr


@pytest.mark.parametrize(
    "words", [("--exclude", "spark-*"), ("--limit", "spark-1", "--exclude", "spark-1")]
)
def test_patterns_that_leave_no_host_are_refused(foreign, words):
    """pyinfra itself would do nothing, and call that a success."""
    done = pyinfra(foreign, *words)
    assert done.returncode == 1
    assert "leaves no host" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_globs_and_groups_are_good_limits(foreign):
    """Together, as one that is none is refused in any company."""
    patterns = ["spark-1", "spark-*", "spark", "all", "sparks"]
    limits = [word for pattern in patterns for word in ("--limit", pattern)]
    assert pyinfra(foreign, *limits).returncode == 0
    done = pyinfra(foreign, *limits, "--limit", "sprk-1")
    assert done.returncode == 1
    assert "--limit sprk-1: matches no host or group" in done.stderr


def test_a_pair_that_cannot_work_is_refused_before_connecting(foreign):
    deploy = str(CHECKOUT / "deploy.py")
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["127.0.0.1"]))
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = f"ssh.port={host.getsockname()[1]}"
        wrong = ("--data", port, "--data", "model=qwen3.5-397b")
        refused = pyinfra(foreign, *wrong, "-y", what=deploy)
        host.setblocking(False)
        with pytest.raises(BlockingIOError):
            host.accept()
    assert refused.returncode == 1
    assert "model qwen3.5-397b with profile base: does not fit on one host" in refused.stderr
    assert "Connecting" not in refused.stderr
    # The same with settings that can work does try, and finds nobody: the host is closed now.
    tried = pyinfra(foreign, "--data", port, "-y", what=deploy)
    assert tried.returncode == 1
    assert "Connecting to hosts" in tried.stderr
    assert "Could not connect" in tried.stderr


@pytest.mark.parametrize("name", ["rollback", "rotate_key", "unbootstrap", "uninstall"])
def test_a_deploy_that_serves_nothing_asks_nobody_what_could_be_served(foreign, name):
    """Else a slip in the choice would hold back the way to the release before."""
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["127.0.0.1"]))
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = f"ssh.port={host.getsockname()[1]}"
    wrong = ("--data", port, "--data", "model=qwen3.5-397b", "-y")
    tried = pyinfra(foreign, *wrong, what=str(CHECKOUT / f"deploys/{name}.py"))
    assert "does not fit" not in tried.stderr
    assert "Could not connect" in tried.stderr


def test_a_peer_that_hangs_up_is_one_line_and_no_traceback(foreign):
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["127.0.0.1"]))

    def hang_up(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as host:
        threading.Thread(target=hang_up, args=(host,), daemon=True).start()
        port = f"ssh.port={host.getsockname()[1]}"
        tried = pyinfra(foreign, "--data", port, "-y", what=str(CHECKOUT / "deploy.py"))
    assert "[127.0.0.1] SSH error" in tried.stderr
    assert "Traceback" not in tried.stderr


def test_the_inventory_of_the_checkout_works_from_any_folder(tmp_path):
    done = pyinfra(CHECKOUT / "inventory/spark.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_lab_that_is_down_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LAB_DIR", str(tmp_path))
    done = pyinfra(CHECKOUT / "inventory/lab.py")
    assert done.returncode == 1
    assert "lab.json: the lab's state cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_values_of_the_command_line_are_read_as_pyinfra_reads_them():
    """pyinfra hands the same option to hosts as data; the two must not disagree."""
    texts = ["true", "False", "8", "-1", "1.5", '{"a": 1}', "null", "v2", "013", "", "a=b", "1_0"]
    # pyinfra_cli patches the interpreter when imported: not in this process.
    script = (
        "import sys; from pyinfra_cli.util import parse_cli_arg as theirs\n"
        "from spark_deploy.inventory.command_line import _value as ours\n"
        "print([text for text in sys.argv[1:] if repr(ours(text)) != repr(theirs(text))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *texts], capture_output=True, text=True, cwd=CHECKOUT
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_canary_that_no_host_is_gets_refused_before_connecting(foreign):
    vars_of_all = foreign.parent / "group_vars/spark.yml"
    vars_of_all.write_text("profile: base\nrollout: {canary: spark-9}\n")
    done = pyinfra(foreign)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "'spark-9' is no host of this inventory" in said
    assert "name one of these hosts: spark-1, spark-2" in said
    vars_of_all.write_text("profile: base\nrollout: {canary: spark-2, at_once: all}\n")
    done = pyinfra(foreign)
    assert data_of(done.stdout + done.stderr, "spark-2")["rollout"]["canary"] == "spark-2"


def test_members_of_a_cluster_are_in_one_group_and_told_the_same(foreign):
    (foreign.parent / "group_vars/spark.yml").write_text(
        "model: qwen3.5-122b\ncluster: {hosts: [spark-1, spark-2]}\n"
    )
    assert pyinfra(foreign).returncode == 0
    (foreign.parent / "host_vars").mkdir()
    (foreign.parent / "host_vars/spark-2.yml").write_text("profile: base\n")
    done = pyinfra(foreign)
    assert done.returncode == 1
    assert "spark-2: profile: differs from that of spark-1, the head of" in done.stderr


@pytest.mark.parametrize(
    ("all_of_them", "one", "said"),
    [
        ("cluster: {hosts: [spark-1, spark-2]}", "cluster: {hosts: []}",
         "spark-2: cluster.hosts: spark-1 counts on it, but it is told none"),
        ("replicas: {hosts: [spark-1, spark-2]}\n"
         "serve: {expose: lan, api_key: {env: SPARK_API_KEY}}\n"
         "ssh: {user: me}", "ssh: {hostname: 192.168.1.22}\nreplicas: {hosts: []}",
         "spark-2: replicas.hosts: spark-1 counts on it, but it is told none"),
    ],
)  # fmt: skip
def test_a_host_that_others_count_on_and_that_shall_serve_alone_is_refused(
    foreign, monkeypatch, all_of_them, one, said
):
    monkeypatch.setenv("SPARK_API_KEY", "k" * 32)
    (foreign.parent / "group_vars/spark.yml").write_text(f"model: qwen3.5-122b\n{all_of_them}\n")
    (foreign.parent / "host_vars").mkdir()
    (foreign.parent / "host_vars/spark-2.yml").write_text(f"{one}\n")
    done = pyinfra(foreign)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("second", "refused"),
    [
        ("hostname: 192.168.1.21", True),
        ("hostname: 192.168.1.21, user: other", True),
        ("hostname: 192.168.1.21, port: 2222", False),
        ("hostname: 192.168.1.22", False),
    ],
)
def test_one_machine_under_two_names_is_refused_before_it_is_changed_twice_at_once(
    foreign, second, refused
):
    (foreign.parent / "host_vars").mkdir()
    for name, ssh in (("spark-1", "hostname: 192.168.1.21"), ("spark-2", second)):
        (foreign.parent / f"host_vars/{name}.yml").write_text(f"ssh: {{{ssh}}}\n")
    done = pyinfra(foreign)
    assert (done.returncode == 1) is refused
    assert ("spark-2: is reached at 192.168.1.21, as spark-1 is" in done.stderr) is refused


def test_a_cluster_of_hosts_that_are_not_there_is_refused(foreign):
    (foreign.parent / "group_vars/spark.yml").write_text("cluster: {hosts: [spark-1, spark-9]}\n")
    done = pyinfra(foreign)
    assert done.returncode == 1
    assert "spark-1: cluster.hosts: 'spark-9' is no host of its group" in done.stderr


def test_a_host_that_the_cluster_does_not_name_serves_by_itself(foreign):
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["a", "b", "c"]))
    (foreign.parent / "group_vars/spark.yml").write_text("cluster: {hosts: [a, b]}\n")
    found = read_inventory(foreign)
    told = {name: more[KEY].found.settings.cluster.hosts for name, more in found.items()}
    assert told == {"a": ("a", "b"), "b": ("a", "b"), "c": ()}


def test_one_host_is_no_cluster(foreign):
    (foreign.parent / "group_vars/spark.yml").write_text("cluster: {hosts: [spark-1]}\n")
    done = pyinfra(foreign)
    assert "cluster.hosts: spark-1 alone is no cluster" in done.stderr


REPLICAS = """
replicas: {hosts: [a, b], addresses: {b: 10.0.0.2}}
serve: {expose: lan, api_key: {env: KEY}}
"""


def test_replicas_know_how_each_is_reached_and_others_serve_by_themselves(foreign):
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["a", "b", "c"]))
    (foreign.parent / "group_vars/spark.yml").write_text(REPLICAS)
    found = {name: more[KEY].found for name, more in read_inventory(foreign).items()}
    plans = {name: gateway_plan(one.settings, name) for name, one in found.items()}
    told = {name: plan.settings.replicas for name, plan in plans.items()}
    assert told == {
        "a": Replicas(8008, ("10.0.0.2:8000",)),
        "b": Replicas(8008, ("a:8000",)),
        "c": None,
    }
    assert base_urls(plans["a"])[-1] == ("http://a:8008/v1", "the network, all replicas")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("replicas: {hosts: [a, d]}", "a: replicas.hosts: 'd' is no host of its group"),
        ("replicas: {hosts: [a]}", "replicas.hosts: a alone has no replica"),
        ("serve: {expose: loopback, api_key: {env: K}}", "do not reach each other with"),
        ("serve: {expose: lan, api_key: {env: K}, tls: private-ca}", "without TLS"),
        ("serve: {expose: lan}", "serve.api_key: each host would make a key of its own"),
        ("rollout: {at_once: 2}", "rollout.at_once: all replicas would be away"),
        ("cluster: {hosts: [a, b]}", "replicas each by itself"),
        ("replicas: {hosts: [a, b], port: 8000}", "replicas.port: 8000 is serve.port, too"),
    ],
)
def test_what_cannot_be_replicas_is_refused(foreign, more, said):
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["a", "b", "c"]))
    chosen = {**yaml.safe_load(REPLICAS), **yaml.safe_load(more)}
    (foreign.parent / "group_vars/spark.yml").write_text(yaml.safe_dump(chosen))
    with pytest.raises(SettingsError, match=re.escape(said)):
        read_inventory(foreign)


def test_replicas_that_clients_could_tell_apart_are_refused(foreign):
    foreign.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=["a", "b"]))
    (foreign.parent / "group_vars/spark.yml").write_text(REPLICAS)
    (foreign.parent / "host_vars").mkdir()
    (foreign.parent / "host_vars/b.yml").write_text("serve: {names: [other]}\n")
    with pytest.raises(SettingsError, match=r"b: serve\.names: differs from that of a, the first"):
        read_inventory(foreign)


def test_a_model_beside_the_inventory_is_chosen_like_ours(foreign):
    folder = foreign.parent / "catalog/models"
    folder.mkdir(parents=True)
    mine = "kind: plain\nsummary: Mine\nchoose_when: it is mine\nrepository: me/mine\n"
    (folder / "mine.yml").write_text(mine)
    (foreign.parent / "group_vars/spark.yml").write_text("model: mine\nprofile: plain\n")
    done = pyinfra(foreign)
    assert done.returncode == 0, done.stderr
    assert data_of(done.stdout + done.stderr, "spark-1")["model"] == "mine"
    (folder / "mine.yml").write_text(mine.replace("me/mine", "nowhere"))
    done = pyinfra(foreign)
    assert done.returncode == 1
    assert "catalog/models/mine.yml: repository" in done.stderr
    assert "Traceback" not in done.stderr
