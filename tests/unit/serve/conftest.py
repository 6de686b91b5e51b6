"""A stub engine of one's own, run by the test and reached over its unix socket."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from stub_gateway import Door, running
from stub_host import STUB_DIR, Host, Paths


@pytest.fixture(scope="session")
def stub_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub engine, compiled once."""
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.fail("the stub engine needs a C compiler: apt-get install gcc libc6-dev make")
    out = tmp_path_factory.mktemp("stub") / "vllm"
    sources = sorted(STUB_DIR.glob("*.c"))
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-pthread", "-o", str(out)]
    subprocess.run([*command, *map(str, sources)], check=True)
    return out


@pytest.fixture
def host(tmp_path: Path, stub_program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("SPARK_ENGINE_LOG", str(tmp_path / "engine.log"))
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(tmp_path / "no-docker.sock"))
    # Sockets have short names at most; pytest's own directories can be too deep for them.
    os.chmod(tmp_path, 0o755)
    made = Host(Paths(tmp_path), stub_program)
    yield made
    for engine in made.engines:
        engine.kill()
        engine.wait()


@pytest.fixture
def gate(host: Host) -> Iterator[Door]:
    if shutil.which("nginx", path="/usr/sbin:/usr/bin") is None or os.geteuid() != 0:
        pytest.skip("needs nginx and root")
    with running(host) as door:
        yield door
