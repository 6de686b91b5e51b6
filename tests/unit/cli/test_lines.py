"""A command that changes hosts is the pyinfra line that it prints, with its exit code."""

from __future__ import annotations

import io
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from rich.console import Console
from spark_contract.status import NamedRelease, Rollback

from spark_deploy.cli import main, run_pyinfra
from spark_deploy.cli.progress_screen import Watcher, watch
from spark_deploy.cli.query_hosts import Answer
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import Problem
from tools.docs.replay import feed

INVENTORY = str(CHECKOUT / "inventory/spark.py")
AWAY = [Problem("spark-1", "cannot be reached", "see that it is on")]


def run(monkeypatch, capsys, *words, code=0):
    """Stand in for the run of a deploy; returns code, deploys with their data, and messages."""
    ran = []

    def run_deploy(deploy, hosts, data, **how):
        ran.append((deploy, [name for name, _ in hosts], list(data), how))
        return code

    monkeypatch.setattr(run_pyinfra, "run_deploy", run_deploy)
    monkeypatch.setattr(run_pyinfra, "watch", lambda run, *_more: run(SimpleNamespace(tell=None)))
    monkeypatch.setattr(
        run_pyinfra, "check_access", lambda _hosts: SimpleNamespace(problems=lambda: AWAY)
    )
    at = 2 if words[0] == "add" else 1  # behind the model
    found = main([*words[:at], INVENTORY, *words[at:]])
    return found, ran, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "deploy", "more"),
    [
        (("uninstall", "--models", "--dry", "--data", "profile=base"), "deploys/uninstall.py",
         ["--data", "profile=base", "--data", "uninstall.models=true", "--dry"]),
        (("rollback", "--to", "main-0123456789ab", "-y"), "deploys/rollback.py",
         ["--data", "releases.rollback_to=main-0123456789ab", "-y"]),
        (("prune", "--dry", "--json"), "deploys/prune.py", ["--dry", "--json"]),
        (("fabric", "--restore", "-y"), "deploys/fabric.py",
         ["--data", "fabric.restore=true", "-y"]),
        (("fabric", "--measure", "-y"), "deploys/fabric.py",
         ["--data", "fabric.measure=true", "-y"]),
        (("rotate-key", "-y", "--verbose"), "deploys/rotate_key.py", ["-y"]),
    ],
)  # fmt: skip
def test_it_runs_what_it_prints_for_every_host_by_name(monkeypatch, capsys, words, deploy, more):
    code, [(path, hosts, data, how)], said = run(monkeypatch, capsys, *words)
    assert code == 0
    typed = shlex.split(said)
    assert typed[0].endswith("pyinfra")
    assert typed[1:] == [INVENTORY, str(CHECKOUT / deploy), "--limit", "spark-1", *more]
    assert (path, hosts) == (CHECKOUT / deploy, ["spark-1"])
    assert data == [after for before, after in pairwise(more) if before == "--data"]
    assert (how.get("dry", False), how.get("as_json", False)) == ("--dry" in more, "--json" in more)


def test_uninstall_access_revokes_the_login_last_and_only_after_a_green_uninstall(
    monkeypatch, capsys
):
    code, ran, _ = run(monkeypatch, capsys, "uninstall", "--access", "-y")
    assert code == 0
    deploys = ["deploys/uninstall.py", "deploys/unbootstrap.py"]
    assert [path for path, *_ in ran] == [CHECKOUT / deploy for deploy in deploys]
    assert len(run(monkeypatch, capsys, "uninstall", "--access", "-y", code=3)[1]) == 1


def test_add_requantize_runs_the_job_on_the_named_host(monkeypatch, capsys):
    words = ("add", "qwen3.5-35b", "--requantize", "--on", "spark-1", "-y")
    code, [(path, hosts, data, _)], said = run(monkeypatch, capsys, *words)
    assert (code, path, hosts) == (0, CHECKOUT / "deploys/requantize.py", ["spark-1"])
    assert data == ["checkpoint.requantized=true"]
    assert "--data model=qwen3.5-35b --data checkpoint.requantized=true -y" in said


@pytest.mark.parametrize("command", ["uninstall", "rollback", "prune", "rotate-key"])
def test_a_red_run_is_red(monkeypatch, capsys, command):
    assert run(monkeypatch, capsys, command, "-y", code=3)[0] == 3


@pytest.mark.parametrize("how", ["-y", "--dry"])
@pytest.mark.parametrize(("code", "told"), [(0, False), (1, True), (130, False)])
def test_a_run_that_failed_names_hosts_that_are_away_with_what_helps(
    monkeypatch, capsys, how, code, told
):
    ended, _, said = run(monkeypatch, capsys, "uninstall", how, code=code)
    assert ended == code
    assert ("spark-1: cannot be reached\n  fix: see that it is on\n" in said) == told


CHANGES = ["fabric", "uninstall", "rollback", "prune", "rotate-key"]


