"""Starting an engine: preconditions, turns and memory."""

from __future__ import annotations

import fcntl
import json
import shutil
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from spark_contract import files
from spark_contract.documents import parse
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_host.engine import container, serve
from spark_host.engine.memory import GIB, available_bytes, wait_for_memory
from spark_host.engine.serve import wait_for_turn
from spark_host.gateway import gateway, traffic
from spark_host.system import docker
from spark_host.system import host as system
from stub_host import RELEASE, Host

from tests.unit.host_tools.stub_host import release_data


@pytest.mark.parametrize(
    "arguments", [("--runtime=nvidia",), ("--runtime=runc", "--device=nvidia.com/gpu=all")]
)
def test_engine_gets_the_proven_gpu_arguments(host: Host, arguments: tuple[str, ...]) -> None:
    host.proven_gpu(*arguments)
    release = host.release()
    argv = container.docker_argv(release, host.paths)
    given = argv[: argv.index(release.image.tag)]  # later arguments are the engine's
    assert [word for word in given if word.startswith(("--runtime", "--device"))] == [*arguments]


def test_multiline_template_is_a_single_argument(host: Host) -> None:
    template = "{% for message in messages %}\n\t'{{ message }}' \"$x\" ü\n{% endfor %}\n"
    release = host.release(engine__argv=["/model", "--chat-template", template])
    assert container.docker_argv(release, host.paths)[-1] == template


def test_start_needs_the_gpu_proof(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "is_up", lambda: True)
    host.release()
    assert docker.gpu_arguments(host.paths)
    host.paths.gpu_receipt.unlink()
    words = "gpu-container.json: no container was proven to see the GPU; fix: run the deploy"
    with pytest.raises(HostToolError, match=words):
        serve.prepare(RELEASE, host.paths)


@pytest.mark.parametrize("way", [serve.prepare, serve.run], ids=["prepare", "run"])
def test_second_engine_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch, way: Callable[[str, Paths], int]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(serve.os, "execvpe", lambda program, *_: started.append(program))
    host.release()
    host.paths.run.mkdir(parents=True, exist_ok=True)
    with (host.paths.run / "engine.lock").open("w") as lock:
        lock.write("main-ffffffffffff\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            HostToolError, match="the engine of main-ffffffffffff runs on this host"
        ):
            way(RELEASE, host.paths)
    assert started == []


def test_missing_gateway_account_is_a_problem(host: Host) -> None:
    nginx = host.paths.root / "usr/sbin/nginx"
    nginx.parent.mkdir(parents=True)
    nginx.touch(0o755)
    release = host.release()
    assert gateway.problem(release, host.paths) is None
    host.gateway(user="spark-nobody-here")
    words = "account spark-nobody-here: does not exist on this host; fix: systemd-sysusers"
    assert str(gateway.problem(release, host.paths)).startswith(words)


def test_traffic_closes_before_the_container_is_removed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release()
    files.write_text(host.paths.traffic(release.service), "open\n")
    seen: list[bool] = []
    monkeypatch.setattr(
        docker, "remove_container", lambda _: seen.append(traffic.is_open("main", host.paths))
    )
    assert serve.after_stop(RELEASE, host.paths) == 0
    assert seen == [False]


CHAT, EMBED = "main-0123456789ab", "embed-0123456789ab"


@dataclass
class Systemd:
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    then: dict[int, dict[str, tuple[str, str]]] = field(default_factory=dict)
    asked: int = 0

    def show(self, units: list[str], properties: list[str]) -> dict[str, dict[str, str]]:
        assert properties == ["ActiveState", "SubState"]
        self.asked += 1
        self.states |= self.then.get(self.asked, {})
        found = {one: self.states.get(one, ("inactive", "dead")) for one in units}
        return {one: dict(zip(properties, state, strict=True)) for one, state in found.items()}


@dataclass
class Clock:
    seconds: float = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def machine(tmp_path):
    paths = Paths(tmp_path)
    paths.run.mkdir(parents=True)
    return system.Host(paths, units=Systemd(), clock=Clock())


def release(name: str) -> Release:
    service = name.rpartition("-")[0]
    return parse(Release, json.dumps(release_data(name, service=service)))


def test_second_start_waits_for_the_first(machine):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    chat = f"spark-serve@{CHAT}.service"
    machine.units.states[chat] = ("activating", "start-post")
    machine.units.then[3] = {chat: ("active", "running")}
    wait_for_turn(release(EMBED), machine, said.append)
    assert said == [f"phase=turn waiting for the start of {CHAT}"] * 2


@pytest.mark.parametrize(
    "state", [("failed", "failed"), ("activating", "auto-restart"), ("inactive", "dead")]
)
def test_failed_start_does_not_block_others(machine, state):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    machine.units.states[f"spark-serve@{CHAT}.service"] = state
    wait_for_turn(release(EMBED), machine, said.append)
    assert said == []


