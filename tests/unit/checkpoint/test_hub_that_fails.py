"""Every way in which a hub fails, against the real fetcher: one line, nothing lost, healed."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builder_hub import Hub, fetch_order
from builder_trees import run_tool, tool_environment

from tests.faults.sweep import Sweep, assert_all_passed

REPOSITORY = "lab/tiny/resolve/" + "c" * 40
LARGE = "file-1.bin"
ABOUT = {
    "for good": "the hub answers so to every request",
    "once": "the hub answers so once, and is well again",
}
COUNTED = (
    "The real fetcher against a hub on this machine, with two attempts and a time limit of a "
    "second. A fetch that failed leaves no tree under its name; when the hub is well the next one "
    "finishes, and the tree is the repository, byte for byte."
)
Answer = Callable[[Any, bytes], object]


def hung_up(handler: Any, data: bytes) -> None:
    handler.close_connection = True


def status(code: int, **headers: str) -> Answer:
    return lambda handler, data: handler.answer(code, b"no", headers)


def begun(handler: Any, data: bytes) -> bytes:
    """Send the head of an answer, and return what is asked for."""
    first = int((handler.headers.get("Range") or "bytes=0-").partition("=")[2].partition("-")[0])
    rest = data[first:]
    handler.send_response(206 if first else 200)
    handler.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
    handler.send_header("Content-Length", str(len(rest)))
    handler.end_headers()
    return rest


def half(handler: Any, data: bytes) -> None:
    """Send half of what is asked for, as if all came."""
    rest = begun(handler, data)
    handler.wfile.write(rest[: len(rest) // 2])
    handler.wfile.flush()
    handler.close_connection = True


def stalled(handler: Any, data: bytes) -> None:
    half(handler, data)
    time.sleep(2)


def reset(handler: Any, data: bytes) -> None:
    half(handler, data)
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()


def silent(handler: Any, data: bytes) -> None:
    time.sleep(2)
    handler.close_connection = True


def slow(handler: Any, data: bytes) -> None:
    handler.answer(200, b"", announced=len(data))
    for at in range(0, len(data), len(data) // 4 + 1):
        time.sleep(0.3)
        handler.wfile.write(data[at : at + len(data) // 4 + 1])


def slow_to_the_end(handler: Any, data: bytes) -> None:
    """Send the last of it at 2 KB/s, for longer than a mean is taken over."""
    rest = begun(handler, data)
    handler.wfile.write(rest[:-8000])
    for at in range(max(0, len(rest) - 8000), len(rest), 1000):
        time.sleep(0.5)
        handler.wfile.write(rest[at : at + 1000])


def trickled(handler: Any, text: bytes) -> None:
    """Send a byte now and then, as long as anybody listens."""
    for at in range(len(text)):
        handler.wfile.write(text[at : at + 1])
        handler.wfile.flush()
        time.sleep(0.1)


def trickles(handler: Any, data: bytes) -> None:
    trickled(handler, begun(handler, data))


def head_without_end(handler: Any, data: bytes) -> None:
    trickled(handler, b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 1000)


def chunk_without_end(handler: Any, data: bytes) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    trickled(handler, b"0" * 1000)


def redirect_without_end(handler: Any, data: bytes) -> None:
    handler.answer(302, b"", {"Location": handler.path}, announced=1 << 30)
    trickled(handler, data)


def other_bytes(handler: Any, data: bytes) -> None:
    middle = len(data) // 2
    handler.serve(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def too_many(handler: Any, data: bytes) -> None:
    handler.answer(200, data + b"more")


def login_page(handler: Any, data: bytes) -> None:
    handler.answer(200, b"<html>please log in</html>", {"Content-Type": "text/html"})


def zipped(handler: Any, data: bytes) -> None:
    handler.answer(200, data, {"Content-Encoding": "gzip"})


def circle(handler: Any, data: bytes) -> None:
    handler.answer(302, b"", {"Location": handler.path})


@dataclass(frozen=True)
class Failure:
    """What the hub answers, and words of the line that says so; no words: it goes well."""

    answer: Answer
    says: str
    once: bool = True  # answered so once, it goes well
    slow: bool = False  # takes seconds to be told from a hub that is well


FAILURES = {
    "401": Failure(status(401), "answers 401", once=False),
    "403": Failure(status(403), "answers 403", once=False),
    "404": Failure(status(404), "answers 404", once=False),
    "416": Failure(status(416), "answers 416", once=False),
    "429": Failure(status(429, **{"Retry-After": "0"}), "HTTP 429"),
    "500": Failure(status(500), "HTTP 500"),
    "502": Failure(status(502), "HTTP 502"),
    "503": Failure(status(503), "HTTP 503"),
    "504": Failure(status(504), "HTTP 504"),
    "closes without an answer": Failure(hung_up, "last: the connection ended;"),
    "slow": Failure(slow, "", slow=True),
    "slow to the end": Failure(slow_to_the_end, "", slow=True),
    "no answer": Failure(silent, "last: no answer for 1 s;"),
    "stalls in the middle": Failure(stalled, "last: no answer for 1 s;"),
    "connection reset in the middle": Failure(reset, "last: connection reset by peer;"),
    "a byte now and then": Failure(trickles, "bytes arrived in"),
    "a head without end": Failure(head_without_end, "bytes early", slow=True),
    "a chunk without end": Failure(chunk_without_end, "bytes early", slow=True),
    "a redirect without end": Failure(redirect_without_end, "circle", once=False),
    "cut short": Failure(half, "bytes early"),
    "wrong bytes of the right length": Failure(other_bytes, "sha256 is", once=False),
    "more bytes than asked for": Failure(too_many, "bytes long, not", once=False),
    "a login page": Failure(login_page, "bytes long, not", once=False),
    "compressed on the way": Failure(zipped, "encoding gzip", once=False),
    "redirects in a circle": Failure(circle, "circle", once=False),
}


@dataclass
class Scene:
    """A hub, its second host, and an order for one repository."""

    hub: Hub
    cdn: Hub
    source: Path
    order: Path
    out: Path

    def answers(self, hub: Hub, failure: Failure, times: int | None) -> None:
        """Have a hub fail for the large file, so often or for good."""
        left = [times]

        def fault(handler: Any, path: str, data: bytes) -> bool:
            if not path.endswith(LARGE) or left[0] == 0:
                return False
            left[0] = None if left[0] is None else left[0] - 1
            failure.answer(handler, data)
            return True

        hub.fault = fault

    def fetched(self) -> None:
        """Insist that a fetch goes well and brings the repository."""
        run_tool("fetch", self.order)
        for path in self.source.iterdir():
            assert (self.out / path.name).read_bytes() == path.read_bytes()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Hub(tmp_path / "hub") as hub, Hub(tmp_path / "hub") as cdn:
        source = hub.root / REPOSITORY
        source.mkdir(parents=True)
        for number, size in enumerate((30_000, 250_000)):
            (source / f"file-{number}.bin").write_bytes(os.urandom(size))
        made = Scene(hub, cdn, source, tmp_path / "fetch.json", tmp_path / "out")
        write_order(made, hub.url)
        yield made


def write_order(scene: Scene, url: str) -> None:
    urls = [f"{url}/{REPOSITORY}/"]
    order = fetch_order(scene.source, scene.out, urls, tries=2, timeout_s=1)
    scene.order.write_text(json.dumps(order))


def fails_and_heals(scene: Scene, says: str) -> tuple[str, str]:
    """Fetch from a hub that fails for good, then from one that is well."""
    done = run_tool("fetch", scene.order, check=False)
    assert done.returncode not in (0, 1), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert says in line
    assert "; fix: " in line
    assert not scene.out.exists()
    scene.hub.fault = scene.cdn.fault = scene.hub.redirect_to = None
    scene.fetched()
    saw = line.removeprefix("error: ").replace(f"{scene.hub.url}/{REPOSITORY}/", "")
    return saw, "no tree; next run: whole"


def goes_well(scene: Scene) -> tuple[str, str]:
    scene.fetched()
    return "nothing: it goes on by itself", "whole"


def kept(group: str, case: str, one: Callable[[], tuple[str, str]]) -> None:
    """Keep a row and the table, and fail with the row."""
    sweep = Sweep("hub")
    row = sweep.run_case(group, case, one)
    test = "tests/unit/checkpoint/test_hub_that_fails.py"
    sweep.write("A hub that fails", ABOUT, None, COUNTED, test)
    assert_all_passed([row])


def cases(*, once: bool) -> list[Any]:
    """Name the failures to try, of which the slow ones are left to the slow tests."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if failure.slow else name
        for name, failure in FAILURES.items()
        if failure.once or not once
    ]


