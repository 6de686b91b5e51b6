import fcntl
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from socket_servers import json_server
from spark_contract import files
from spark_contract.documents import read
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import HostToolError
from spark_host.engine import container, memory, serve
from spark_host.engine.memory import GIB
from spark_host.gateway import gateway
from spark_host.system import docker
from spark_host.system import host as system
from stub_host import RELEASE, release_data


@pytest.mark.parametrize(
    "arguments", [("--runtime=nvidia",), ("--runtime=runc", "--device=nvidia.com/gpu=all")]
)
def test_engine_gets_the_proven_gpu_arguments(host, arguments):
    host.proven_gpu(*arguments)
    release = host.release()
    argv = container.docker_argv(release, host.paths)
    docker_options = argv[: argv.index(release.image.tag)]
    gpu_options = [word for word in docker_options if word.startswith(("--runtime", "--device"))]
    assert gpu_options == [*arguments]


def test_multiline_template_is_a_single_argument(host):
    template = "{% for message in messages %}\n\t'{{ message }}' \"$x\" ü\n{% endfor %}\n"
    release = host.release(engine__argv=["/model", "--chat-template", template])
    assert container.docker_argv(release, host.paths)[-1] == template


def test_engine_does_not_start_unless_gpu_check_passed(host, monkeypatch):
    monkeypatch.setattr(docker, "is_up", lambda: True)
    host.release()
    host.paths.gpu_receipt.unlink()
    message = "gpu-container.json: no container has used the GPU successfully; fix: run the deploy"
    with pytest.raises(HostToolError, match=message):
        serve.prepare(RELEASE, host.paths)


@pytest.mark.parametrize("verb", [serve.prepare, serve.run], ids=["prepare", "run"])
def test_second_running_engine_is_rejected(host, monkeypatch, verb):
    started: list[str] = []
    monkeypatch.setattr(serve.os, "execvpe", lambda program, *_: started.append(program))
    host.release()
    host.paths.run.mkdir(parents=True, exist_ok=True)
    with (host.paths.run / "engine.lock").open("w") as lock:
        lock.write("main-ffffffffffff\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            HostToolError, match="engine of main-ffffffffffff is running on this host"
        ):
            verb(RELEASE, host.paths)
    assert started == []


def test_missing_gateway_account_is_reported(host):
    nginx = host.paths.root / "usr/sbin/nginx"
    nginx.parent.mkdir(parents=True)
    nginx.touch(0o755)
    release = host.release()
    assert gateway.find_problem(release, host.paths) is None
    host.gateway(user="spark-absent")
    message = "account spark-absent: does not exist on this host; fix: systemd-sysusers"
    assert str(gateway.find_problem(release, host.paths)).startswith(message)


def test_gateway_closes_before_the_container_is_removed(host, monkeypatch):
    release = host.release()
    files.write_text(host.paths.traffic(release.service), "open\n")
    open_at_removal: list[bool] = []

    def remove_container(_):
        open_at_removal.append(gateway.is_open("main", host.paths))

    monkeypatch.setattr(docker, "remove_container", remove_container)
    assert serve.after_stop(RELEASE, host.paths) == 0
    assert open_at_removal == [False]


CHAT, EMBED = "main-0123456789ab", "embed-0123456789ab"


@dataclass
class FakeSystemd:
    states: list[tuple[str, str]] = field(default_factory=list)

    def show(self, units, properties):
        assert (units, properties) == ([f"spark-serve@{CHAT}.service"], ["ActiveState", "SubState"])
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {units[0]: dict(zip(properties, state, strict=True))}


@dataclass
class FakeClock:
    seconds: float = 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


class Turns:
    def __init__(self, root):
        paths = Paths(root)
        paths.run.mkdir(parents=True)
        self.systemd, self.clock, self.reports = FakeSystemd(), FakeClock(), list[str]()
        self.host: Any = system.Host(paths, units=self.systemd, clock=self.clock)
        self.wait(CHAT)

    def wait(self, name):
        release = read(Release, release_data(name, service=name.rpartition("-")[0]))
        serve.wait_for_turn(release, self.host, self.reports.append)
        return release


@pytest.fixture
def turns(tmp_path):
    return Turns(tmp_path)


def test_second_start_waits_for_the_first(turns):
    turns.systemd.states = [("activating", "start-post")] * 2 + [("active", "running")]
    turns.wait(EMBED)
    assert turns.reports == [f"phase=turn waiting until {CHAT} has started"] * 2


