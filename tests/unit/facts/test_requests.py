"""Requests of each service are counted as its engine tells them; one that is silent is left out."""

from __future__ import annotations

import socketserver
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from spark_deploy.hosts import status
from spark_deploy.hosts.status import Count, Requests

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
    """An engine of which nothing is there but its counters."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *words: object) -> None:
        """A client on a socket of a folder has no address to log."""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(status, "engine_dir", lambda name: str(tmp_path / name))
    (tmp_path / "main").mkdir()
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "main/engine.sock"), Engine) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield tmp_path
        one.shutdown()


def test_engines_are_asked_by_their_sockets(engines: Path) -> None:
    fact = Requests()
    script = fact.command(("main", "silent", "odd'; exit 3; '"))
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert fact.process(done.stdout.splitlines()) == {"main": Count(running=3, waiting=4)}
