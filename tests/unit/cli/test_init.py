import contextlib
import io
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest
import yaml

from spark_deploy.cli import init, main
from spark_deploy.cli.console import Options
from spark_deploy.cli.hosts import inventory_path
from spark_deploy.config.errors import LockError, SparkError
from tests import forked


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(init, "PRODUCT_NAME", tmp_path / "product_name")

    def no_hub(*_words, **_more):
        raise LockError.single("hub", "cannot be queried", "check the network")

    monkeypatch.setattr(init.update, "lock_names", no_hub)


def init_folder(*words):
    assert main(["init", "own", *words]) == 0
    return Path("own")


def hosts(folder):
    return yaml.safe_load((folder / "hosts.yml").read_text())["hosts"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--host", "spark-1"), {"spark-1": None}),
        (("--host", "a=10.0.0.7", "--host", "b", "--user", "nvidia"),
         {"a": {"address": "10.0.0.7", "user": "nvidia"}, "b": {"user": "nvidia"}}),
        (("--host", "ann@10.0.0.7"), {"spark-1": {"address": "10.0.0.7", "user": "ann"}}),
        (("--host", "ann@box=10.0.0.7"), {"box": {"address": "10.0.0.7", "user": "ann"}}),
        (("--host", "box=ann@10.0.0.7"), {"box": {"address": "10.0.0.7", "user": "ann"}}),
        (("--local",), {"@local": None}),
    ],
)  # fmt: skip
def test_init_writes_the_hosts_given_as_options(words, expected, capsys):
    assert hosts(init_folder(*words)) == expected
    assert "next: cd own && spark-deploy up" in capsys.readouterr().out


