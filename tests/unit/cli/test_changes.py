import io
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from spark_contract.status import NamedRelease, Rollback

from spark_deploy.cli import changes, main
from spark_deploy.cli.console import Options
from spark_deploy.cli.hosts import Answer
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import Problem, SparkError
from tests.unit.statuses import host_status

INVENTORY = str(CHECKOUT / "inventory/spark.py")
OFFLINE = [Problem("spark-1", "cannot be reached", "check that the host is on")]
COMMANDS = ["fabric", "uninstall", "rollback", "prune", "rotate-key"]


def run(monkeypatch, capsys, *words, code=0):
    ran = []

    def run_deploy(deploy, hosts, data, **options):
        ran.append((deploy, [name for name, _ in hosts], list(data), options))
        return code

    watcher = SimpleNamespace(log=None)
    access = SimpleNamespace(problems=lambda: OFFLINE)
    monkeypatch.setattr(changes, "run_deploy", run_deploy)
    monkeypatch.setattr(changes, "watch", lambda run, *_: run(watcher))
    monkeypatch.setattr(changes, "check_access", lambda _hosts: access)
    place = 2 if words[0] == "add" else 1
    result = main([*words[:place], INVENTORY, *words[place:]])
    return result, ran, capsys.readouterr().err


@pytest.fixture
def questions(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(changes.click, "confirm", lambda text, **_: texts.append(text))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    return texts


@pytest.mark.parametrize(
    ("words", "deploy", "more"),
    [
        (("uninstall", "--models", "--dry", "--data", "profile=base"), "deploys/uninstall.py",
         ["--data", "profile=base", "--data", "uninstall.models=true", "--dry"]),
        (("rollback", "--to", "main-0123456789ab", "-y"), "deploys/rollback.py",
         ["--data", "releases.rollback_to=main-0123456789ab", "-y"]),
        (("prune", "--dry", "--json"), "deploys/prune.py", ["--dry", "--json"]),
        (("uninstall", "-y", "--json"), "deploys/uninstall.py", ["-y", "--json"]),
        (("fabric", "--restore", "-y"), "deploys/fabric.py",
         ["--data", "fabric.restore=true", "-y"]),
        (("fabric", "--measure", "-y"), "deploys/fabric.py",
         ["--data", "fabric.measure=true", "-y"]),
        (("rotate-key", "-y", "--verbose"), "deploys/rotate_key.py", ["-y"]),
        (("add", "qwen3.5-35b", "--requantize", "--on", "spark-1", "-y"), "deploys/requantize.py",
         ["--data", "model=qwen3.5-35b", "--data", "checkpoint.source=requantized", "-y"]),
    ],
)  # fmt: skip
def test_runs_the_printed_command_on_each_host(monkeypatch, capsys, words, deploy, more):
    code, [(path, hosts, data, options)], err = run(monkeypatch, capsys, *words)
    typed = shlex.split(err.splitlines()[0])
    assert code == 0
    assert typed[0].endswith("pyinfra")
    assert typed[1:] == [INVENTORY, str(CHECKOUT / deploy), "--limit", "spark-1", *more]
    assert (path, hosts) == (CHECKOUT / deploy, ["spark-1"])
    values = [after for before, after in pairwise(more) if before == "--data"]
    assert data == [value for value in values if not value.startswith("model=")]
    assert options.get("dry", False) == ("--dry" in more)
    assert options.get("as_json", False) == ("--json" in more)


def test_uninstall_with_access_option_revokes_login_after_successful_uninstall(monkeypatch, capsys):
    code, ran, _ = run(monkeypatch, capsys, "uninstall", "--access", "-y")
    assert code == 0
    deploys = ["deploys/uninstall.py", "deploys/unbootstrap.py"]
    assert [path for path, *_ in ran] == [CHECKOUT / deploy for deploy in deploys]
    assert len(run(monkeypatch, capsys, "uninstall", "--access", "-y", code=3)[1]) == 1


@pytest.mark.parametrize(("code", "is_probed"), [(3, True), (0, False), (130, False)])
@pytest.mark.parametrize("command", COMMANDS)
def test_hosts_are_probed_only_after_a_failed_deploy(monkeypatch, capsys, command, code, is_probed):
    result, _, err = run(monkeypatch, capsys, command, "-y", code=code)
    assert result == code
    assert ("spark-1: cannot be reached\n  fix: check that the host is on\n" in err) == is_probed


@pytest.mark.parametrize("words", [*([command] for command in COMMANDS), ["uninstall", "--json"]])
def test_no_deploy_runs_without_confirmation(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, ran, err = run(monkeypatch, capsys, *words)
    assert (code, ran) == (1, [])
    assert "confirmation: requires a terminal" in err


def test_declined_confirmation_changes_nothing(monkeypatch, capsys):
    def refuse(*_words, **_options):
        raise click.Abort

    monkeypatch.setattr(changes.click, "confirm", refuse)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert run(monkeypatch, capsys, "prune")[:2] == (130, [])


STOPPED = Problem("main", "was stopped on purpose", "start it first")
CURRENT, OLD = (NamedRelease(f"main-{sign * 12}", "m", f"v-{sign}") for sign in "ab")
DONE = Rollback(CURRENT, CURRENT, done="it has replaced b")


@pytest.mark.parametrize(
    ("states", "text", "code"),
    [
        ([Rollback(CURRENT, OLD)], f"spark-1: will roll back from {CURRENT} to {OLD}\n", None),
        ([Rollback(CURRENT, OLD), STOPPED], "spark-2: main: was stopped on purpose", None),
        ([STOPPED, DONE], "spark-1: main: was stopped on purpose", 1),
        ([DONE], "spark-1: it has replaced b\n", 0),
        ([None], "spark-1: is offline\n", 1),
    ],
)
def test_rollback_prints_both_releases_before_the_confirmation(
    monkeypatch, capsys, questions, states, text, code
):
    hosts = [SimpleNamespace(name=f"spark-{number + 1}") for number in range(len(states))]
    answers = [Answer(*pair, "is offline") for pair in zip(hosts, states, strict=True)]
    monkeypatch.setattr(changes, "query", lambda _hosts, _read: answers)
    assert changes.preview_rollback(hosts, None) == code
    assert text in capsys.readouterr().err
    monkeypatch.setattr(changes, "preview_rollback", lambda _hosts, _to: code)
    result, ran, _ = run(monkeypatch, capsys, "rollback")
    expected = (0, 1, 1) if code is None else (code, 0, 0)
    assert (result, len(ran), len(questions)) == expected


def test_printed_command_has_the_full_path_of_pyinfra_if_it_is_not_on_path(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    _, _, err = run(monkeypatch, capsys, "prune", "--dry")
    assert Path(shlex.split(err)[0]).is_file()


def host_of(name, *members):
    settings = SimpleNamespace(
        serve=SimpleNamespace(start_timeout_s=1, stop_timeout_s=1), services={"embed": None},
        cluster=SimpleNamespace(hosts=members),
    )  # fmt: skip
    return SimpleNamespace(name=name, data={"_sudo": True}, settings=settings)


def run_tool(command, options, **values):
    required = {"service": None, **({"period": None} if command == "stop" else {})}
    return int(getattr(changes, command).callback.__wrapped__(options, **{**required, **values}))


@pytest.mark.parametrize("command", ["stop", "start"])
def test_stopping_or_starting_one_member_of_a_cluster_is_rejected(command, monkeypatch):
    member = host_of("spark-2", "spark-1", "spark-2")
    monkeypatch.setattr(changes, "select_hosts", lambda _, must_serve: [member])
    with pytest.raises(
        SparkError, match="is in a cluster with spark-1, which must be selected too"
    ) as error:
        run_tool(command, Options(inventory="own.py"))
    fix = f"spark-deploy {command} spark-1 spark-2 --inventory own.py"
    assert fix in str(error.value)


@pytest.mark.parametrize(
    ("command", "period", "service", "parts"),
    [
        ("stop", None, None, ["stop-service main --by ", "stop-service embed --by "]),
        ("stop", "90m", None, [" --for 5400 2>"]),
        ("stop", "2d", "embed", ["stop-service embed", " --for 172800 2>"]),
        ("start", None, None, ["start-service main 2>", "start-service embed 2>"]),
    ],
)
def test_stop_and_start_run_one_command_per_host(
    command, period, service, parts, monkeypatch, capsys
):
    commands: list[str] = []

    def run_shell_command(words, **_):
        commands.append(str(words))
        return True, SimpleNamespace(stdout="stopped\n")

    host = SimpleNamespace(run_shell_command=run_shell_command)
    monkeypatch.setattr(changes, "select_hosts", lambda _, must_serve: [host_of("spark-1")])
    monkeypatch.setattr(
        changes, "query", lambda hosts, run, verb: [Answer(hosts[0], run(host, hosts[0]))]
    )
    values = {"service": service, **({"period": period} if period else {})}
    assert run_tool(command, Options(), **values) == 0
    assert capsys.readouterr().out == "spark-1: stopped\n"
    [text] = commands
    assert all(part in text for part in parts)
    assert text.count(f"{command}-service") == (1 if service else 2)


@pytest.mark.parametrize("command", ["stop", "start"])
def test_stop_and_start_ask_for_confirmation_only_for_several_hosts(
    command, monkeypatch, questions
):
    hosts = [host_of("spark-1"), host_of("spark-2")]
    monkeypatch.setattr(changes, "query", lambda hosts, *_, **__: [Answer(hosts[0], (True, ""))])
    for chosen, count in ((hosts[:1], 0), (hosts, 1)):
        monkeypatch.setattr(changes, "select_hosts", lambda _, must_serve, hosts=chosen: hosts)
        run_tool(command, Options())
        assert len(questions) == count
    assert all(name in questions[0] for name in ("spark-1", "spark-2"))
    run_tool(command, Options(yes=True))
    assert len(questions) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SparkError, match="confirmation"):
        run_tool(command, Options())


RELEASE = {"name": "main-aaaaaaaaaaaa", "model": "qwen", "profile": "v2"}
STATES = {"on": {"active": RELEASE["name"]}, "off": {"known_good": RELEASE["name"]}}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["stop"], ["will stop: qwen with v2", "serves nothing"]),
        (["start"], ["already serves qwen with v2", "will serve qwen with v2"]),
        (["rotate-key"], ["new API key", "new API key"]),
        (["rollback"], [f"will roll back from {CURRENT} to {OLD}", "was stopped on purpose"]),
    ],
)
def test_dry_run_prints_the_changes_for_each_host(words, expected, monkeypatch, capsys):
    hosts = [host_of("on"), host_of("off"), host_of("away")]
    values = [
        host_status({"releases": [RELEASE], "services": {"main": STATES[host.name]}})
        for host in hosts[:2]
    ]
    if words == ["rollback"]:
        values = [Rollback(CURRENT, OLD), STOPPED]
    answers = [*map(Answer, hosts, values), Answer(hosts[2], None, "is off")]
    monkeypatch.setattr(changes, "select_hosts", lambda *_, **__: hosts)
    monkeypatch.setattr(changes, "query", lambda *_, **__: answers)
    monkeypatch.setattr(changes, "deploy", lambda *_, **__: 1 / 0)
    assert main([*words, INVENTORY, "--dry"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["on", "off", "away"]
    assert all(map(str.__contains__, lines, [*expected, "is off"]))
    assert err.startswith("no changes made")


def test_error_for_an_unknown_service_suggests_a_known_service(monkeypatch):
    monkeypatch.setattr(changes, "select_hosts", lambda _, must_serve: [host_of("spark-1")])
    with pytest.raises(SparkError, match="did you mean embed"):
        run_tool("stop", Options(), service="embd")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stop", "start"])
def test_gevent_is_patched_before_ssl_is_imported(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "spark_deploy", command, str(tmp_path / "none.py")],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    # gevent warns if it patches too late.
    assert re.fullmatch(r"\S+none.py: is not an inventory file\n  fix: .*\n", done.stderr)


@pytest.mark.parametrize("period", ["", "1", "h", "0h", "-1h", "1w", "1.5h", "1h30m", "²h"])
def test_stop_rejects_an_invalid_period(period):
    with pytest.raises(SparkError, match="invalid period"):
        run_tool("stop", Options(), period=period)
