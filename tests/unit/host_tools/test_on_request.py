import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
from gateway_client import CHAT
from on_request_host import GIB, add_service, add_services, on_request_host
from simulated_host import Killed
from spark_contract.records import Stopped
from spark_host import relay
from spark_host.engine import on_request
from spark_host.engine.client import Engine
from spark_host.engine.on_request import Limits, Switch
from spark_host.gateway import gateway
from spark_host.records import boot
from spark_host.system.host import load_gateway, write_document
from stub_host import wait_until

LONG = "Repeat exactly: " + "abcd" * 60


@pytest.fixture
def start(js_host, monkeypatch):
    return lambda **limits: on_request_host(js_host, monkeypatch, **limits)


def change_settings(host, service, target=None, /, **changes):
    document = replace(load_gateway(service, host.here.paths), **changes)
    write_document(host.here.paths.gateway_settings(target or service), document)


def test_first_request_starts_the_service_and_is_answered(start):
    with start() as host:
        assert host.states() == {"main-model": "ready", "alias": "ready",
                                 "model-1": "stopped", "model-2": "stopped"}  # fmt: skip
        assert host.units.starts == []
        status, text = host.chat("model-1")
        assert (status, "42" in text) == (200, True)
        assert host.states()["model-1"] == "ready"
        assert host.chat("model-1")[0] == 200
        assert host.units.starts == ["first"]
        assert host.client.status("/v1/models/model-2") == 200
        assert host.client.status(CHAT, {"model": "model-2"}, key=None) == 401
        assert host.running() == {"first"}


def test_other_model_starts_after_in_flight_requests_finish(start):
    with start() as host, ThreadPoolExecutor() as pool:
        assert host.chat("model-1")[0] == 200
        long = pool.submit(host.chat, "model-1", LONG)
        engine = Engine(host.here.paths.engine_socket("first"))
        wait_until(lambda: engine.metrics().running == 1, "the engine works")
        other = pool.submit(host.chat, "model-2")
        assert (other.result()[0], long.result()[0]) == (200, 200)
        assert "abcd" * 60 in long.result()[1]
        assert host.running() == {"second"}
        assert host.states()["model-1"] == "stopped"
        assert host.here.disk.read(Stopped, host.here.paths.stopped("first")).on_request


def test_relay_of_replaced_tools_ends_once_no_request_is_in_flight(start):
    with start() as host, ThreadPoolExecutor() as pool:
        tools = host.here.paths.tools
        answer = pool.submit(host.chat, "model-1", LONG)
        wait_until(lambda: host.relay.services["first"].waiting == 1, "it waits")
        (tools / "0123456789ab").mkdir(parents=True)
        (tools / "current").symlink_to("0123456789ab")
        assert (answer.result()[0], "abcd" * 60 in answer.result()[1]) == (200, True)
        wait_until(lambda: not host.thread.is_alive(), "systemd can start the new tools")


def test_streaming_request_gets_sse_comments_while_the_model_starts(start):
    with start() as host:
        host.units.load_s = 1.0
        status, text = host.chat("model-1", LONG, stream=True)
        first, *_ = text.split("\n\n")
        assert (status, first.startswith(":")) == (200, True)
        assert text.count(": waiting") >= 2
        assert text.rstrip().endswith("data: [DONE]")
        assert "event: error" not in text


def test_failed_start_returns_to_the_previous_model(start):
    with start() as host, ThreadPoolExecutor() as pool:
        assert host.chat("model-1")[0] == 200
        host.units.broken.add("second")
        stream = pool.submit(host.chat, "model-2", stream=True)
        with host.client.send(CHAT, {"model": "model-2"}) as answer:
            assert answer.status == 503
            assert 1 < int(answer.headers["Retry-After"]) <= 60
        event = stream.result()[1].rstrip().split("\n\n")[-1].split("\n")
        assert event[0] == "event: error"
        assert json.loads(event[1].removeprefix("data: "))["error"]["code"] == 503
        assert host.running() == {"first"}
        assert host.chat("model-1")[0] == 200
        assert host.chat("model-2")[0] == 503
        assert host.units.starts == ["first", "second", "first"]


def test_waiting_requests_fail_after_their_time_limit(start):
    with start(wait_s=0.5, stream_wait_s=0.5) as host:
        host.units.load_s = 3.0
        host.relay.switch.took_s["first"] = 20.0
        with host.client.send(CHAT, {"model": "model-1"}) as answer:
            assert (answer.status, 10 < int(answer.headers["Retry-After"]) <= 20) == (503, True)
        assert "event: error" in host.chat("model-1", stream=True)[1]
        assert host.states()["model-1"] in ("loading", "stopped")
        wait_until(lambda: host.running() == {"first"}, "the start continues")


def test_model_serves_for_a_minimum_time_before_it_is_replaced(start):
    with start(serve_s=2.0) as host, ThreadPoolExecutor() as pool:
        assert host.chat("model-1")[0] == 200
        began = time.time()
        clients = [
            pool.submit(lambda name: [host.chat(name)[0] for _ in range(5)], name)
            for name in ("model-1", "model-2")
        ]
        assert [client.result() for client in clients] == [[200] * 5] * 2
        assert host.units.starts in (["first", "second"], ["first", "second", "first"])
        assert time.time() - began >= 1.5


