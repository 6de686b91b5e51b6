import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builder_hub import REPOSITORY, Hub, fetch_order, send_and_crawl, send_half, send_head
from builder_trees import run_tool, tool_environment
from spark_checkpoint import TransferError
from spark_checkpoint.sources.client import _resolve_redirect

from tests.faults.sweep import Sweep, assert_all_passed

LARGE = "file-1.bin"
ABSENT = "http://127.0.0.1:9"
TEST = "tests/unit/checkpoint/test_hub_that_fails.py"
ABOUT = {"for good": "the hub fails every request", "once": "the hub fails a single request"}
COUNTED = (
    "The real fetcher against a hub on this machine, with two attempts and a time limit of a "
    "second. A failed fetch publishes no checkpoint. After the hub recovers, the next fetch "
    "finishes, and the checkpoint equals the repository byte for byte."
)
Response = Callable[[Any, bytes], object]


def close(handler, data):
    handler.close_connection = True


def status(code, **headers):
    return lambda handler, data: handler.answer(code, b"no", headers)


def stall(handler, data):
    send_half(handler, data)
    time.sleep(2)


def reset(handler, data):
    send_half(handler, data)
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()


def send_nothing(handler, data):
    time.sleep(2)
    handler.close_connection = True


def send_slowly(handler, data):
    handler.answer(200, b"", announced=len(data))
    for at in range(0, len(data), len(data) // 4 + 1):
        time.sleep(0.3)
        handler.wfile.write(data[at : at + len(data) // 4 + 1])


def send_end_slowly(handler, data):
    rest = send_head(handler, data)
    handler.wfile.write(rest[:-8000])
    for at in range(max(0, len(rest) - 8000), len(rest), 1000):
        time.sleep(0.3)
        handler.wfile.write(rest[at : at + 1000])


def trickle(handler, text):
    for at in range(len(text)):
        handler.wfile.write(text[at : at + 1])
        handler.wfile.flush()
        time.sleep(0.1)


def trickle_chunk(handler, data):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    trickle(handler, b"0" * 1000)


def trickle_redirect(handler, data):
    handler.answer(302, b"", {"Location": handler.path}, announced=1 << 30)
    trickle(handler, data)


def flip_bit(handler, data):
    middle = len(data) // 2
    handler.serve(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


@dataclass(frozen=True)
class Failure:
    """A response of the hub, and a part of the error; without an error the fetch succeeds."""

    respond: Response
    error: str
    once: bool = True
    slow: bool = False


FAILURES = {
    **{str(n): Failure(status(n), f"returned {n}", once=False) for n in (401, 403, 404, 416)},
    "429": Failure(status(429, **{"Retry-After": "0"}), "HTTP 429"),
    **{str(n): Failure(status(n), f"HTTP {n}") for n in (500, 502, 503, 504)},
    "closes without an answer": Failure(close, "last error: the connection closed;"),
    "slow": Failure(send_slowly, "", slow=True),
    "slow to the end": Failure(send_end_slowly, "", slow=True),
    "no answer": Failure(send_nothing, "last error: no response for 1 s;", slow=True),
    "stalls in the middle": Failure(stall, "last error: no response for 1 s;"),
    "connection reset in the middle": Failure(reset, "last error: connection reset by peer;"),
    "a byte now and then": Failure(
        lambda handler, data: trickle(handler, send_head(handler, data)),
        "bytes arrived in",
        slow=True,
    ),
    "a head without end": Failure(
        lambda handler, data: trickle(handler, b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 1000),
        "bytes early",
        slow=True,
    ),
    "a chunk without end": Failure(trickle_chunk, "bytes early", slow=True),
    "a redirect without end": Failure(trickle_redirect, "too many times", once=False),
    "cut short": Failure(send_half, "bytes early"),
    "wrong bytes of the right length": Failure(flip_bit, "sha256 is", once=False),
    "more bytes than asked for": Failure(
        lambda handler, data: handler.answer(200, data + b"more"), "bytes, expected", once=False
    ),
    "a login page": Failure(
        lambda handler, data: handler.answer(
            200, b"<html>please log in</html>", {"Content-Type": "text/html"}
        ),
        "bytes, expected",
        once=False,
    ),
    "compressed on the way": Failure(
        lambda handler, data: handler.answer(200, data, {"Content-Encoding": "gzip"}),
        "encoding gzip",
        once=False,
    ),
    "redirects in a loop": Failure(
        lambda handler, data: handler.answer(302, b"", {"Location": handler.path}),
        "too many times",
        once=False,
    ),
}


@dataclass
class Scene:
    hub: Hub
    content_host: Hub
    source: Path
    order: Path
    out: Path

    def fail(self, hub, failure, times):
        left = [times]

        def fault(handler, path, data):
            if not path.endswith(LARGE) or left[0] == 0:
                return False
            left[0] = None if left[0] is None else left[0] - 1
            failure.respond(handler, data)
            return True

        hub.fault = fault

    def write_order(self, *hubs, outage_s=0, **changes):
        urls = [f"{url}/{REPOSITORY}/" for url in hubs]
        options = {"tries": 2, "timeout_s": 1, "outage_s": outage_s, **changes}
        order = fetch_order(self.source, self.out, urls, **options)
        self.order.write_text(json.dumps(order))

    def fetch(self):
        run_tool("fetch", self.order)
        for path in self.source.iterdir():
            assert (self.out / path.name).read_bytes() == path.read_bytes()
        return "nothing: it goes on by itself", "whole"

    def fail_and_recover(self, error):
        done = run_tool("fetch", self.order, check=False)
        assert done.returncode not in (0, 1), done.stderr[-2000:]
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("error: ")
        assert error in line
        assert "; fix: " in line
        assert not self.out.exists()
        self.hub.fault = self.content_host.fault = self.hub.redirect_to = None
        self.fetch()
        problem = line.removeprefix("error: ").replace(f"{self.hub.url}/{REPOSITORY}/", "")
        return problem, "no tree; next run: whole"


@pytest.fixture
def scene(tmp_path):
    with Hub(tmp_path / "hub") as hub, Hub(tmp_path / "hub") as content_host:
        source = hub.root / REPOSITORY
        source.mkdir(parents=True)
        for number, size in enumerate((30_000, 250_000)):
            (source / f"file-{number}.bin").write_bytes(os.urandom(size))
        scene = Scene(hub, content_host, source, tmp_path / "fetch.json", tmp_path / "out")
        scene.write_order(hub.url)
        yield scene


def record(group, case, run):
    sweep = Sweep("hub")
    row = sweep.run_case(group, case, run)
    sweep.write("A hub that fails", ABOUT, None, COUNTED, TEST)
    assert_all_passed([row])


def cases(*, once):
    return [
        pytest.param(name, marks=pytest.mark.slow) if failure.slow else name
        for name, failure in FAILURES.items()
        if failure.once or not once
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(once=False))
def test_failed_fetch_publishes_nothing_and_next_fetch_finishes(scene, case):
    failure = FAILURES[case]
    scene.fail(scene.hub, failure, None)
    error = failure.error
    record("for good", case, lambda: scene.fail_and_recover(error) if error else scene.fetch())


@pytest.mark.parametrize("case", cases(once=True))
def test_recovers_from_a_single_failure(scene, case):
    scene.fail(scene.hub, FAILURES[case], 1)
    record("once", case, scene.fetch)


@pytest.mark.parametrize("times", [1, None], ids=["once", "for good"])
def test_renews_expired_links(scene, times):
    scene.hub.redirect_to = lambda path: scene.content_host.url + path
    scene.fail(scene.content_host, Failure(status(403), ""), times)
    if times:
        record("once", "an expired link", scene.fetch)
    else:
        expired = "signed link expired"
        record("for good", "expired links", lambda: scene.fail_and_recover(expired))


@pytest.mark.parametrize(
    ("address", "location"),
    [
        ("https://hub/file", "http://hub/file"),
        ("https://hub/file", "file:///etc/passwd"),
        ("http://hub/file", "ftp://hub/file"),
    ],
)
def test_redirects_never_downgrade_from_https_or_use_other_schemes(address, location):
    with pytest.raises(TransferError):
        _resolve_redirect(address, location)


def test_connection_refused_message_contains_no_python_reprs(scene):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        scene.write_order(f"http://127.0.0.1:{bound.getsockname()[1]}")
        done = run_tool("fetch", scene.order, check=False)
    assert "last error: connection refused;" in done.stderr
    assert "urllib3" not in done.stderr
    assert "object at 0x" not in done.stderr


@pytest.mark.slow
def test_resumes_after_hub_outage(scene):
    scene.fail(scene.hub, Failure(send_half, ""), None)
    assert run_tool("fetch", scene.order, check=False).returncode == 4
    started = time.monotonic()

    def fail_for_2_s(handler, path, data):
        return time.monotonic() - started < 2 and bool(status(503)(handler, data) or True)

    scene.hub.fault = fail_for_2_s
    assert run_tool("fetch", scene.order, check=False).returncode == 4
    scene.hub.requests.clear()
    scene.write_order(scene.hub.url, outage_s=60)
    started = time.monotonic()
    assert "giving up in 1 minutes" in run_tool("fetch", scene.order).stderr
    scene.fetch()
    ranges = [h.get("Range") for path, h, _ in scene.hub.requests if path.endswith(LARGE)]
    assert ranges
    assert all(byte_range and not byte_range.startswith("bytes=0-") for byte_range in ranges)


@pytest.mark.slow
def test_fails_if_outage_exceeds_limit(scene):
    scene.write_order(ABSENT, outage_s=1.5)
    started = time.monotonic()
    done = run_tool("fetch", scene.order, check=False)
    assert done.returncode == 4
    assert re.search(r"no progress in \d+ attempts over [1-9] s; last error: ", done.stderr)
    assert time.monotonic() - started >= 1.5


def test_does_not_wait_for_unavailable_mirror(scene):
    scene.write_order(ABSENT, scene.hub.url, outage_s=600)
    started = time.monotonic()
    scene.fetch()
    assert time.monotonic() - started < 60


SLOW = {"parallel": 1, "slow_bytes_per_s": 50_000, "slow_after_s": 0.5}


def crawl(handler, path, data):
    send_and_crawl(handler, data)
    return True


@pytest.mark.slow
def test_abandons_slow_mirror_and_resumes_from_hub(scene):
    scene.content_host.fault = crawl
    scene.write_order(scene.content_host.url, scene.hub.url, **SLOW)
    started = time.monotonic()
    scene.fetch()
    assert time.monotonic() - started < 40
    ranges = {path.rpartition("/")[2]: h.get("Range", "") for path, h, _ in scene.hub.requests}
    assert int(ranges[LARGE].removeprefix("bytes=").partition("-")[0]) >= 250_000 // 3
    assert {path.rpartition("/")[2] for path, *_ in scene.content_host.requests} == {LARGE}


def ask_to_wait(handler, path, data):
    handler.answer(503, b"", {"Retry-After": "100"})
    return True


def send_wrong_bytes(handler, path, data):
    flip_bit(handler, data)
    return True


@pytest.mark.parametrize("fault", [ask_to_wait, send_wrong_bytes])
def test_requests_only_one_file_from_a_mirror_with_wrong_content(scene, fault):
    scene.content_host.fault = fault
    scene.write_order(scene.content_host.url, scene.hub.url, **SLOW)
    started = time.monotonic()
    scene.fetch()
    assert time.monotonic() - started < 40
    assert {path.rpartition("/")[2] for path, *_ in scene.content_host.requests} == {LARGE}


DIGITS = "9" * 5000
FAR_DATE = "Mon, 01 Jan 99999999999 00:00:00 GMT"


@pytest.mark.parametrize(
    ("code", "headers"),
    [
        (200, {"X-Linked-Size": "\xb2"}),
        (200, {"X-Linked-Size": DIGITS}),
        (206, {"Content-Range": f"bytes 0-{DIGITS}/{DIGITS}"}),
        (503, {"Retry-After": DIGITS}),
        (503, {"Retry-After": FAR_DATE}),
        (503, {"Retry-After": "\x1b[2J"}),
        (200, {"Content-Encoding": "\x1b[2J\r\n error: x"}),
        (302, {"Location": "http://["}),
        (302, {"Location": "http://\x1b[2J:99999999/"}),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_invalid_header_from_mirror_does_not_fail_download(scene, code, headers):
    scene.content_host.fault = lambda h, path, data: h.answer(code, b"no", headers) or True
    scene.write_order(scene.content_host.url, scene.hub.url)
    done = run_tool("fetch", scene.order)
    assert all(line.isprintable() for line in done.stderr.splitlines())
    assert not any(line.strip().startswith("error: ") for line in done.stderr.splitlines())
    scene.fetch()


@pytest.mark.slow
def test_keeps_using_mirror_that_is_fast_enough(scene):
    scene.fail(scene.content_host, FAILURES["slow"], None)
    scene.write_order(scene.content_host.url, scene.hub.url, **SLOW)
    scene.fetch()
    assert not scene.hub.requests


@pytest.mark.slow
def test_uses_a_slow_mirror_if_the_hub_fails(scene):
    scene.fail(scene.content_host, Failure(send_and_crawl, ""), 2)
    scene.hub.fault = lambda handler, path, data: handler.answer(404, b"") or True
    scene.write_order(scene.content_host.url, scene.hub.url, **SLOW)
    scene.fetch()


# A name server that returns an IPv6 address first.
RESOLVER = """
import socket, sys
real = socket.getaddrinfo
def resolve(host, port, *more, **options):
    hosts = ("::1", "127.0.0.1") if host == "hub.test" else (host,)
    return [entry for name in hosts for entry in real(name, port, *more, **options)]
socket.getaddrinfo = resolve
from spark_checkpoint.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_tries_the_next_address_after_the_timeout(scene):
    port = int(scene.hub.url.rpartition(":")[2])
    with socket.socket(socket.AF_INET6) as hole, socket.socket(socket.AF_INET6) as filling:
        # A listener with a full queue that never accepts: it ignores further SYNs.
        hole.bind(("::1", port))
        hole.listen(0)
        filling.connect(("::1", port))
        scene.write_order(f"http://hub.test:{port}")

        def fetch():
            subprocess.run(
                [sys.executable, "-c", RESOLVER, "fetch", str(scene.order)],
                env=tool_environment(), check=True, timeout=60,
            )  # fmt: skip
            return scene.fetch()

        record("for good", "its address of version 6 is a black hole", fetch)
