"""The engine's variables reach the container and nobody on the way there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_host.engine import container, serve
from spark_host.system import docker
from stub_host import RELEASE, REPOSITORY, Host, release_data

HOSTILE = {
    "LD_PRELOAD": "/cache/evil.so",
    "DOCKER_HOST": "tcp://192.0.2.1:2375",
    "DOCKER_CONFIG": "/cache",
    "GODEBUG": "http2debug=2",
    "HTTPS_PROXY": "http://192.0.2.1",
    "PATH": "/cache",
    "STUB_LOG": 'a value with  spaces, "quotes" and $signs = # ü',
}


@pytest.fixture
def client(host: Host, tmp_path: Path) -> Path:
    """A docker client that writes down what it was given."""
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f"env -0 > {tmp_path}/environ; printf '%s\\0' \"$@\" > {tmp_path}/argv\n"
        f'while [ $# -gt 0 ]; do [ "$1" = --env-file ] && cp -p "$2" {tmp_path}/env-file; '
        "shift; done; exit 0\n"
    )
    program.chmod(0o755)
    return program


def fields(path: Path, end: str = "\0") -> list[str]:
    return path.read_text().removesuffix(end).split(end)


def started(host: Host, client: Path, variables: dict[str, str]) -> dict[str, str]:
    """Have the tools run an engine with these variables; return those of the docker client."""
    host.release(engine={**release_data()["engine"], "env": variables})
    done = subprocess.run(
        [sys.executable, "-m", "spark_host", "serve", RELEASE],
        capture_output=True, text=True, check=False,
        env={
            "PYTHONPATH": f"{REPOSITORY}/files/host:{REPOSITORY}/files/contract",
            "SPARK_ROOT": str(host.paths.root),
            "PATH": f"{client.parent}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": "/nowhere", "DOCKER_CONTEXT": "elsewhere",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = fields(client.parent.parent / "environ")
    return dict(line.split("=", 1) for line in found)


def test_root_s_docker_client_gets_nothing_of_the_engine_s_variables(
    host: Host, client: Path
) -> None:
    found = started(host, client, HOSTILE)
    assert found.pop("PATH").endswith(":/usr/bin:/bin")
    # The shell that stands in for the client adds its own.
    assert set(found) - {"PWD", "SHLVL", "_", "OLDPWD"} <= {"HOME", "LC_ALL"}
    said = "\n".join(fields(client.parent.parent / "argv"))
    assert "evil.so" not in said
    assert "quotes" not in said


def test_the_container_gets_all_of_them_through_a_file_for_root_alone(
    host: Host, client: Path
) -> None:
    started(host, client, HOSTILE)
    given = client.parent.parent / "env-file"
    assert stat.S_IMODE(given.stat().st_mode) == 0o600
    assert dict(line.split("=", 1) for line in fields(given, "\n")) == HOSTILE


def test_the_file_is_gone_after_the_engine(
    host: Host, client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(host, client, HOSTILE)
    monkeypatch.setattr(docker, "remove_container", lambda _: None)
    assert "evil.so" in host.paths.engine_environment(RELEASE).read_text()
    serve.after_stop(RELEASE, host.paths)
    assert not host.paths.engine_environment(RELEASE).exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GOOD", "one\nLD_PRELOAD=/cache/evil.so"),
        ("GOOD", "one\rtwo"),
        ("GOOD", "nul\0"),
        ("A\nB", "x"),
        ("A=B", "x"),
        ("", "x"),
        ("#A", "x"),
        ("GOOD", "x" * 70_000),
    ],
)
def test_what_a_file_of_lines_cannot_say_is_refused_by_name(
    host: Host, name: str, value: str
) -> None:
    release = host.release(engine={**release_data()["engine"], "env": {name: value}})
    with pytest.raises(HostToolError, match="environment"):
        container.write_environment(release, host.paths)
    assert not host.paths.engine_environment(RELEASE).exists()


def test_other_calls_of_the_client_are_as_clean(
    client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in HOSTILE.items():
        if name != "PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    docker.client("stop", "x")
    found = dict(line.split("=", 1) for line in fields(client.parent.parent / "environ"))
    assert set(found) - {"PWD", "SHLVL", "_", "OLDPWD"} <= {"HOME", "LC_ALL", "PATH"}
