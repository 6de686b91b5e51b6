import errno
import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from socket_servers import listening
from spark_contract import files
from spark_host.engine import container
from spark_host.engine.client import Engine, EngineError, Metrics
from spark_host.gateway import gateway
from spark_host.system import docker
from spark_host.system.host import read_events
from spark_host.watch import sensors, watchdog
from spark_host.watch.sensors import GpuAlarms, Reading
from spark_host.watch.watchdog import StallDetector
from stub_host import RELEASE, fail_without_space, write_program

UNIT = f"spark-serve@{RELEASE}.service"
STALL_S = 120
KILL_UNIT = ("kill", "--signal=KILL", UNIT)


@pytest.fixture
def detector(host):
    watch = {"stall_s": STALL_S, "interval_s": 10, "hot_celsius": None}
    return StallDetector(host.release(watch=watch).watch)


def sample(*, running=1, prompt=0, generated=0, usage=0.1):
    return Metrics.parse(
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
    )


def test_engine_without_progress_counts_as_stalled_after_the_limit(detector):
    reasons = [detector.add_metrics(sample(usage=0.4), now_s=i * 10.0) for i in range(13)]
    assert reasons[:12] == [None] * 12
    assert (
        reasons[12]
        == "1 requests are running, but no token has been processed or generated for 120 s"
    )


@pytest.mark.parametrize(
    "values",
    [
        [{"prompt": i} for i in range(60)],
        [{"generated": i} for i in range(60)],
        [{"usage": 0.1 + i / 1000} for i in range(60)],  # a chunked prefill
        [{"running": 0}] * 60,
    ],
    ids=["prompt tokens", "generated tokens", "cache usage", "idle"],
)
def test_working_or_idle_engine_does_not_count_as_stalled(detector, values):
    for i, metrics in enumerate(values):
        assert detector.add_metrics(sample(**metrics), now_s=i * 10.0) is None


def test_response_restarts_the_stall_timeout(detector):
    for i in range(60):
        assert detector.add_timeout(now_s=i * 100.0) is None
        detector.reset_timeouts()


def test_delay_of_the_watchdog_does_not_count_as_an_engine_stall(detector):
    assert detector.add_timeout(now_s=0) is None
    assert detector.add_timeout(now_s=10_000) is None
    assert detector.add_timeout(now_s=10_010) is not None


class EndLoopError(Exception):
    """Ends the loop of a watchdog."""