@pytest.mark.parametrize("command", CHANGES)
def test_nothing_runs_before_somebody_agreed(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, ran, said = run(monkeypatch, capsys, command)
    assert (code, ran) == (1, [])
    assert "confirmation: needs a terminal" in said


@pytest.mark.parametrize(("answer", "code", "runs"), [("y", 0, 1), ("n", 130, 0)])
def test_it_asks_once_and_naming_the_hosts(monkeypatch, capsys, answer, code, runs):
    asked = []

    def confirm(text, abort, err):
        asked.append(text)
        if answer != "y":
            raise click.Abort

    monkeypatch.setattr(run_pyinfra.click, "confirm", confirm)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    found, ran, _ = run(monkeypatch, capsys, "prune")
    assert (found, len(ran)) == (code, runs)
    [text] = asked
    assert text.startswith("spark-1: Remove what no kept release needs?")


STOPPED = Problem("main", "was stopped on purpose", "start it first")
THERE, BACK = (NamedRelease(f"main-{one * 12}", "m", f"v-{one}") for one in "ab")
DONE = Rollback(THERE, THERE, done="it serves in place of b")


@pytest.mark.parametrize(
    ("ways", "said", "code"),
    [
        ([Rollback(THERE, BACK), STOPPED], f"spark-1: goes back from {THERE} to {BACK}\n", None),
        ([STOPPED, DONE], "spark-1: main: was stopped on purpose", 1),
        ([DONE], "spark-1: it serves in place of b\n", 0),
        ([None], "spark-1: is away\n", 1),
    ],
)
def test_before_a_rollback_is_agreed_to_it_says_from_where_to_where_and_asks_only_then(
    monkeypatch, capsys, ways, said, code
):
    hosts = [SimpleNamespace(name=f"spark-{number + 1}") for number in range(len(ways))]
    answers = [Answer(*both, "is away") for both in zip(hosts, ways, strict=True)]
    monkeypatch.setattr(run_pyinfra, "query", lambda _hosts, _ask: answers)
    assert run_pyinfra.ended(hosts, None) == code
    assert said in capsys.readouterr().err

    monkeypatch.setattr(run_pyinfra, "ended", lambda _hosts, _to: code)
    asked = []
    monkeypatch.setattr(run_pyinfra.click, "confirm", lambda text, **_: asked.append(text))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    found, ran, _ = run(monkeypatch, capsys, "rollback")
    assert (found, len(ran), len(asked)) == ((0, 1, 1) if code is None else (code, 0, 0))


def test_a_measurement_is_not_asked_about_as_a_change_of_the_network(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(run_pyinfra.click, "confirm", lambda text, **_: asked.append(text))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    run(monkeypatch, capsys, "fabric", "--measure")
    run(monkeypatch, capsys, "fabric")
    assert ["Send up to 1 GB" in one for one in asked] == [True, False]
    assert ["Change the network" in one for one in asked] == [False, True]


PRUNED = """\
--> Starting operation: Service | Remove what no kept release needs
    [a] remove 3 things: running
    [a] removed 3 things, 41.2 GB
    [a] Success
"""


@pytest.mark.parametrize("ends", [0, 3])
def test_it_shows_the_last_result_and_no_progress(tmp_path, ends):
    def run(watcher: Watcher) -> int:
        for line in PRUNED.splitlines():
            feed(watcher.seen, line, 0.0)
        return ends

    out = io.StringIO()
    assert watch(run, ["a"], tmp_path / "prune.log", Console(file=out, width=80)) == ends
    said = out.getvalue().splitlines()
    assert "  removed 3 things, 41.2 GB" in said
    assert not any("remove 3 things: running" in text for text in said)
    assert (f"red: exit code {ends}" in said) == bool(ends)


@pytest.mark.parametrize("command", ["uninstall", "rollback", "prune", "rotate-key"])
def test_an_inventory_that_is_not_there_is_said_and_nothing_runs(monkeypatch, capsys, command):
    monkeypatch.setattr(run_pyinfra, "run_deploy", lambda *words, **more: 1 / 0)
    assert main([command, "/nowhere.py", "-y"]) == 1
    assert "/nowhere.py: is not an inventory file" in capsys.readouterr().err


def test_the_line_names_the_whole_path_of_a_pyinfra_that_no_shell_would_find(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    _, _, said = run(monkeypatch, capsys, "prune", "--dry")
    assert Path(shlex.split(said)[0]).is_file()


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_nothing_is_run_before_somebody_agreed_whatever_the_answer_looks_like(
    monkeypatch, capsys, more
):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, ran, said = run(monkeypatch, capsys, "uninstall", *more)
    assert (code, ran) == (1, [])
    assert "confirmation: needs a terminal" in said
    code, ran, said = run(monkeypatch, capsys, "uninstall", "-y", *more)
    assert (code, len(ran)) == (0, 1)
    assert shlex.split(said)[-1 - len(more) :] == ["-y", *more]
