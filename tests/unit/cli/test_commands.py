import json
import os
import re
import socket
import subprocess
import sys

import pytest

from spark_deploy.cli import COMMANDS, bench, live, main
from spark_deploy.cli.console import complete_host_names, name_completer
from spark_deploy.config.checkout import CHECKOUT

PLANNING = {"up", "plan", "status", "doctor", "bench", "prune", "update"}


def run(*words, **environment):
    command = [sys.executable, "-m", "spark_deploy", *words]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True)


def complete(line):
    count = str(len(line.split(" ")) - 1)
    done = run(COMP_WORDS=line, COMP_CWORD=count, _SPARK_DEPLOY_COMPLETE="bash_complete")
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_shared_options(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert COMMANDS[name][:40] in text
    assert not re.search(r"``|`|\x1b|\*\*", text)
    options = ["--json"]
    options += (
        ["--inventory", "--limit", "--data"] if name not in ("init", "settings", "models") else []
    )
    if name in ("stop", "start", "rotate-key", "uninstall", "rollback", "up"):
        options += ["--dry", "--yes"]
    for option in options:
        assert re.search(rf"{option}\b.*\S", text)
    assert ("Plan with this model instead" in text) == (name in PLANNING)


def test_help_lists_every_command_without_slow_imports():
    code = (
        "import sys; from spark_deploy.cli import main; main(['--help'])\n"
        "sys.exit(any(m.split('.')[0] in ('pyinfra', 'gevent', 'pydantic') for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert set(COMMANDS) <= set(re.findall(r"^  (\S+)  +\S", done.stdout, re.M))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["-h"], 0, "Usage: spark-deploy"), (["up", "-h"], 0, "Usage: spark-deploy up"),
        (["help"], 0, "Usage: spark-deploy"), (["help", "up"], 0, "Usage: spark-deploy up"),
        (["version"], 0, r"spark-deploy (\d+\.\d+\.\d+|unknown)"),
        (["--version"], 0, r"spark-deploy (\d+\.\d+\.\d+|unknown)"),
        (["ls"], 2, r"Did you mean models\?"), (["ps"], 2, r"Did you mean status\?"),
        (["rm"], 2, r"Did you mean uninstall\?"), (["statsu"], 2, r"Did you mean status\?"),
        (["nope"], 2, "--help"), (["plan", "--nope"], 2, "--help"),
        (["top", "a.py", "b.py"], 2, "--help"), (["logs", "-n", "-5"], 2, "-n"),
        (["bench", "--runs", "0"], 2, "--runs"), (["bench", "--pp", "-4"], 2, "--pp"),
        (["bench", "--tg", "0"], 2, "--tg"), (["bench", "--clients", "0"], 2, "--clients"),
    ],
)  # fmt: skip
def test_help_exits_with_0_and_wrong_usage_with_2(words, code, text, capsys):
    assert main(words) == code
    shown, empty = capsys.readouterr()[:: -1 if code else 1]
    assert (empty, bool(re.search(text, shown))) == ("", True)


def test_hosts_can_be_given_as_arguments_or_with_the_limit_option(monkeypatch):
    selected = []
    monkeypatch.setattr(
        live, "select_hosts", lambda options, must_serve: selected.append(options) or []
    )
    assert main(["top", "spark-1", "x/hosts.py", "--limit", "spark-2", "--json", "--once"]) == 0
    [options] = selected
    assert (options.inventory, options.limit) == ("x/hosts.py", ["spark-2", "spark-1"])
    assert (options.json, options.exclude, options.data) == (True, [], [])


def test_repeated_option_keeps_every_value(monkeypatch):
    depths = []
    monkeypatch.setattr(bench, "select_hosts", lambda *_, **__: ["spark-1"])
    monkeypatch.setattr(bench, "_write_report", lambda *_: None)
    monkeypatch.setattr(
        bench, "_measure_host", lambda _, how, out: (depths.append(how.depths), "name")
    )
    for words in (["--depths", "0,1", "--depths", "4096", "--json"], []):
        assert main(["bench", "spark-1", *words]) == 0
    assert depths == [(0, 1, 4096), ()]


@pytest.mark.parametrize(
    ("words", "code"), [(["use", "nothing-like-it"], 1), (["bench", "--runs", "0"], 2)]
)
def test_json_output_lists_each_error_as_an_object(words, code, capsys):
    assert main([*words, "--json"]) == code
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [error.keys() for error in errors] == [{"where", "what", "fix"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sta", {"plain,status", "plain,start"}),
        ("plan --profile v2-", {"plain,v2-tq"}), ("use v", {"plain,v2-tq"}),
        ("use qwen3.5-1", {"plain,qwen3.5-122b"}), ("add my.", {"file,my."}),
        ("share qwen3.5-122b/v2-", {"plain,qwen3.5-122b/v2-tq"}), ("init ow", {"dir,ow"}),
    ],
)  # fmt: skip
def test_bash_completes_commands_options_and_arguments(line, expected):
    assert expected <= set(complete(f"spark-deploy {line}"))


def test_shell_completion_offers_hosts_and_custom_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complete_host_names(None, None, "") == []
    for text, expected in (
        ("hosts: {spark-1: , spark-2: {user: me}, other: }", ["spark-1", "spark-2"]),
        ("hosts:", []), ("- spark-1", []), ("hosts: {", []), ("hosts: 7", []), ("\xff", []),
    ):  # fmt: skip
        (tmp_path / "hosts.yml").write_text(text, "latin-1")
        assert complete_host_names(None, None, "spark") == expected
    (tmp_path / "catalog/models").mkdir(parents=True)
    (tmp_path / "catalog/models/mine-4b.yml").write_text("")
    assert name_completer("models")(None, None, "mine") == ["mine-4b"]
    assert "qwen3.5-122b" in name_completer("models", "profiles")(None, None, "qwen")


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("--help > /dev/full", 1, "output: No space left on device"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("settings > /dev/full", 1, "output: No space left on device"),
                ("settings --json | :", 0, ""),
                ("settings >&-", 0, ""),
                ("rotate-key inventory/spark.py <&-", 1, "confirmation: requires a terminal"),
            )
        ),
    ],
)
def test_closed_or_full_output_never_causes_a_traceback(line, code, text):
    command = f"{sys.executable} -m spark_deploy {line}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert text in done.stderr if text else not done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_command_runs_with_a_minimal_environment(tmp_path):
    code = "import sys; from spark_deploy.cli import main; sys.exit(main())"
    environment = {"PYTHONPATH": str(CHECKOUT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, "connect", "--inventory", str(CHECKOUT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1:8000/v1" in done.stdout


@pytest.mark.slow
def test_an_unreachable_host_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    (tmp_path / "sparks.py").write_text("spark = ['127.0.0.1']\n")
    done = run("status", str(tmp_path / "sparks.py"), "--data", f"ssh.port={port}")
    assert done.returncode == 1
    assert f"127.0.0.1  unreachable: [127.0.0.1]:{port}: Connection refused" in done.stdout


@pytest.mark.slow
def test_output_on_an_ascii_terminal_causes_no_error(tmp_path):
    folder = tmp_path / "own"
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    words = ("init", str(folder), "--host", "a", "--profile", "v2")
    assert run(*words, **ascii_only).returncode == 0
    done = run("use", "agent", str(folder / "inventory/spark.py"), "--dry", **ascii_only)
    assert (done.returncode, done.stderr) == (0, "no changes made\n")
    assert "profile: v2 ? agent (a)" in done.stdout
