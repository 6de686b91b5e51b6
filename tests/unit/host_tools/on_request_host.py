"""A gateway, a relay and stub engines of two services that do not fit into memory together."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gateway_client import CHAT, GatewayClient, running_gateway
from spark_contract.documents import to_json
from spark_contract.records import KnownGoodReleases
from spark_contract.release import Release
from spark_contract.tool import HostToolError
from spark_contract.units import SERVE
from spark_host import relay
from spark_host.engine.on_request import Limits
from spark_host.gateway import gateway
from spark_host.records import boot
from spark_host.relay import Relay
from spark_host.system.host import Host as SystemHost
from spark_host.system.host import write_document
from stub_host import Host, answers, release_data, wait_until

GIB = 1 << 30
NAMES = {
    "main": ["main-model", "alias"],
    "first": ["model-1"],
    "second": ["model-2"],
    "third": ["model-3"],
}
DIGEST = "0123456789ab"


@dataclass
class EngineUnits:
    """systemd with stub engines: a start waits until the engine answers."""

    host: Host
    load_s: float = 0.2
    broken: set[str] = field(default_factory=set)
    running: dict[str, Any] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)
    starting: int = 0

    def start(self, unit: str, limit_s: float) -> None:
        release = self.host.here.release(SERVE.instance(unit))
        assert boot.reason_not_to_start(release, self.host.here) is None
        if unit in self.running:
            return
        self.starts.append(release.service)
        self.starting += 1
        assert self.starting == 1, "two engines start together"
        time.sleep(self.load_s)
        self.starting -= 1
        if release.service in self.broken:
            raise HostToolError(unit, "the check failed", "read the journal")
        memory = [self.host.here.release(SERVE.instance(other)).memory for other in self.running]
        assert sum(item.needed_bytes for item in (*memory, release.memory)) < 100 * GIB
        engine = self.host.start(release, STUB_LOAD_S="0", STUB_PIECE_S="0.05")
        wait_until(lambda: answers(engine), "the stub engine listens")
        self.running[unit] = self.host.engines[-1]
        gateway.open_traffic(release, self.host.paths)

    def stop(self, unit: str, limit_s: float) -> None:
        process = self.running.pop(unit, None)
        if process:
            try:
                gateway.close_traffic(SERVE.instance(unit).rpartition("-")[0], self.host.paths)
            finally:  # systemd goes on if the process that requested the stop is killed
                process.kill()
                process.wait()

    def show(self, units: list[str], properties: object) -> dict[str, dict[str, str]]:
        states = {True: "active", False: "inactive"}
        return {unit: {"ActiveState": states[unit in self.running]} for unit in units}

    def is_active(self, unit: str) -> bool:
        return unit in self.running


@dataclass
class OnRequestHost:
    client: GatewayClient
    units: EngineUnits
    relay: Relay
    here: SystemHost
    thread: threading.Thread  # of the relay

    def chat(self, name: str, prompt: str = "What is 12 + 30?", **more: Any) -> tuple[int, str]:
        body = {"model": name, "messages": [{"role": "user", "content": prompt}], **more}
        status, text = self.client.ask(CHAT, body)
        return status, text.decode()

    def states(self) -> dict[str, str]:
        models = json.loads(self.client.ask("/v1/models")[1])["data"]
        return {model["id"]: model["state"] for model in models}

    def running(self) -> set[str]:
        return {SERVE.instance(unit).rpartition("-")[0] for unit in self.units.running}

    def release(self, service: str) -> Release:
        return self.here.release(f"{service}-{DIGEST}")


def add_service(host: Host, service: str, idle_stop_s: int = 0, needed_gib: int = 60) -> Release:
    """Add a proven release on request that is stopped."""
    document = replace(host.gateway(), service=service, on_request={service: idle_stop_s})
    host.paths.gateway_settings(service).write_text(to_json(document))
    argv = [*release_data()["engine"]["argv"]]
    at = argv.index("--served-model-name")
    argv[at + 1 : at + 3] = NAMES[service]
    release = host.release(
        f"{service}-{DIGEST}", service=service, names=NAMES[service], engine__argv=argv,
        memory__needed_bytes=needed_gib * GIB,
    )  # fmt: skip
    host.paths.boot_links.mkdir(parents=True, exist_ok=True)
    (host.paths.boot_links / release.serve_unit).symlink_to("/nowhere")
    write_document(host.paths.known_good(service), KnownGoodReleases(release.name))
    gateway.make_traffic_folder(service, host.paths)
    return release


def add_services(host: Host, monkeypatch: Any) -> tuple[EngineUnits, SystemHost]:
    meminfo = host.paths.root / "meminfo"
    meminfo.write_text(f"MemTotal: {100 << 20} kB\nMemAvailable: {100 << 20} kB\n")
    monkeypatch.setenv("SPARK_MEMINFO", str(meminfo))
    host.gateway()
    units = EngineUnits(host)
    here = SystemHost(host.paths, units=units)  # type: ignore[arg-type]
    for service in ("first", "second"):
        boot.stop_until_request(add_service(host, service), here)
    return units, here


@contextmanager
def on_request_host(host: Host, monkeypatch: Any, **limits: float) -> Iterator[OnRequestHost]:
    monkeypatch.setattr(relay, "_ROUND_INTERVAL_S", 0.1)
    monkeypatch.setattr(relay, "_RETRY_INTERVAL_S", 0.1)
    units, here = add_services(host, monkeypatch)
    usual = {"wait_s": 10, "comment_s": 0.2, "serve_s": 0, "back_off_s": 60} | limits
    process = Relay(here, Limits(**usual))
    loop = asyncio.new_event_loop()
    task = loop.create_task(process.run())

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        on_request = {"first": 0, "second": 0}
        names = {name: NAMES[name] for name in ("main", *on_request)}
        routes = {"/v1/embeddings": "first"}
        with running_gateway(
            host, names=names, routes=routes, on_request=on_request, max_body_bytes=1 << 20
        ) as c:
            wait_until(lambda: len(process.services) == 2, "the relay listens")
            yield OnRequestHost(c, units, process, here, thread)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
