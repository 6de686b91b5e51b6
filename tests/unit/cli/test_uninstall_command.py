"""The command is the pyinfra line that it prints, with its exit code."""

from __future__ import annotations

import shlex
import subprocess
from types import SimpleNamespace

from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli import main, uninstall


def run(monkeypatch, capsys, *words, code=0):
    ran = []

    def done(argv, check):
        ran.append(argv)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", done)
    found = main(["uninstall", str(CHECKOUT / "inventory/spark.py"), *words])
    return found, ran, capsys.readouterr().err


def test_it_runs_what_it_prints_for_every_host_by_name(monkeypatch, capsys):
    code, [argv], said = run(monkeypatch, capsys, "--models", "--dry", "--data", "profile=base")
    assert code == 0
    assert shlex.split(said) == ["pyinfra", *argv[1:]]
    assert argv[1:] == [
        str(CHECKOUT / "inventory/spark.py"), str(CHECKOUT / "deploys/uninstall.py"),
        "--limit", "spark-1", "--data", "profile=base", "--data", "uninstall.models=true", "--dry",
    ]  # fmt: skip


def test_a_red_run_is_red(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "-y", code=3)[0] == 3


def test_an_inventory_that_is_not_there_is_said_and_nothing_runs(monkeypatch, capsys):
    monkeypatch.setattr(uninstall.subprocess, "run", lambda *words, **more: 1 / 0)
    assert main(["uninstall", "/nowhere.py"]) == 1
    assert "/nowhere.py: is not an inventory file" in capsys.readouterr().err
