import copy
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from spark_deploy.hosts import status
from spark_deploy.hosts.gateway import GatewayCertificate, RejectedCalendar, TailnetAddress, Timers
from spark_deploy.hosts.payload import PythonSite, QuantizerSite, Site
from spark_deploy.hosts.status import Jobs, JobStates, RequestCounts, Requests, Status
from tests.unit.shell import run_script
from tests.unit.statuses import host_status

RELEASE = "main-0123456789ab"
TARGET = "spark-prepare@main-a.target"
LINKED = ["[]", f"linked {TARGET}", "pulled 0123456789ab"]


@pytest.mark.parametrize(
    ("fact", "output", "value"),
    [
        (JobStates, LINKED, Jobs({}, (TARGET,), ("0123456789ab",), False)),
        (JobStates, [*LINKED, "sharing now"], Jobs({}, (TARGET,), ("0123456789ab",), True)),
        (PythonSite, ["3.12 aarch64", "/opt/site-a", "ab", "/opt/c", "/t"],
         Site("3.12", "aarch64", "/opt/site-a", "ab", "/opt/c", "/t")),
        (PythonSite, ["3.11 x86_64", "-", "-", "-", "-"], Site("3.11", "x86_64")),
        (PythonSite, ["-", "-", "-", "-", "-"], Site()),
        (PythonSite, [], Site()),
        (QuantizerSite, ["3.12 aarch64", "-", "ab"], Site("3.12", "aarch64", receipt="ab")),
        (QuantizerSite, ["3.11 x86_64", "-", "-"], Site("3.11", "x86_64")),
        (QuantizerSite, ["-", "-", "ab"], Site()),
        (QuantizerSite, [], Site()),
        (GatewayCertificate, ["-----BEGIN C", "x", "== key", "-----BEGIN P", "y"],
         (b"-----BEGIN C\nx", b"-----BEGIN P\ny")),
        (GatewayCertificate, ["== key"], (b"", b"")),
        (TailnetAddress, ["100.101.102.103"], "100.101.102.103"),
        (TailnetAddress, [], ""),
        (RejectedCalendar, [], ""),
        (Timers, ["a.timer active enabled", "b.timer inactive disabled", "x failed y"],
         {"a.timer": True, "b.timer": False, "x": False}),
    ],
)  # fmt: skip
def test_facts_parse_recorded_tool_output(fact, output, value):
    assert fact().process(output) == value


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0
vllm:num_requests_swapped{engine="0",model_name="m"} x
"""


class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *words):
        """Log nothing: a client of a Unix socket has no address."""


@pytest.fixture
def engine_socket(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "engine_dir", lambda name: str(tmp_path / name))
    (tmp_path / "main").mkdir()
    path = str(tmp_path / "main/engine.sock")
    with socketserver.ThreadingUnixStreamServer(path, Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def test_counts_requests_through_engine_sockets(engine_socket):
    script = Requests().command(("main", "silent", "odd'; exit 3; '"))
    assert Requests().process(run_script(script)) == {"main": RequestCounts(running=3, waiting=4)}


PROVEN: dict[str, Any] = {
    "services": {
        "main": {
            "known_good": RELEASE, "active": RELEASE, "enabled": [RELEASE],
            "traffic_open": True,
            "gateway": {"active": "active"},
        }
    },
    "releases": [{"name": RELEASE}],
    "live": {"ok": True, "release": RELEASE, "seconds": 0.2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("services", "main", "active"), "main-other", "serves main-other"),
        (("services", "main", "active"), None, "serves nothing"),
        (("services", "main", "known_good"), None, "check has not passed"),
        (("services", "main", "enabled"), [], "starts nothing at boot"),
        (("services", "main", "enabled"), [RELEASE, "main-b"], "starts main-0123456789ab, m"),
        (("releases", 0, "unproven"), "never checked", "proof: never checked"),
        (("releases",), [], "proof: none"),
        (("services", "main", "traffic_open"), False, "gateway is closed"),
        (("services", "main", "gateway"), {"active": "failed"}, "gateway is not running"),
        (("services", "main", "gateway"), {"active": "active", "difference": "listens on 0.0.0.0"},
         "the gateway: listens on 0.0.0.0"),
        (("live",), {"ok": False, "release": RELEASE, "detail": "timed out"},
         "no answer: timed out"),
        (("live", "release"), "main-other", "no answer"),
        (("live",), None, "no answer"),
    ],
)  # fmt: skip
def test_release_is_unproven_without_complete_evidence(path, value, reason):
    assert host_status(PROVEN).unproven_reason("main", RELEASE) == ""
    document = copy.deepcopy(PROVEN)
    node: Any = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert reason in host_status(document).unproven_reason("main", RELEASE)


def test_release_is_unproven_if_host_tools_are_missing_or_different():
    assert "tools" in Status().process([]).unproven_reason("main", RELEASE)
    other = Status().process(['{"schema_version": 2, "colour": "red"}'])
    assert other.installed
    assert "a different version (colour: unknown)" in other.unproven_reason("main", RELEASE)
