"""A command that changes hosts is the pyinfra line that it prints, with its exit code."""

from __future__ import annotations

import shlex
import subprocess
from types import SimpleNamespace

import pytest

from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli import main
from spark_deploy.cli.changes import line

INVENTORY = str(CHECKOUT / "inventory/spark.py")


def run(monkeypatch, capsys, *words, code=0):
    ran = []

    def done(argv, check):
        ran.append(argv)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", done)
    found = main([words[0], INVENTORY, *words[1:]])
    return found, ran, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "deploy", "more"),
    [
        (("uninstall", "--models", "--dry", "--data", "profile=base"), "deploys/uninstall.py",
         ["--data", "profile=base", "--data", "uninstall.models=true", "--dry"]),
        (("rollback", "--to", "main-0123456789ab", "-y"), "deploys/rollback.py",
         ["--data", "releases.rollback_to=main-0123456789ab", "-y"]),
        (("prune", "--dry", "--json"), "deploys/prune.py", ["--dry", "--json"]),
        (("unbootstrap", "-y"), "deploys/unbootstrap.py", ["-y"]),
        (("rotate-key",), "deploys/rotate_key.py", []),
    ],
)  # fmt: skip
def test_it_runs_what_it_prints_for_every_host_by_name(monkeypatch, capsys, words, deploy, more):
    code, [argv], said = run(monkeypatch, capsys, *words)
    assert code == 0
    typed = shlex.split(said)
    assert typed[0].endswith("pyinfra")
    assert typed[1:] == argv[1:]
    assert argv[1:] == [INVENTORY, str(CHECKOUT / deploy), "--limit", "spark-1", *more]


@pytest.mark.parametrize("command", ["uninstall", "rollback", "prune", "rotate-key"])
def test_a_red_run_is_red(monkeypatch, capsys, command):
    assert run(monkeypatch, capsys, command, "-y", code=3)[0] == 3


@pytest.mark.parametrize("command", ["uninstall", "rollback", "prune", "rotate-key"])
def test_an_inventory_that_is_not_there_is_said_and_nothing_runs(monkeypatch, capsys, command):
    monkeypatch.setattr(line.subprocess, "run", lambda *words, **more: 1 / 0)
    assert main([command, "/nowhere.py", "-y"]) == 1
    assert "/nowhere.py: is not an inventory file" in capsys.readouterr().err


def test_the_line_names_the_whole_path_of_a_pyinfra_that_no_shell_would_find(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    _, [argv], said = run(monkeypatch, capsys, "prune", "--dry")
    assert shlex.split(said) == argv
