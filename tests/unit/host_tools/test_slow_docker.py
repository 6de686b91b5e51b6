import json
import os
import time

import pytest
from json_server import json_server
from spark_contract import files
from spark_contract.records import FullCheck, Proof
from spark_host import jobs
from spark_host.engine import serve
from spark_host.records import boot, versions
from spark_host.system import docker, programs, systemd
from stub_host import write_program

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


def test_waits_for_a_late_answer(late):
    late.docker_delays_s = [0.8]
    late.program("nvidia-smi", 0.4, prints="580.142")
    late.program("nvidia-ctk", 0.4, prints="version 1.19.0")

    assert versions.read() == {
        "kernel": os.uname().release, "driver": "580.142", "docker": "29.2.1", "toolkit": "1.19.0"
    }  # fmt: skip


def test_unanswered_version_is_unknown(late):
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


def test_missing_version_is_a_change(late, monkeypatch):
    before = versions.read()
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(late.folder / "absent"))
    (late.folder / "nvidia-ctk").unlink()
    assert versions.describe_changes(before, versions.read()) == [
        "docker 29.2.1 -> none", "toolkit 1.19.0 -> none"
    ]  # fmt: skip


def test_image_job_is_unknown_if_docker_is_silent(host, late, monkeypatch):
    digest12 = "0123456789ab"
    job = {
        "schema_version": 1, "digest": digest12.ljust(64, "0"), "kind": "image-build",
        "title": "build image x", "argv": ["false"], "env": {}, "total_bytes": None, "after": [],
        "proof": {"image": "spark-vllm:x", "label": "e" * 64},
    }  # fmt: skip
    host.paths.job(digest12).mkdir(parents=True)
    files.write_text(host.paths.job(digest12) / "job.json", json.dumps(job))
    monkeypatch.setattr(systemd, "show_loaded", lambda patterns, fields: {})

    late.docker_delays_s = [0.8, 0.8]
    [unknown] = jobs.poll([digest12], host.paths)
    [known] = jobs.poll([digest12], host.paths)

    assert unknown.state == "unknown"
    assert "docker: did not respond within" in unknown.result
    assert known.state == "done"


def test_proof_stays_valid_if_docker_is_late(host, late):
    release, now = host.release(), versions.read()
    late.docker_delays_s = [0.8, 0.8]
    full = FullCheck("run", files.now(), now)
    result = Proof(release.name, release.digest, "run", "full", True, full.checked_at, (), now,
                   {}, False, (), full)  # fmt: skip
    assert boot.unproven_reason(result, release.digest, "run", versions.read()) is None


def test_slow_docker_does_not_mark_release_broken(host, late):
    late.docker_delays_s = [0.8, 0.8]
    problem = serve.find_artifact_problem(host.release())
    assert isinstance(problem, docker.DockerTimeoutError)
    assert "not on this host" not in str(problem)