@pytest.mark.parametrize(
    ("name", "state"),
    [
        (EMBED, ("failed", "failed")),
        (EMBED, ("activating", "auto-restart")),
        (EMBED, ("inactive", "dead")),
        (CHAT, ("activating", "start-pre")),
    ],
)
def test_start_does_not_wait_for_itself_or_for_idle_releases(turns, name, state):
    turns.systemd.states = [state]
    turns.wait(name)
    assert turns.reports == []


def test_wait_for_another_start_has_a_time_limit(turns):
    turns.systemd.states = [("activating", "start")]
    start_s = turns.wait(EMBED).timeouts.start_s
    assert (
        turns.reports[-1]
        == f"phase=turn starting now, because {CHAT} did not finish starting within the time limit"
    )
    assert start_s < turns.clock.seconds < start_s + 5


@dataclass
class Waiting:
    meminfo: Path
    containers: list[str] = field(default_factory=list)
    other_containers: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    removed_after: int = 0
    freed_after: int = 0

    def set_available(self, gib):
        self.meminfo.write_text(f"MemTotal: {119 << 20} kB\nMemAvailable: {gib << 20} kB\n")

    def report(self, text):
        self.reports.append(text)
        if len(self.reports) == self.removed_after:
            self.containers.clear()
        if len(self.reports) == self.freed_after:
            self.set_available(100)

    def wait(self, wait_s=30.0):
        plan = {"needed_bytes": 80 * GIB, "wait_s": wait_s, "floor_bytes": 4 * GIB}
        release = read(Release, release_data(memory=plan))
        memory.wait_for_memory(release, self.report, poll_s=0.01)

    def list_containers(self, path, _):
        [label] = json.loads(parse_qs(urlsplit(path).query)["filters"][0])["label"]
        by_label = {
            "spark.service=main": self.containers, "spark.service=embed": self.other_containers
        }  # fmt: skip
        return [{"Names": [f"/{name}"]} for name in by_label[label]]


@pytest.fixture
def waiting(monkeypatch):
    # tmp_path is too long for the name of a socket.
    root = Path(tempfile.mkdtemp(prefix="spark-memory-"))
    waiting = Waiting(root / "meminfo")
    monkeypatch.setenv("SPARK_MEMINFO", str(waiting.meminfo))
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(root / "docker.sock"))
    with json_server(root / "docker.sock", waiting.list_containers):
        yield waiting
    shutil.rmtree(root)


MEMORY, CONTAINER = "20.0 GiB available, 80.0 GiB needed", "spark-main-x still exists"


@pytest.mark.parametrize(
    ("available_gib", "containers", "changes", "obstacles"),
    [
        (80, [], {}, []),
        (20, [], {"freed_after": 3}, [MEMORY] * 3),
        (100, ["spark-main-x"], {"removed_after": 3}, [CONTAINER] * 3),
        (
            20, ["spark-main-x"], {"removed_after": 2, "freed_after": 4},
            [CONTAINER, CONTAINER, MEMORY, MEMORY],
        ),
        (100, [], {"other_containers": ["spark-embed-x"]}, []),
    ],
    ids=["enough", "memory", "container", "memory after the container", "other service"],
)  # fmt: skip
def test_start_waits_for_old_containers_and_free_memory(
    waiting, available_gib, containers, changes, obstacles
):
    waiting.set_available(available_gib)
    waiting.containers = containers
    for name, value in changes.items():
        setattr(waiting, name, value)
    waiting.wait()
    assert len(waiting.reports) == len(obstacles)
    assert all(text in line for text, line in zip(obstacles, waiting.reports, strict=True))


@pytest.mark.parametrize(
    ("containers", "obstacle", "fix"),
    [
        ([], MEMORY, "stop the largest processes: "),
        (["spark-main-x"], CONTAINER, "run `docker rm -f spark-main-x"),
    ],
)
def test_start_timeout_error_names_the_obstacle(waiting, containers, obstacle, fix):
    waiting.set_available(20)
    waiting.containers = containers
    with pytest.raises(HostToolError, match=rf"{obstacle} after [0-9]+ s; fix: {fix}"):
        waiting.wait(wait_s=0.1)


def test_memory_reserved_for_kexec_does_not_count_as_available(waiting):
    waiting.meminfo.write_text(
        "MemTotal: 125000000 kB\nMemAvailable: 90000000 kB\nCmaTotal: 0 kB\nCmaFree: 9000000 kB\n"
    )
    assert memory.available_bytes() == 81000000 * 1024