def test_model_is_replaced_even_if_the_clock_went_back(start):
    with start(wait_s=5.0) as host:
        assert host.chat("model-1")[0] == 200
        in_an_hour = time.time() + 3600
        os.utime(host.here.paths.traffic("first"), (in_an_hour, in_an_hour))
        assert host.chat("model-2")[0] == 200


def send_and_leave(host, body, until):
    text = json.dumps(body)
    with socket.create_connection(("127.0.0.1", host.client.settings.port)) as client:
        client.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {host.client.key}\r\n"
            f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        wait_until(until, "the request arrived")


def test_disconnected_client_starts_no_service(start):
    with start(serve_s=1.5) as host:
        assert host.chat("model-1")[0] == 200
        second = host.relay.services["second"]
        send_and_leave(host, {"model": "model-2"}, lambda: second.waiting == 1)
        wait_until(lambda: second.waiting == 0, "the relay notices")
        time.sleep(2)
        assert host.units.starts == ["first"]
        assert gateway.is_open("first", host.here.paths)


def test_response_ends_if_its_client_disconnects(start):
    with start() as host:
        engine = Engine(host.here.paths.engine_socket("first"))
        messages = [{"role": "user", "content": LONG * 4}]

        def works():  # the relay forgets a request once the engine has it
            return host.running() and engine.metrics().running == 1 and host.relay._bytes == 0

        send_and_leave(host, {"model": "model-1", "stream": True, "messages": messages}, works)
        wait_until(lambda: engine.metrics().unfinished == 0, "the engine is idle", seconds=15)


def test_large_streaming_request_is_answered_without_being_parsed(start, monkeypatch):
    monkeypatch.setattr(relay, "_MAX_PARSED_BYTES", 1000)
    with start() as host:
        host.units.load_s = 1.0
        status, text = host.chat("model-1", "What is 12 + 30?".ljust(2000), stream=True)
        assert (status, text.rstrip().endswith("data: [DONE]")) == (200, True)
        assert ": waiting" not in text


