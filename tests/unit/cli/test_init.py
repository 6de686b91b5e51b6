"""``spark-deploy init``: the folder, existing files, and mistakes."""

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
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError
from tests import forked


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No terminal, no hub, and not a Spark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(init, "PRODUCT_NAME", tmp_path / "product_name")

    def no_hub(*_words, **_more):
        raise LockError.one("hub", "cannot be asked", "look at the network")

    monkeypatch.setattr(init.update, "lock_names", no_hub)


def made(*words: str) -> Path:
    assert main(["init", "own", *words]) == 0
    return Path("own")


def hosts(folder: Path) -> dict:
    return yaml.safe_load((folder / "hosts.yml").read_text())["hosts"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--host", "spark-1"), {"spark-1": None}),
        (("--host", "a=10.0.0.7", "--host", "b", "--user", "nvidia"),
         {"a": {"address": "10.0.0.7", "user": "nvidia"}, "b": {"user": "nvidia"}}),
        (("--host", "ann@10.0.0.7"), {"spark-1": {"address": "10.0.0.7", "user": "ann"}}),
        (("--local",), {"@local": None}),
    ],
)  # fmt: skip
def test_hosts_are_written_from_options(words, expected, capsys):
    folder = made(*words)
    assert hosts(folder) == expected
    assert "next: cd own && spark-deploy up" in capsys.readouterr().out


def test_links_to_pages_name_the_project():
    assert re.search(
        r"\S+\.md of dgx-spark-deploy\n", (made("--host", "a") / "group_vars/all.yml").read_text()
    )


