import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_client import MIB, NAMES, GatewayClient, recording_gateway, running_gateway
from prune_machine import Machine
from spark_host.system import docker, systemd
from stub_host import STUB_DIR, Host, Paths

from lab.memory import PROC, write_proc
from tests.nginx import MODULE, find_nginx, link_into
from tests.unit.prerequisites import missing


@pytest.fixture(scope="session")
def stub_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.fail(
            "the stub engine needs a C compiler: apt-get install gcc libc6-dev", pytrace=False
        )
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    out = folder / "vllm"
    with (folder / "vllm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            sources = sorted(STUB_DIR.glob("*.c"))
            command = [compiler, "-std=gnu11", "-D_GNU_SOURCE", "-O0", "-pthread", "-o", str(out)]
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
    write_proc(root)  # never this machine's caches
    monkeypatch.setenv("SPARK_PROC", str(root / PROC))
    stub_host = Host(Paths(root), stub_program)
    before = set(threading.enumerate())
    yield stub_host
    # Threads of a test write below this host, too.
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    for engine in stub_host.engines:
        engine.kill()
        engine.wait()
    shutil.rmtree(root)


@pytest.fixture
def systemctl_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = []

    def systemctl(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(systemd, "systemctl", systemctl)
    return calls


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that start nginx to `make unit`: they take a fifth of the time."""
    for item in items:
        if "nginx_program" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def nginx_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = find_nginx(tmp_path_factory.mktemp("nginx"))
    if program is None:
        missing("needs nginx, or the lab's packages: python -m lab prepare")
    return program


@pytest.fixture
def nginx_host(host: Host, nginx_program: Path) -> Host:
    if os.geteuid() != 0:
        missing("needs root, to run nginx as its own account")
    link_into(host.paths.root, nginx_program)
    return host


@pytest.fixture
def client(nginx_host: Host) -> Iterator[GatewayClient]:
    with running_gateway(nginx_host) as running:
        yield running


@pytest.fixture
def js_host(nginx_host: Host) -> Host:
    if not (nginx_host.paths.root / "usr/lib/nginx/modules" / MODULE).exists():
        missing("needs libnginx-mod-http-js, or the lab's packages: python -m lab prepare")
    return nginx_host


@pytest.fixture
def services(js_host: Host) -> Iterator[GatewayClient]:
    routes = {"/v1/embeddings": "embed", "/v1/rerank": "rank"}
    with recording_gateway(
        js_host, tuple(NAMES), names=NAMES, max_body_bytes=8 * MIB, routes=routes
    ) as running:
        yield running


@pytest.fixture
def machine(host: Host, monkeypatch: pytest.MonkeyPatch, systemctl_calls: object) -> Machine:
    machine = Machine(host)

    def query(path: str, timeout_s: float = 10) -> Any:
        if path == "/images/json":
            return list(machine.images.values())
        return []

    def client(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        assert words[0] == "rmi"
        machine.removed.append(words[1])
        machine.images.pop(words[1])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(docker, "query", query)
    monkeypatch.setattr(docker, "is_up", lambda: True)
    monkeypatch.setattr(docker, "inspect_image", lambda tag: machine.images.get(tag))
    monkeypatch.setattr(docker, "client", client)
    monkeypatch.setattr(systemd, "show", lambda units, fields: machine.units)
    return machine