def test_waiting_for_a_start_is_limited(machine):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    machine.units.states[f"spark-serve@{CHAT}.service"] = ("activating", "start")
    mine = release(EMBED)
    wait_for_turn(mine, machine, said.append)
    assert said[-1] == f"phase=turn no longer waiting for the start of {CHAT}"
    assert mine.timeouts.start_s < machine.clock.seconds < mine.timeouts.start_s + 5


def test_restart_of_the_same_release_does_not_wait(machine):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    machine.units.states[f"spark-serve@{CHAT}.service"] = ("activating", "start-pre")
    wait_for_turn(release(CHAT), machine, said.append)
    assert said == []


NEEDED_BYTES = 80 * GIB
PATIENCE_S = 30.0  # far more than any of these waits takes


@dataclass
class World:
    meminfo: Path
    containers: list[str] = field(default_factory=list)
    neighbours: list[str] = field(default_factory=list)  # engines of other services
    sentences: list[str] = field(default_factory=list)
    gone_after: int = 0
    free_after: int = 0

    def free(self, gib: int) -> None:
        kib_in_gib = 1 << 20
        self.meminfo.write_text(
            f"MemTotal: {119 * kib_in_gib} kB\nMemAvailable: {gib * kib_in_gib} kB\n"
        )

    def listen(self, sentence: str) -> None:
        self.sentences.append(sentence)
        if len(self.sentences) == self.gone_after:
            self.containers.clear()
        if len(self.sentences) == self.free_after:
            self.free(100)

    def wait(self, wait_s: float = PATIENCE_S) -> None:
        memory = {"needed_bytes": NEEDED_BYTES, "wait_s": wait_s, "floor_bytes": 4 * GIB}
        release = parse(Release, json.dumps(release_data(memory=memory)))
        wait_for_memory(release, self.listen, poll_s=0.01)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # Not pytest's own directory, which is too deep for the name of a socket.
    root = Path(tempfile.mkdtemp(prefix="spark-memory-"))
    made = World(root / "meminfo")

    class Daemon(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = json.loads(parse_qs(urlsplit(self.path).query)["filters"][0])["label"]
            found = {"spark.service=main": made.containers, "spark.service=embed": made.neighbours}
            body = json.dumps([{"Names": [f"/{n}"]} for one in asked for n in found[one]]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def address_string(self) -> str:
            return "unix"

    monkeypatch.setenv("SPARK_MEMINFO", str(made.meminfo))
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(root / "docker.sock"))
    with socketserver.ThreadingUnixStreamServer(str(root / "docker.sock"), Daemon) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield made
        server.shutdown()
        thread.join()
    shutil.rmtree(root)


def test_free_memory_needs_no_wait(world: World) -> None:
    world.free(80)
    world.wait()
    assert world.sentences == []


def test_waits_for_memory(world: World) -> None:
    world.free(20)
    world.free_after = 3
    world.wait()
    assert len(world.sentences) == 3
    assert all("20.0 GiB available, 80.0 GiB needed" in said for said in world.sentences)


def test_waits_for_a_leftover_container(world: World) -> None:
    world.free(100)
    world.containers.append("spark-main-0123456789ab")
    world.gone_after = 3
    world.wait()
    assert len(world.sentences) == 3
    assert all("spark-main-0123456789ab is still there" in said for said in world.sentences)


def test_ignores_engines_of_other_services(world: World) -> None:
    world.free(100)
    world.neighbours.append("spark-embed-0123456789ab")
    world.wait()
    assert world.sentences == []


def test_waits_for_memory_after_the_container(world: World) -> None:
    world.free(20)
    world.containers.append("spark-main-0123456789ab")
    world.gone_after, world.free_after = 2, 4
    world.wait()
    assert ["is still there" in said for said in world.sentences] == [True, True, False, False]


@pytest.mark.parametrize(
    ("containers", "obstacle", "fix"),
    [
        ([], "20.0 GiB available, 80.0 GiB needed", "stop the largest processes: "),
        (["spark-old"], "spark-old is still there", "docker rm -f spark-old"),
    ],
)
def test_timeout_names_the_obstacle(
    world: World, containers: list[str], obstacle: str, fix: str
) -> None:
    world.free(20)
    world.containers.extend(containers)
    with pytest.raises(HostToolError, match=f"{obstacle} after 0 s; fix: {fix}"):
        world.wait(wait_s=0.1)


def test_kexec_reserve_is_not_available(
    world: World,
) -> None:
    world.meminfo.write_text(
        "MemTotal: 125000000 kB\nMemAvailable: 90000000 kB\nCmaTotal: 0 kB\nCmaFree: 9000000 kB\n"
    )
    assert available_bytes() == 81000000 * 1024
