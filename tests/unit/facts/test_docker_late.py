"""The script that looks at docker, run for real against programs that take their time."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spark_deploy.hosts import docker_facts

ANSWER = {
    "docker": '{"ServerVersion": "29.2.1"}',
    "nvidia-smi": "580.142",
    "nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.19.0",
}


def look(folder: Path, monkeypatch: pytest.MonkeyPatch, **delays_s: float) -> docker_facts.Docker:
    """Look at a host on which each program sleeps at its first call, and ``docker`` at all."""
    monkeypatch.setattr(docker_facts, "_LIMITS_S", (0.4, 0.9))
    for name, answer in ANSWER.items():
        delay_s = delays_s.get(name.replace("-", "_"), 0)
        asked = folder / f"{name}.asked"
        once = "" if name == "docker" else f"[ -e {asked} ] || "
        program = folder / name
        program.write_text(
            f"#!/bin/sh\n{once}sleep {delay_s}\ntouch {asked}\ncat <<'END'\n{answer}\nEND\n"
        )
        program.chmod(0o755)
    script = docker_facts.DockerState().command((), str(folder / "receipt.json"))
    said = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    )  # fmt: skip
    return docker_facts.DockerState().process(said.stdout.splitlines())


@pytest.mark.slow
def test_a_late_answer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look(tmp_path, monkeypatch, docker=0.5, nvidia_smi=0.6, nvidia_ctk=0.6)
    assert (seen.info["ServerVersion"], seen.driver_version) == ("29.2.1", "580.142")
    assert seen.toolkit_version == "1.19.0"
    assert seen.silent == ()


@pytest.mark.slow
def test_what_never_answers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look(tmp_path, monkeypatch, docker=1.2)
    assert seen.info == {}
    assert seen.silent == ("docker",)


def test_what_fails_at_once_is_not_silent(tmp_path: Path) -> None:
    for name in ANSWER:
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    script = docker_facts.DockerState().command((), str(tmp_path / "receipt.json"))
    said = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True, timeout=20,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert docker_facts.DockerState().process(said.stdout.splitlines()).silent == ()
