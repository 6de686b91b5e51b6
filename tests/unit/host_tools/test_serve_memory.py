"""A start waits until the last engine and its memory are gone, and no longer than it may."""

from __future__ import annotations

import json
import shutil
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from spark_contract.documents import parse
from spark_contract.errors import HostToolError
from spark_contract.release import Release
from spark_host.engine.memory import GIB, available_bytes, wait_for_memory

from tests.unit.host_tools.stub_host import release_data

NEEDED_BYTES = 80 * GIB
PATIENCE_S = 30.0  # far more than any of these waits takes


@dataclass
class World:
    """What the gate sees; it changes when the gate has said so many sentences."""

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


def test_nothing_is_waited_for_when_the_memory_is_there(world: World) -> None:
    world.free(80)
    world.wait()
    assert world.sentences == []


def test_memory_that_comes_back_late_is_waited_for(world: World) -> None:
    world.free(20)
    world.free_after = 3
    world.wait()
    assert len(world.sentences) == 3
    assert all("20.0 GiB available, 80.0 GiB needed" in said for said in world.sentences)


def test_a_container_that_goes_late_is_waited_for_though_memory_is_free(world: World) -> None:
    world.free(100)
    world.containers.append("spark-main-0123456789ab")
    world.gone_after = 3
    world.wait()
    assert len(world.sentences) == 3
    assert all("spark-main-0123456789ab is still there" in said for said in world.sentences)


def test_the_engine_of_another_service_may_stay(world: World) -> None:
    world.free(100)
    world.neighbours.append("spark-embed-0123456789ab")
    world.wait()
    assert world.sentences == []


def test_the_memory_is_waited_for_after_its_container_has_gone(world: World) -> None:
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
def test_what_never_goes_away_ends_the_wait_by_name(
    world: World, containers: list[str], obstacle: str, fix: str
) -> None:
    world.free(20)
    world.containers.extend(containers)
    with pytest.raises(HostToolError, match=f"{obstacle} after 0 s; fix: {fix}"):
        world.wait(wait_s=0.1)


def test_memory_that_the_kernel_keeps_for_its_handover_is_not_waited_for_nor_counted(
    world: World,
) -> None:
    world.meminfo.write_text(
        "MemTotal: 125000000 kB\nMemAvailable: 90000000 kB\nCmaTotal: 0 kB\nCmaFree: 9000000 kB\n"
    )
    assert available_bytes() == 81000000 * 1024