def test_hosts_can_be_entered_separated_by_commas(monkeypatch):
    text = iter(["10.0.0.7, spark-2,spark-3", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(init.click, "prompt", lambda *_words, **_more: next(text))
    expected = {"spark-1": {"address": "10.0.0.7"}, "spark-2": None, "spark-3": None}
    assert hosts(init_folder()) == expected


def test_init_on_a_spark_targets_the_local_host_by_default(tmp_path):
    (tmp_path / "product_name").write_text("NVIDIA_DGX_Spark\n")
    assert hosts(init_folder()) == {"@local": None}


def test_init_keeps_existing_files_and_updates_schemas(capsys):
    folder = init_folder("--host", "a", "--profile", "agent")
    settings, schema = folder / "group_vars/all.yml", folder / "schema/settings.schema.json"
    current = schema.read_text()
    settings.write_text("profile: base\n")
    schema.write_text("{}")
    (folder / "hosts.yml").unlink()
    capsys.readouterr()
    assert main(["init", "own", "--host", "b", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["written"] == ["own/hosts.yml", "own/schema/settings.schema.json"]
    assert "own/group_vars/all.yml" in result["kept"]
    assert result["hosts"] == [{"host": "b", "model": "qwen3.5-122b", "profile": "base"}]
    assert result["not_locked"] == "cannot be queried"
    assert result["next"] == ["cd own && spark-deploy up"]
    assert (settings.read_text(), schema.read_text()) == ("profile: base\n", current)
    assert "kept     own/group_vars/all.yml" in captured.err
    init_folder("--host", "b")
    assert hosts(folder) == {"b": None}


def test_init_rejects_different_values_for_an_existing_host(capsys):
    folder = init_folder("--host", "a=10.0.0.7")
    before = (folder / "hosts.yml").read_text()
    assert main(["init", "own", "--host", "a=10.0.0.8", "--user", "me"]) == 1
    errors = capsys.readouterr().err
    assert "a.address: is 10.0.0.7" in errors
    assert "a.user: " in errors
    assert "a: {address: 10.0.0.8, user: me}" in errors
    assert (folder / "hosts.yml").read_text() == before
    init_folder("--host", "a=10.0.0.7")


def test_init_selects_the_plain_profile_for_a_published_model():
    text = (init_folder("--host", "a", "--model", "qwen3-4b") / "group_vars/all.yml").read_text()
    assert yaml.safe_load(text)["profile"] == "plain"
    assert "v2" not in text


def test_commented_settings_are_valid_and_can_be_planned(monkeypatch, capsys):
    folder = init_folder("--host", "a=10.0.0.7", "--profile", "agent")
    path = folder / "group_vars/all.yml"
    lines = path.read_text().splitlines()
    assert len(lines) <= 15
    assert re.search(r"^profile: agent  # .*`spark-deploy models \S+`$", path.read_text(), re.M)
    commented = ("# keep", "#   - ", "# serve", "# paths")
    settings = [line.removeprefix("# ") for line in lines if line.startswith(commented)]
    path.write_text("\n".join([*lines, *settings]))
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["plan", "--estimate", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    assert (plan["host"], plan["profile"]) == ("a", "agent")


@pytest.mark.slow
def test_pyinfra_reads_the_hosts_that_init_wrote():
    folder = init_folder("--host", "a=10.0.0.7", "--user", "nvidia")
    words = ("pyinfra", "inventory/spark.py", "debug-inventory")
    result = forked.run(words, cwd=folder.absolute(), env=os.environ)
    assert result.returncode == 0, result.stderr
    assert '"ssh_hostname": "10.0.0.7"' in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("hosts: {a: {adress: 10.0.0.7}}\n", "did you mean hosts.a.address?"),
        ("hosts: {}\n", "hosts.yml"),
        ("host: {a: }\n", "did you mean hosts?"),
        ("hosts:\n  a: {port: 70000}\n", "hosts.yml: hosts.a.port"),
        ("hosts:\n  a: {address: 10.0.0.999}\n", "hosts.yml: hosts.a.address"),
        (
            "hosts:\n\ta: {}\n",
            "hosts.yml line 2: the line has a tab where YAML accepts only spaces",
        ),
        (
            "hosts: {a: {address: 10.0.0.7}, b: {address: 10.0.0.7, port: 22}}\n",
            "b: has the same address as a: 10.0.0.7",
        ),
    ],
)
def test_mistake_in_the_hosts_file_is_reported(text, output, monkeypatch, capsys):
    folder = init_folder("--host", "a")
    (folder / "hosts.yml").write_text(text)
    monkeypatch.chdir(folder)
    assert main(["plan", "--estimate"]) == 1
    assert output in capsys.readouterr().err


def test_draft_vocabulary_size_is_estimated_offline(monkeypatch, capsys):
    folder = init_folder("--host", "a=10.0.0.7", "--model", "qwen3.5-122b", "--profile", "v3")
    (folder / "answers.txt").write_text("Paris")
    monkeypatch.chdir(folder)
    words = ("engine.draft_vocabulary_tokens=32768", "engine.draft_vocabulary_text=answers.txt")
    assert main(["set", *words]) == 0
    capsys.readouterr()
    assert main(["plan", "--estimate", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    assert "/draft-vocabulary/token_ids.json" in " ".join(plan["release"]["engine"]["argv"])


def test_inventory_folder_without_settings_is_valid(monkeypatch):
    folder = init_folder("--host", "a")
    (folder / "group_vars/all.yml").unlink()
    (folder / "group_vars").rmdir()  # as after a clone: no version control keeps an empty folder
    monkeypatch.chdir(folder)
    assert main(["plan", "--estimate"]) == 0


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hangs up", "refuses"])
def test_up_reports_an_unreachable_host_without_asking_for_a_password(hangs_up):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        init_folder("--host", "spark-1=127.0.0.1")
        captured = {"spark-1": {"address": "127.0.0.1", "port": port}}
        Path("own/hosts.yml").write_text(yaml.safe_dump({"hosts": captured}))

        def hang_up():
            with contextlib.suppress(OSError):  # the test closes the server
                while True:
                    server.accept()[0].close()

        if hangs_up:
            threading.Thread(target=hang_up, daemon=True).start()
        else:
            server.close()
        done = forked.run(("spark_deploy", "up"), cwd=Path("own").absolute(), env=os.environ)
    assert done.returncode == 1
    first, fix = done.stderr.splitlines()
    assert first.startswith(f"spark-1: unreachable: [127.0.0.1]:{port}: ")
    assert "host is on" in fix


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--host", "a", "--model", "nope"), "unknown model 'nope'"),
        pytest.param(
            ("--host", "a", "--model", "qwen3.5-397b"),
            "does not fit on one host",
            marks=pytest.mark.slow,
        ),
        (("--host", "a", "--host", "a=10.0.0.7"), "hosts.yml"),
        (("--host", "a: b"), "hosts.yml"),
        (("--host", ""), "hosts.yml"),
        ((), "--host spark-1=192.168.1.21"),
    ],
)
def test_failed_init_leaves_no_files(words, text, capsys):
    assert main(["init", "own", *words]) == 1
    captured = capsys.readouterr().err
    assert text in captured
    assert "Traceback" not in captured
    assert "written" not in captured
    assert not Path("own").exists()
    assert hosts(init_folder("--host", "a")) == {"a": None}


def test_commands_find_the_inventory_from_a_subfolder_or_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", ".", "--host", "spark-1=192.0.2.1", "--user", "me"]) == 0
    below = tmp_path / "notes/deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert inventory_path(Options()) == tmp_path / "inventory/spark.py"
    assert inventory_path(Options(inventory=str(tmp_path))) == tmp_path / "inventory/spark.py"
    # An inventory is a program: others must not be able to place one above.
    (tmp_path / "inventory").chmod(0o777)
    with pytest.raises(SparkError):
        inventory_path(Options())
