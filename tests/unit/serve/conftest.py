"""A stub engine of one's own, run by the test and reached over its unix socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
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
def host(stub_program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    # Not pytest's own directory: it is too deep for the names of sockets, and every other run of
    # pytest closes it to the gateway's workers.
    root = Path(tempfile.mkdtemp(prefix="spark-host-"))
    root.chmod(0o755)
    monkeypatch.setenv("SPARK_ENGINE_LOG", str(root / "engine.log"))
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(root / "no-docker.sock"))
    made = Host(Paths(root), stub_program)
    yield made
    for engine in made.engines:
        engine.kill()
        engine.wait()
    shutil.rmtree(root)


@pytest.fixture
def gate(host: Host) -> Iterator[Door]:
    if shutil.which("nginx", path="/usr/sbin:/usr/bin") is None or os.geteuid() != 0:
        pytest.skip("needs nginx and root")
    with running(host) as door:
        yield door