@pytest.fixture
def kills(host, monkeypatch):
    reasons: list[tuple[str, str]] = []

    def kill_engine(release, kind, reason, *_):
        reasons.append((kind, reason))
        raise EndLoopError

    monkeypatch.setattr(watchdog, "kill_engine", kill_engine)
    monkeypatch.setattr(watchdog, "_METRICS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(watchdog, "_update_gateway", lambda *_: None)
    monkeypatch.setattr(sensors, "read", lambda: None)
    return reasons


def run_watchdog(host, monkeypatch, max_samples=100):
    samples = 0

    def available_bytes():
        nonlocal samples
        if samples == max_samples:
            raise EndLoopError
        samples += 1
        return 1 << 40

    monkeypatch.setattr(watchdog, "available_bytes", available_bytes)
    with pytest.raises(EndLoopError):
        watchdog.run(RELEASE, host.paths)
    return samples


@pytest.fixture
def listener(host):
    with listening(host.paths.engine_socket(host.release().service)) as socket:
        yield socket


@pytest.mark.parametrize("is_queue_full", [False, True])
def test_silent_engine_counts_as_stalled_after_the_limit(
    host, listener, kills, monkeypatch, is_queue_full
):
    with socket.socket(socket.AF_UNIX) as waiting:
        if is_queue_full:
            listener.listen(0)
            waiting.connect(listener.getsockname())
        assert run_watchdog(host, monkeypatch) >= 3
    [(kind, reason)] = kills
    assert kind == "stalled"
    seconds = re.fullmatch(r"the engine is listening, but has not responded for (\d+) s", reason)
    assert seconds
    assert int(seconds[1]) >= host.release().watch.stall_s


def test_watchdog_leaves_a_missing_engine_to_systemd(host, kills, monkeypatch):
    host.release(watch={"stall_s": 0, "interval_s": 0.001, "hot_celsius": None})
    run_watchdog(host, monkeypatch, max_samples=50)
    assert kills == []


@pytest.fixture
def engine():
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture(autouse=True)
def kill_units_at_once(monkeypatch):
    monkeypatch.setattr(watchdog, "_UNIT_STOP_TIMEOUT_S", 0.0)


def test_engine_and_its_unit_are_killed_through_a_pidfd_without_docker(
    host, engine, systemctl_calls, monkeypatch
):
    monkeypatch.delattr(docker, "client")
    pidfd = os.pidfd_open(engine.pid)
    watchdog.kill_engine(host.release(), "starving", "too little", pidfd, host.paths)
    assert engine.wait(5) == -9
    assert systemctl_calls == [KILL_UNIT]
    events = read_events("main", host.paths)
    assert [event.kind for event in events] == ["starving", "kill"]
    assert events[0].text == "too little; killing the engine"


def test_killing_an_exited_engine_is_not_an_error():
    child = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(child.pid)
    child.wait()
    assert container.kill_container("spark-x", pidfd) == ""


def test_hanging_docker_does_not_stop_the_watchdog(host, systemctl_calls, monkeypatch):
    program = write_program(host.paths.root / "bin/docker", "exec sleep 30")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    client = docker.client
    monkeypatch.setattr(docker, "client", lambda *words, timeout_s: client(*words, timeout_s=0.3))

    watchdog.kill_engine(host.release(), "stalled", "nothing moves", None, host.paths)

    assert systemctl_calls == [KILL_UNIT]
    assert "docker kill: did not exit within" in read_events("main", host.paths)[-1].text


@pytest.mark.usefixtures("systemctl_calls")
@pytest.mark.parametrize("disk", ["full", "hanging"])
def test_watchdog_kills_the_engine_even_if_the_event_is_not_recorded(
    host, engine, monkeypatch, capfd, disk
):
    recovered = threading.Event()

    def write(path, text, mode=420):
        if disk == "hanging":
            recovered.wait(10)
        fail_without_space(path)

    monkeypatch.setattr(files, "write_text", write)
    monkeypatch.setattr(watchdog, "_EVENT_WAIT_S", 0.1)
    kill = (host.release(), "starving", "too little", os.pidfd_open(engine.pid), host.paths)
    before = set(threading.enumerate())
    threading.Thread(target=watchdog.kill_engine, args=kill).start()
    try:
        assert engine.wait(5) == -9
    finally:
        recovered.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
    output = capfd.readouterr().out
    assert "starving: too little; killing the engine" in output
    assert "cannot write the event: " in output


def test_hanging_disk_does_not_keep_the_unit_alive(host, systemctl_calls, monkeypatch):
    recovered = threading.Event()
    monkeypatch.setattr(files, "write_text", lambda *_: recovered.wait(30))
    monkeypatch.setattr(watchdog, "_EVENT_WAIT_S", 0.1)
    failure = subprocess.CompletedProcess((), 1, "", "cannot connect")
    monkeypatch.setattr(docker, "client", lambda *words, **_: failure)
    kill = (host.release(), "starving", "too little", None, host.paths)
    before = set(threading.enumerate())
    thread = threading.Thread(target=watchdog.kill_engine, args=kill)
    thread.start()
    try:
        thread.join(5)
        assert systemctl_calls == [KILL_UNIT]
    finally:
        recovered.set()
        for other in set(threading.enumerate()) - before:
            other.join(10)


@pytest.mark.parametrize(
    ("reason", "resets"), [("a member left", [("reset-failed", UNIT)]), ("too little memory", [])]
)
def test_start_limit_is_reset_only_after_a_lost_cluster_member(
    host, kills, systemctl_calls, monkeypatch, reason, resets
):
    host.release()
    low = reason if not resets else None
    monkeypatch.setattr(watchdog.MemoryFloor, "check", lambda *_: low)
    monkeypatch.setattr(
        watchdog.ClusterWatch, "__init__", lambda self, *_: setattr(self, "problem", reason)
    )
    monkeypatch.setattr(watchdog.ClusterWatch, "begin", lambda *_: None)
    run_watchdog(host, monkeypatch)
    assert [text for _, text in kills] == [reason]
    assert systemctl_calls == resets


def test_hanging_driver_and_gateway_error_do_not_delay_memory_samples(host, monkeypatch):
    host.release(watch={"stall_s": 100, "interval_s": 0.01, "hot_celsius": None})
    driver_answers, follows = threading.Event(), threading.Event()

    def metrics(self, timeout_s=10):
        raise EngineError("HTTP 500")

    def follow(*_):
        follows.set()
        raise FileNotFoundError(errno.ENOENT, "No such file", "/proc/1234/fd")

    monkeypatch.setattr(Engine, "metrics", metrics)
    monkeypatch.setattr(sensors, "read", lambda: driver_answers.wait(60) and None)
    start = time.monotonic()
    try:
        run_watchdog(host, monkeypatch, max_samples=20)
        assert time.monotonic() - start < 30
    finally:
        driver_answers.set()

    monkeypatch.setattr(sensors, "read", lambda: None)
    monkeypatch.setattr(gateway, "apply_address_change", follow)
    run_watchdog(host, monkeypatch, max_samples=20)
    assert follows.is_set()
    assert "/proc/1234/fd" in read_events("main", host.paths)[-1].text


def test_pidfd_is_opened_only_for_the_engine_container(engine, monkeypatch):
    group = Path(f"/proc/{engine.pid}/cgroup").read_text().splitlines()[-1]
    state = {"Id": group, "State": {"Pid": engine.pid}}
    monkeypatch.setattr(docker, "inspect_container", lambda name, limit_s: state)
    pidfd = container.open_process("spark-x")
    assert pidfd is not None
    os.close(pidfd)
    state["Id"] = "f" * 64
    assert container.open_process("spark-x") is None
    state["State"] = {"Pid": 0}
    assert container.open_process("spark-x") is None
    monkeypatch.setattr(docker, "inspect_container", lambda name, limit_s: None)
    assert container.open_process("spark-x") is None


@pytest.fixture
def alarms(host):
    watch = {"stall_s": 1, "interval_s": 0.1, "hot_celsius": 90}
    return GpuAlarms(host.release(watch=watch).watch)


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("67, 2418, 16.42, 0\n", Reading(67, 2418, 16.42, 0)),
        ("67, 2418, [N/A], [N/A]\n", Reading(67, 2418, None, None)),
        ("[N/A], [Unknown Error], [N/A], 3\n", Reading(None, None, None, 3)),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_sensor_values_are_parsed_as_numbers_or_none(text, reading):
    assert sensors.parse(text) == reading


def test_sensors_give_no_sample_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert sensors.read() is None


def test_temperature_fluctuating_around_the_limit_causes_only_two_events(alarms):
    events = []
    for celsius in (85, 91, 93, 89, 91, 84):
        events += alarms.events(Reading(celsius, 2400, None, None))
    assert [kind for kind, _ in events] == ["hot", "cooled"]
    assert "the GPU is at 91 °C (limit 90 °C), clock 2400 MHz" in events[0][1]


def test_low_power_at_high_load_records_one_event(alarms):
    events = [alarms.events(Reading(55, 850, 22.0, 99)) for _ in range(4)]
    assert [[kind for kind, _ in sample] for sample in events] == [[], [], ["power"], []]
    recovered = alarms.events(Reading(61, 2400, 70.0, 95))
    assert "are back to normal" in recovered[0][1]


@pytest.mark.parametrize(
    "reading",
    [
        Reading(40, 208, 4.2, 0),
        Reading(80, 2100, 50.0, 99),
        Reading(55, None, 22.0, 99),
        Reading(None, 850, None, 99),
        None,
    ],
)
def test_idle_or_incomplete_samples_record_no_event(alarms, reading):
    assert [event for _ in range(5) for event in alarms.events(reading)] == []
