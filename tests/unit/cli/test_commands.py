"""Help, options and completion of all commands."""

import json
import os
import re
import socket
import subprocess
import sys

import click
import pytest

from spark_deploy.cli import COMMANDS, GROUP, init, live, main
from spark_deploy.cli.options import host_names, names_of
from spark_deploy.config.checkout import CHECKOUT


def run(*words, **environment):
    command = [sys.executable, "-m", "spark_deploy", *words]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert COMMANDS[name][:40] in text
    assert not re.search(r"``|`|\x1b|\*\*", text)
    if name not in ("init", "settings"):
        for option in ("--inventory", "--limit", "--data"):
            assert re.search(rf"{option}\b.*\S", text)


def test_every_command_has_a_json_option():
    with click.Context(GROUP) as context:
        names = GROUP.list_commands(context)
        made = [GROUP.get_command(context, name) for name in names]
    without = {
        item.name for item in made if all("--json" not in given.opts for given in item.params)
    }
    assert without == set()


OWN = ("--inventory", "own/inventory/spark.py")


@pytest.mark.parametrize(
    "words",
    [
        ("init", "own", "--host", "b"),
        ("settings",),
        ("connect", *OWN),
        ("update", "--check", *OWN),
        ("plan", "--estimate", *OWN),
        ("use", "agent", "--dry", *OWN),
    ],
    ids=lambda words: words[0],
)
def test_json_output_is_one_document(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "_lock", lambda folder: None)  # needs a hub
    main(["init", "own", "--host", "a"])
    capsys.readouterr()
    main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)


def test_help_lists_every_command_without_importing_pyinfra():
    code = (
        "import sys; from spark_deploy.cli import main; main(['--help'])\n"
        "sys.exit(any(m.split('.')[0] in ('pyinfra', 'gevent', 'pydantic') for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0
    listed = re.findall(r"^  (\S+)  +\S", done.stdout, re.M)
    assert set(COMMANDS) <= set(listed)


def test_version_is_printed():
    assert re.fullmatch(r"spark-deploy (\d+\.\d+\.\d+\S*|unknown.*)\n", run("--version").stdout)


@pytest.mark.parametrize("words", [("nope",), ("plan", "--nope"), ("top", "a.py", "b.py")])
def test_wrong_usage_exits_with_2_and_mentions_help(words, capsys):
    assert main(words) == 2
    text = capsys.readouterr()
    assert (text.out, "--help" in text.err) == ("", True)


def test_hosts_are_arguments_or_limit_options(monkeypatch):
    seen = []
    monkeypatch.setattr(
        live, "select_hosts", lambda options, must_serve: seen.append(options) or []
    )
    assert main(["top", "spark-1", "x/hosts.py", "--limit", "spark-2", "--json", "--once"]) == 0
    [options] = seen
    assert (options.inventory, options.limit) == ("x/hosts.py", ["spark-2", "spark-1"])
    assert (options.json, options.exclude, options.data) == (True, [], [])


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("--depths", "0", "--depths", "4096", "--json"), (0, 4096)),
        (("--depths=7",), (7,)),
        ((), ()),
    ],
)
def test_a_repeated_option_keeps_every_value(words, given, monkeypatch):
    from spark_deploy.cli import bench

    depths = []
    monkeypatch.setattr(bench, "select_hosts", lambda *_, **__: ["spark-1"])
    monkeypatch.setattr(bench, "_write_report", lambda *_: "")
    monkeypatch.setattr(
        bench, "_measure_host", lambda _, how, out: (depths.append(how.depths), "name")
    )
    assert main(["bench", "spark-1", *words]) == 0
    assert depths == [given]


@pytest.mark.parametrize(
    ("line", "expected"),
    [("spark-deploy sta", {"status", "start"}), ("spark-deploy plan --profile v2-", {"v2-tq"})],
)
def test_bash_completes_commands_and_names_of_the_catalog(line, expected):
    words = line.split()
    done = run(
        COMP_WORDS=line, COMP_CWORD=str(len(words) - 1), _SPARK_DEPLOY_COMPLETE="bash_complete"
    )
    assert expected <= {result.split(",")[1] for result in done.stdout.splitlines()}


def test_an_unknown_command_gets_a_suggestion(capsys):
    assert main(["statsu"]) == 2
    assert "Did you mean status?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("settings > /dev/full", 1, "output: No space left on device"),
        ("--help > /dev/full", 1, "output: No space left on device"),
        ("settings --json | :", 0, ""),
        pytest.param("settings >&-", 0, "", marks=pytest.mark.slow),
        ("rotate-key inventory/spark.py <&-", 1, "confirmation: needs a terminal"),
    ],
)
def test_a_closed_or_full_output_is_no_traceback(line, code, text):
    command = f"{sys.executable} -m spark_deploy {line}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert done.stderr.startswith(text) if not text else text in done.stderr
    assert "Exception ignored" not in done.stderr


def test_arguments_are_completed():
    for words, expected in (
        ("use v", "plain,v2-tq"), ("use qwen3.5-1", "plain,qwen3.5-122b"),
        ("share qwen3.5-122b/v2-", "plain,qwen3.5-122b/v2-tq"), ("add my.", "file,my."),
        ("init ow", "dir,ow"),
    ):  # fmt: skip
        done = run(
            COMP_WORDS=f"spark-deploy {words}", COMP_CWORD="2",
            _SPARK_DEPLOY_COMPLETE="bash_complete",
        )  # fmt: skip
        assert expected in done.stdout.splitlines()


def test_hosts_are_completed_from_a_readable_hosts_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert host_names(None, None, "") == []
    for text, expected in (
        ("hosts: {spark-1: , spark-2: {user: me}, other: }", ["spark-1", "spark-2"]),
        ("hosts:", []), ("- spark-1", []), ("hosts: {", []), ("hosts: 7", []), ("\xff", []),
    ):  # fmt: skip
        (tmp_path / "hosts.yml").write_text(text, "latin-1")
        assert host_names(None, None, "spark") == expected


PLANNING = {"up", "plan", "status", "doctor", "bench", "prune", "update"}


@pytest.mark.parametrize("name", COMMANDS)
def test_planning_commands_have_a_model_option(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert ("Plan with this model instead" in text) == (name in PLANNING)


def test_a_negative_number_of_lines_is_refused(capsys):
    assert main(["logs", "-n", "-5"]) == 2
    assert "-n" in capsys.readouterr().err


def test_an_unreachable_host_gets_a_message(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    (tmp_path / "sparks.py").write_text("spark = ['127.0.0.1']\n")
    done = run("status", str(tmp_path / "sparks.py"), "--data", f"ssh.port={port}")
    assert done.returncode == 1
    assert "127.0.0.1: unreachable: Could not connect (Unable to connect to" in done.stdout


@pytest.mark.slow
def test_output_works_on_an_ascii_terminal(tmp_path):
    folder = tmp_path / "own"
    spoken = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    words = ("init", str(folder), "--host", "a", "--profile", "v2")
    assert run(*words, **spoken).returncode == 0
    done = run("use", "agent", str(folder / "inventory/spark.py"), "--dry", **spoken)
    assert (done.returncode, done.stderr) == (0, "")
    assert "profile: v2 ? agent (a)" in done.stdout


def test_models_of_the_own_catalog_are_completed(tmp_path, monkeypatch):
    (tmp_path / "catalog/models").mkdir(parents=True)
    (tmp_path / "catalog/models/mine-4b.yml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert names_of("models")(None, None, "mine") == ["mine-4b"]
    assert "qwen3.5-122b" in names_of("models", "profiles")(None, None, "qwen")
