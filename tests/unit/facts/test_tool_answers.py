"""Facts that read the output of our own tools and engines."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from spark_deploy.hosts import status
from spark_deploy.hosts.payload import PythonSite, QuantiserSite, Site
from spark_deploy.hosts.status import Count, JobStates, Requests
from tests.unit.shell import run_script


def test_links_of_the_boot_pulled_jobs_and_a_lending_host_are_told_apart() -> None:
    said = ["[]", "linked spark-prepare@main-a.target", "pulled 0123456789ab", "lends now"]
    found = JobStates().process(said)
    assert (found.linked, found.pulled, found.lends) == (
        ("spark-prepare@main-a.target",),
        ("0123456789ab",),
        True,
    )
    assert not JobStates().process(said[:3]).lends


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (
            ["3.12 aarch64", "/opt/site-a", "ab", "/opt/c", "/t"],
            Site("3.12", "aarch64", "/opt/site-a", "ab", "/opt/c", "/t"),
        ),
        (["3.11 x86_64", "-", "-", "-", "-"], Site("3.11", "x86_64", "", "", "", "")),
        (["-", "-", "-", "-", "-"], Site("", "", "", "", "", "")),
        ([], Site("", "", "", "", "", "")),
    ],
)
def test_python_packages_and_tools_are_told_in_one_answer(said: list[str], found: Site) -> None:
    assert PythonSite().process(said) == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (["3.12 aarch64", "-", "ab"], Site("3.12", "aarch64", receipt="ab")),
        (["3.11 x86_64", "-", "-"], Site("3.11", "x86_64")),
        (["-", "-", "ab"], Site()),
        ([], Site()),
    ],
)
def test_the_python_of_an_image_is_told_with_what_lies_beside_it(
    said: list[str], found: Site
) -> None:
    assert QuantiserSite().process(said) == found


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
    assert fact.process(run_script(script)) == {"main": Count(running=3, waiting=4)}
