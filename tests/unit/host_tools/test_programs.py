import os
import subprocess
import time

import pytest
from spark_contract.tool import HostToolError
from spark_host.system import programs, systemd

from tests.unit.shell import install_stub


def test_programs_run_in_the_c_locale(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert programs.read_output("sh", "-c", 'echo " $LC_ALL "; echo second') == "C \nsecond"


def test_python_programs_do_not_inherit_our_variables(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("TEXT = 'imported'\n")
    program = tmp_path / "program"
    program.write_text("#!/usr/bin/python3\nimport neighbour\nprint(neighbour.TEXT)\n")
    program.chmod(0o755)
    # Set by our launcher; netplan would not start with it.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert programs.read_output(str(program)) == "imported"


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("it is masked.", "run `systemctl unmask x.service`"),
        ("No", "run `journalctl -u x.service`"),
    ],
)
def test_failed_change_of_a_unit_names_the_fix(tmp_path, monkeypatch, message, fix):
    install_stub(tmp_path, "systemctl", f"echo {message} >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(HostToolError) as refused:
        systemd.run_systemctl("enable", "--now", "x.service")
    assert (refused.value.what, refused.value.fix) == (message, fix)


@pytest.mark.parametrize("argv", [("no-such-program",), ("false",), ("sleep", "5")])
def test_absent_failed_and_hanging_programs_have_no_output(monkeypatch, argv):
    monkeypatch.setattr(programs, "_TIMEOUT_S", 0.3)
    assert programs.read_output(*argv) is None


def test_stuck_program_does_not_block_and_is_not_restarted(monkeypatch):
    started: list[subprocess.Popen[str]] = []

    class Stuck(subprocess.Popen):
        def __init__(self, *words, **more):
            super().__init__(*words, **more)
            started.append(self)

        def kill(self):
            """Have no effect, as while a driver is stuck."""

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    monkeypatch.setattr(programs, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(programs, "_RETRY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(programs, "_KILL_WAIT_S", 0.1)
    began = time.monotonic()
    assert programs.read_output("sleep", "20") is None
    assert programs.read_output("sleep", "20") is None
    with pytest.raises(programs.ProgramTimeoutError):
        programs.read_output_patiently("sleep", "20")
    assert time.monotonic() - began < 15
    assert len(started) == 1

    subprocess.Popen.terminate(started[0])
    started[0].wait(5)
    assert programs.read_output("sleep", "0") == ""


@pytest.fixture
def hanging_systemd(tmp_path, monkeypatch):
    for name in ("systemctl", "journalctl"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 30\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(systemd, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(systemd, "_JOURNAL_TIMEOUT_S", 0.2)


def test_systemd_timeout_is_not_an_empty_answer(hanging_systemd):
    done = systemd.systemctl("stop", "x.service", timeout_s=0.2)
    assert (done.returncode, done.stderr) == (124, "did not exit within 0 s")
    with pytest.raises(HostToolError, match="systemctl show: did not exit"):
        systemd.state("x.service", "ActiveState")
    with pytest.raises(HostToolError, match="systemctl list-units: did not exit"):
        systemd.list_units("spark-serve@*.service")
    assert systemd.journal("", "x.service") == ["(journalctl did not exit within 0 s)"]