@pytest.mark.parametrize(("limit", "value"), [("_MAX_REQUESTS", 1), ("_MAX_WAITING_BYTES", 100)])
def test_too_many_requests_are_rejected(start, monkeypatch, limit, value):
    with start() as host, ThreadPoolExecutor() as pool:
        host.units.load_s = 2.0
        waiting = pool.submit(host.chat, "model-1")
        wait_until(lambda: host.relay.services["first"].waiting == 1, "it waits")
        monkeypatch.setattr(relay, limit, value)
        with host.client.send(CHAT, {"model": "model-1"}) as answer:
            assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (503, True)
        assert waiting.result()[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_request_fails_if_the_engine_replaces_its_socket(start, stream, monkeypatch):
    open_traffic = gateway.open_traffic
    with start() as host:
        address = host.here.paths.engine_socket("first")

        def replace_socket(release, paths):
            address.unlink()
            address.symlink_to("/nowhere")
            open_traffic(release, paths)

        monkeypatch.setattr(gateway, "open_traffic", replace_socket)
        status, text = host.chat("model-1", stream=stream)
        assert (status, '"code": 503' in text) == (200 if stream else 503, True)


def test_service_with_a_missing_account_does_not_stop_other_services(start, monkeypatch):
    with start() as host:
        logged = []
        monkeypatch.setattr(relay, "log", logged.append)
        more = {"service": "third", "user": "nobody-here", "on_request": {"third": 0}}
        change_settings(host, "first", "third", **more)
        wait_until(lambda: any("nobody-here" in text for text in logged), "it is reported")
        assert host.chat("model-1")[0] == 200


def test_models_of_a_service_are_listed_over_its_socket(start):
    with start() as host:
        waiting = Engine(host.here.paths.waiting_socket("first"))
        assert waiting.get("/v1/models/model-1").json()["state"] == "stopped"
        assert waiting.get("/v1/models/model-2").status == 404


def test_unresponsive_engine_does_not_count_as_idle(start):
    with start() as host:
        used = host.here.paths.last_use("first")
        # A round notes a use if the counters changed since the last round.
        wait_until(lambda: host.chat("model-1")[0] == 200 and used.exists(), "use is noted")
        host.units.running[host.release("first").serve_unit].kill()
        os.utime(used, (0, 0))
        wait_until(lambda: used.stat().st_mtime > 0, "it counts as in use")


def test_manual_stop_during_an_idle_stop_stays_in_effect(host, monkeypatch):
    _, here = add_services(host, monkeypatch)
    boot.allow_start("first", here)
    write, by_hand = here.disk.write, []

    def write_late(path, marker):
        if marker.on_request:
            by_hand.append(pool.submit(boot.stop_service, "first", "owner", here))
            time.sleep(0.3)
        write(path, marker)

    monkeypatch.setattr(here.disk, "write", write_late)
    with ThreadPoolExecutor() as pool:
        boot.stop_until_request(here.release("first-0123456789ab"), here)
    assert by_hand[0].result() == 0
    assert boot.is_stopped("first", here)


def test_rejected_request_ends_the_stream_with_the_reason(start):
    with start() as host:
        text = host.client.ask("/v1/embeddings", {"stream": True})[1].decode()
        event = text.rstrip().split("\n\n")[-1].split("\n")
        assert event[0] == "event: error"
        assert json.loads(event[1].removeprefix("data: "))["error"]["code"] == 503


def test_on_request_service_stops_after_the_idle_limit(start):
    with start() as host:
        change_settings(host, "first", on_request={"first": 1})
        assert host.chat("model-1", LONG)[0] == 200
        wait_until(lambda: host.running() == set(), "it stops", seconds=5)
        assert host.states()["model-1"] == "stopped"
        assert host.chat("model-1")[0] == 200


def test_manually_stopped_service_is_not_started(start):
    with start() as host:
        write_document(host.here.paths.stopped("first"), Stopped(None, "now", "owner"))
        assert host.chat("model-1")[0] == 503
        assert host.units.starts == []


def test_request_reopens_a_service_closed_by_a_killed_relay(start):
    with start() as host:
        assert host.chat("model-1")[0] == 200
        gateway.close_traffic("first", host.here.paths)
        assert host.chat("model-1")[0] == 200
        assert host.units.starts == ["first"]


def test_longest_idle_service_is_stopped_to_free_memory(start):
    with start() as host:
        add_service(host.client.host, "third", needed_gib=20)
        for name in ("first", "third"):
            boot.allow_start(name, host.here)
            host.units.start(host.release(name).serve_unit, 0)
        now = time.time()
        for name, age_s in (("first", 20), ("third", 10)):
            used, opened = host.here.paths.last_use(name), host.here.paths.traffic(name)
            used.touch()
            os.utime(opened, (now - 100, now - 100))
            os.utime(used, (now - age_s, now - age_s))

        def stopped(name, available_gib):
            others = on_request.releases_to_stop(host.release(name), host.here, available_gib * GIB)
            return [other.service for other in others]

        assert stopped("second", 20) == ["first"]
        os.utime(host.here.paths.last_use("third"), (now - 30, now - 30))
        assert stopped("second", 20) == ["third", "first"]
        assert stopped("first", 100) == []
        assert stopped("first", 50) == ["third"]


def test_always_running_release_takes_memory_from_on_request_services(start):
    with start() as host:
        assert host.chat("model-1")[0] == 200
        main = host.client.host.release("main-0123456789ab", memory__needed_bytes=50 * GIB)
        on_request.free_memory(main, host.here, print)
        assert host.running() == set()
        assert host.here.disk.read(Stopped, host.here.paths.stopped("first")).on_request


@pytest.mark.slow
@pytest.mark.parametrize("event", ["kill", "power cut"])
def test_process_killed_at_any_step_leaves_services_startable(host, monkeypatch, event):
    units, here = add_services(host, monkeypatch)
    units.load_s = 0
    switch = Switch(here, Limits(serve_s=0, drain_s=0))
    steps = [(gateway, "close_traffic"), (here.disk, "write"), (here.disk, "remove"),
             (units, "stop"), (units, "start")]  # fmt: skip
    killed = 0

    def change_to(service):
        switch.took_s.clear()
        return switch.start(service, lambda: True)

    for number in range(20):
        assert change_to("first")
        calls = count()

        def may_die(call, *words, calls=calls, number=number):
            if next(calls) == number:
                raise Killed
            return call(*words)

        with monkeypatch.context() as patch:
            for owner, name in steps:
                patch.setattr(owner, name, partial(may_die, getattr(owner, name)))
            try:
                assert change_to("second")
                break
            except Killed:
                killed += 1
        if event == "power cut":
            boot_again(units, here)
        for service in ("first", "second", "first"):
            assert change_to(service)
            assert gateway.is_open(service, here.paths)
    assert killed >= len(steps)


def boot_again(units, here):
    for unit in list(units.running):
        units.stop(unit, 0)
    for name in here.disk.release_names(here.paths):
        release = here.release(name)
        if (
            boot.enabled_releases(release.service, here)
            and boot.reason_not_to_start(release, here) is None
        ):
            units.start(release.serve_unit, 0)


def test_main_gateway_settings_enable_and_disable_the_on_request_unit(start, systemctl_calls):
    with start() as host:
        unit, link = "spark-on-request.service", host.here.paths.boot_links
        gateway.reload("main", host.here.paths)
        assert systemctl_calls == [("enable", "--now", unit)]
        (link / unit).symlink_to("/nowhere")
        gateway.reload("main", host.here.paths)
        change_settings(host, "main", on_request=None)
        gateway.reload("main", host.here.paths)
        assert systemctl_calls[1:] == [("disable", "--now", unit)]