@pytest.mark.parametrize("case", cases(once=False))
def test_a_hub_that_fails_for_good_costs_a_line_and_nothing_else(scene: Scene, case: str) -> None:
    failure = FAILURES[case]
    scene.answers(scene.hub, failure, None)
    says = failure.says
    kept("for good", case, lambda: fails_and_heals(scene, says) if says else goes_well(scene))


@pytest.mark.parametrize("case", cases(once=True))
def test_a_hub_that_fails_once_costs_nothing(scene: Scene, case: str) -> None:
    scene.answers(scene.hub, FAILURES[case], 1)
    kept("once", case, lambda: goes_well(scene))


@pytest.mark.parametrize("times", [1, None], ids=["once", "for good"])
def test_a_signed_link_that_expired_is_asked_for_again(scene: Scene, times: int | None) -> None:
    scene.hub.redirect_to = lambda path: scene.cdn.url + path
    scene.answers(scene.cdn, Failure(status(403), ""), times)
    if times:
        kept("once", "an expired link", lambda: goes_well(scene))
    else:
        kept("for good", "expired links", lambda: fails_and_heals(scene, "the signed link expired"))


def test_a_hub_that_is_not_there_is_told_in_plain_words(scene: Scene) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        write_order(scene, f"http://127.0.0.1:{taken.getsockname()[1]}")
        done = run_tool("fetch", scene.order, check=False)
    write_order(scene, scene.hub.url)
    scene.fetched()
    assert "last: connection refused;" in done.stderr
    assert "urllib3" not in done.stderr
    assert "object at 0x" not in done.stderr


# A name server's answer: the hub's name has an address of version 6 first.
RESOLVER = """
import socket, sys
real = socket.getaddrinfo
def both(host, port, *more, **words):
    if host != "hub.test":
        return real(host, port, *more, **words)
    return [one for address in ("::1", "127.0.0.1") for one in real(address, port, *more, **words)]
socket.getaddrinfo = both
from spark_checkpoint.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_address_that_leads_nowhere_costs_its_time_limit_alone(scene: Scene) -> None:
    port = int(scene.hub.url.rpartition(":")[2])
    with socket.socket(socket.AF_INET6) as hole, socket.socket(socket.AF_INET6) as filling:
        # A listener that never accepts, with its queue full, answers no further SYN.
        hole.bind(("::1", port))
        hole.listen(0)
        filling.connect(("::1", port))
        write_order(scene, f"http://hub.test:{port}")

        def fetched() -> tuple[str, str]:
            subprocess.run(
                [sys.executable, "-c", RESOLVER, "fetch", str(scene.order)],
                env=tool_environment(), check=True, timeout=60,
            )  # fmt: skip
            return goes_well(scene)

        kept("for good", "its address of version 6 is a black hole", fetched)