def test_json_lists_written_files_and_the_next_command(capsys):
    folder = made("--host", "a", "--profile", "agent")
    (folder / "hosts.yml").unlink()
    capsys.readouterr()
    assert main(["init", "own", "--host", "b", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["written"] == ["own/hosts.yml"]
    assert "own/group_vars/all.yml" in result["kept"]
    assert result["hosts"] == [{"host": "b", "model": "qwen3.5-122b", "profile": "agent"}]
    assert result["not_locked"] == "cannot be asked"
    assert result["next"] == ["cd own && spark-deploy up"]


def test_several_hosts_can_be_separated_by_commas(monkeypatch):
    text = iter(["10.0.0.7, spark-2,spark-3", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(init.click, "prompt", lambda *_words, **_more: next(text))
    expected = {"spark-1": {"address": "10.0.0.7"}, "spark-2": None, "spark-3": None}
    assert hosts(made()) == expected


def test_on_a_spark_it_serves_on_this_machine(tmp_path):
    (tmp_path / "product_name").write_text("NVIDIA_DGX_Spark\n")
    assert hosts(made()) == {"@local": None}


def test_without_terminal_and_hosts_the_fix_is_an_option(capsys):
    assert main(["init", "own"]) == 1
    assert "--host spark-1=192.168.1.21" in capsys.readouterr().err
    assert not Path("own/hosts.yml").exists()


def test_existing_files_are_kept(capsys):
    folder = made("--host", "a", "--profile", "agent")
    (folder / "group_vars/all.yml").write_text("profile: base\n")
    (folder / "hosts.yml").write_text("hosts: {b: }\n")
    made("--host", "c")
    assert hosts(folder) == {"b": None}
    assert (folder / "group_vars/all.yml").read_text() == "profile: base\n"
    assert "kept     own/hosts.yml" in capsys.readouterr().err


def test_schemas_are_renewed(capsys):
    folder = made("--host", "a")
    old = folder / "schema/settings.schema.json"
    now = old.read_text()
    old.write_text("{}")
    made("--host", "a")
    assert old.read_text() == now
    assert "written  own/schema/settings.schema.json" in capsys.readouterr().err


def test_a_published_model_gets_the_plain_profile():
    text = (made("--host", "a", "--model", "qwen3-4b") / "group_vars/all.yml").read_text()
    assert yaml.safe_load(text)["profile"] == "plain"
    assert "v2" not in text, "it is for trees of our own"


def test_the_written_settings_can_be_planned(capsys, monkeypatch):
    folder = made("--host", "a=10.0.0.7", "--profile", "agent")
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["plan", "--estimate", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    assert (plan["host"], plan["profile"]) == ("a", "agent")


def test_commented_settings_are_valid(monkeypatch):
    folder = made("--host", "a")
    path = folder / "group_vars/all.yml"
    lines = path.read_text().splitlines()
    assert len(lines) <= 15
    # The file without the comment signs.
    opened = [line.removeprefix("# ") for line in lines if line.startswith(("# keep", "#   - ",
              "# serve", "# paths"))]  # fmt: skip
    path.write_text("\n".join([*lines, *opened]))
    monkeypatch.chdir(folder)
    assert main(["plan", "--estimate"]) == 0


def test_settings_list_the_profiles_of_the_readme():
    page = (CHECKOUT / "README.md").read_text("utf-8").partition("## Which profile")[2]
    choices = set(re.findall(r"^\| `([\w-]+)` \|", page, re.M))
    text = (made("--host", "a", "--profile", "agent") / "group_vars/all.yml").read_text()
    named = set(re.search(r"^profile: agent  # or (.*): docs", text, re.M)[1].split(", "))
    assert "v2-tq" in choices
    assert "plain" not in named  # for published models
    assert choices <= {"agent"} | named  # a profile of one's own is named, too, but on no page


def test_pyinfra_reads_the_same_hosts_and_refuses_a_missing_inventory():
    folder = made("--host", "a=10.0.0.7", "--user", "nvidia")

    def ask(*words):
        return forked.run(("pyinfra", *words), cwd=folder.absolute(), env=os.environ)

    shown = ask("inventory/spark.py", "debug-inventory")
    assert shown.returncode == 0, shown.stderr
    assert '"ssh_hostname": "10.0.0.7"' in shown.stdout + shown.stderr
    wrong = ask("inventory/sparks.py", "debug-inventory")
    assert wrong.returncode != 0
    assert "did you mean inventory/spark.py?" in wrong.stdout + wrong.stderr


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("hosts: {a: {adress: 10.0.0.7}}\n", "did you mean hosts.a.address?"),
        ("hosts: {}\n", "hosts.yml"),
        ("host: {a: }\n", "did you mean hosts?"),
        ("hosts:\n  a: {port: 70000}\n", "hosts.yml: hosts.a.port"),
        ("hosts:\n\ta: {}\n", "hosts.yml line 2: holds a tab where YAML takes only blanks"),
        (
            "hosts: {a: {address: 10.0.0.7}, b: {address: 10.0.0.7, port: 22}}\n",
            "b: has the same address as a: 10.0.0.7",
        ),
    ],
)
def test_a_mistake_in_the_hosts_file_gets_a_message(text, output, monkeypatch, capsys):
    folder = made("--host", "a")
    (folder / "hosts.yml").write_text(text)
    monkeypatch.chdir(folder)
    assert main(["plan", "--estimate"]) == 1
    assert output in capsys.readouterr().err


def test_a_folder_without_settings_is_valid(monkeypatch):
    folder = made("--host", "a")
    (folder / "group_vars/all.yml").unlink()
    (folder / "group_vars").rmdir()  # as after a clone: no version control keeps an empty folder
    monkeypatch.chdir(folder)
    assert main(["plan", "--estimate"]) == 0


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hangs up", "refuses"])
def test_up_reports_an_unreachable_host_without_a_password_prompt(hangs_up):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        made("--host", "spark-1=127.0.0.1")
        captured = {"spark-1": {"address": "127.0.0.1", "port": port}}
        Path("own/hosts.yml").write_text(yaml.safe_dump({"hosts": captured}))
        over = threading.Event()

        def hang_up() -> None:
            while not over.is_set():
                server.accept()[0].close()

        if hangs_up:
            threading.Thread(target=hang_up, daemon=True).start()
        else:
            server.close()
        done = forked.run(("spark_deploy", "up"), cwd=Path("own").absolute(), env=os.environ)
        over.set()
    assert done.returncode == 1
    first, fix = done.stderr.splitlines()
    assert first.startswith(f"spark-1: unreachable: [127.0.0.1]:{port}: ")
    assert "host is on" in fix


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--host", "a", "--model", "nope"), "'nope' is not a model"),
        (("--host", "a", "--model", "qwen3.5-397b"), "does not fit on one host"),
        (("--host", "a", "--host", "a=10.0.0.7"), "hosts.yml"),
        (("--host", "a: b"), "hosts.yml"),
        (("--host", ""), "hosts.yml"),
    ],
)
def test_a_mistake_leaves_no_files(words, text, capsys):
    assert main(["init", "own", *words]) == 1
    captured = capsys.readouterr().err
    assert text in captured
    assert "Traceback" not in captured
    assert "written" not in captured
    assert not list(Path().glob("own/*"))
    assert hosts(made("--host", "a")) == {"a": None}
