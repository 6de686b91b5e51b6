import json
import os
import subprocess
import time

import pytest
from socket_servers import json_server
from spark_contract import files
from spark_contract.tool import HostToolError
from spark_host import jobs
from spark_host.engine import serve
from spark_host.records import versions
from spark_host.system import docker, programs, systemd
from stub_host import job_data, write_program

IMAGE = {"Config": {"Labels": {"spark.digest": "e" * 64}}}


class Late:
    """A docker daemon and programs with delays for their next answers."""

    def __init__(self, folder):
        self.docker_delays_s: list[float] = []
        self.folder = folder

    def program(self, name, *delays_s, prints):
        for number, delay_s in enumerate(delays_s):
            (self.folder / f"{name}.{number}").write_text(str(delay_s))
        write_program(
            self.folder / name,
            f"for turn in {self.folder}/{name}.[0-9]; do [ -e $turn ] || break; "
            f"seconds=$(cat $turn); rm $turn; sleep $seconds; break; done; echo {prints}",
        )

    def answer(self, path, _):
        time.sleep(self.docker_delays_s.pop(0) if self.docker_delays_s else 0)
        return {"Version": "29.2.1"} if path == "/version" else IMAGE


@pytest.fixture
def late(host, monkeypatch):
    late = Late(host.paths.root / "bin")
    late.folder.mkdir()
    path = host.paths.root / "docker.sock"
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(path))
    monkeypatch.setenv("PATH", f"{late.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(docker, "RETRY_TIMEOUT_S", 0.6)
    monkeypatch.setattr(programs, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(programs, "_RETRY_TIMEOUT_S", 0.6)
    get = docker._get
    monkeypatch.setattr(docker, "_get", lambda path, limit_s: get(path, min(limit_s, 0.6)))
    late.program("nvidia-smi", prints="580.142")
    late.program("nvidia-ctk", prints="version 1.19.0")
    with json_server(path, late.answer):
        yield late


def test_waits_for_programs_that_answer_late(late):
    late.docker_delays_s = [0.8]
    late.program("nvidia-smi", 0.4, prints="580.142")
    late.program("nvidia-ctk", 0.4, prints="version 1.19.0")

    assert versions.read() == {
        "kernel": os.uname().release, "driver": "580.142", "docker": "29.2.1", "toolkit": "1.19.0"
    }  # fmt: skip


def test_version_of_an_unresponsive_program_is_unknown(late):
    before = versions.read()
    late.docker_delays_s = [0.8, 0.8]
    late.program("nvidia-smi", 0.8, 0.8, prints="580.142")

    now = versions.read()

    assert (now["docker"], now["driver"]) == (versions.UNKNOWN, versions.UNKNOWN)
    assert versions.describe_changes(before, now) == []
    assert versions.describe_changes(before, {**now, "toolkit": "1.20.0"}) == [
        "toolkit 1.19.0 -> 1.20.0"
    ]
    assert versions.describe_changes(now, before) == [
        "driver unknown -> 580.142", "docker unknown -> 29.2.1"
    ]  # fmt: skip


def test_removed_program_counts_as_a_version_change(late, monkeypatch):
    before = versions.read()
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(late.folder / "absent"))
    (late.folder / "nvidia-ctk").unlink()
    assert versions.describe_changes(before, versions.read()) == [
        "docker 29.2.1 -> none", "toolkit 1.19.0 -> none"
    ]  # fmt: skip


def test_image_job_state_is_unknown_if_docker_does_not_respond(host, late, monkeypatch):
    digest12 = "0123456789ab"
    proof = {"image": "spark-vllm:x", "label": "e" * 64}
    job = job_data(digest12, proof, kind="image-build")
    files.write_text(host.paths.job(digest12) / "job.json", json.dumps(job))
    monkeypatch.setattr(systemd, "show_loaded", lambda patterns, fields: {})

    late.docker_delays_s = [0.8, 0.8]
    [unknown] = jobs.poll([digest12], host.paths)
    [known] = jobs.poll([digest12], host.paths)

    assert unknown.state == "unknown"
    assert "docker: did not respond within" in unknown.result
    assert known.state == "done"


def test_release_is_not_marked_broken_if_docker_is_slow(host, late):
    late.docker_delays_s = [0.8, 0.8]
    problem = serve.find_artifact_problem(host.release())
    assert isinstance(problem, docker.DockerTimeoutError)
    assert "not on this host" not in str(problem)


def test_programs_run_in_the_c_locale(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert programs.read_output("sh", "-c", 'echo " $LC_ALL "; echo second') == "C \nsecond"


def test_python_programs_do_not_inherit_our_environment_variables(tmp_path, monkeypatch):
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
def test_error_of_a_failed_unit_change_includes_the_fix(tmp_path, monkeypatch, message, fix):
    write_program(tmp_path / "systemctl", f"echo {message} >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(HostToolError) as refused:
        systemd.run_systemctl("enable", "--now", "x.service")
    assert (refused.value.what, refused.value.fix) == (message, fix)


@pytest.mark.parametrize("argv", [("no-such-program",), ("false",), ("sleep", "5")])
def test_programs_that_are_missing_fail_or_hang_give_no_output(monkeypatch, argv):
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
        programs.read_output_with_retry("sleep", "20")
    assert time.monotonic() - began < 15
    assert len(started) == 1

    subprocess.Popen.terminate(started[0])
    started[0].wait(5)
    assert programs.read_output("sleep", "0") == ""


def test_systemd_timeout_is_not_read_as_an_empty_answer(tmp_path, monkeypatch):
    for name in ("systemctl", "journalctl"):
        write_program(tmp_path / name, "exec sleep 30")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(systemd, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(systemd, "_JOURNAL_TIMEOUT_S", 0.2)
    done = systemd.systemctl("stop", "x.service", timeout_s=0.2)
    assert (done.returncode, done.stderr) == (124, "did not exit within 0 s")
    with pytest.raises(HostToolError, match="systemctl show: did not exit"):
        systemd.state("x.service", "ActiveState")
    with pytest.raises(HostToolError, match="systemctl list-units: did not exit"):
        systemd.list_units("spark-serve@*.service")
    assert systemd.journal("", "x.service") == ["(journalctl did not exit within 0 s)"]
