"""Any answer of a registry gives a problem in a line, within a time limit."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPMessage

import pytest

from spark_deploy.config.errors import LockError
from spark_deploy.lock import registry

OK = b"HTTP/1.1 200 OK\r\n"
REFUSED = b"HTTP/1.1 401 no\r\nContent-Length: 0\r\nWWW-Authenticate: "
ANSWERS = {
    "of another protocol": b"SSH-2.0-x\r\n\r\n",
    "that breaks off": OK + b"Content-Length: 50\r\n\r\n{}",
    "with a line without end": b"HTTP/1.1 200 " + b"a" * 70_000 + b"\r\n\r\n",
    "with headers without end": OK + b"X: 1\r\n" * 300 + b"\r\n{}",
    "in pieces that are none": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "that moves the terminal": b"HTTP/1.1 500 \x1b]0;own\x07\x1b[2J\r\nContent-Length: 0\r\n\r\n",
    "with such a digest": OK + b"Docker-Content-Digest: \x1b[2J\r\nContent-Length: 2\r\n\r\n{}",
    "with such a realm": REFUSED + b'Bearer realm="https://127.0.0.1:1/\x1b[2J"\r\n\r\n',
    "that goes in circles": b"HTTP/1.1 302 x\r\nLocation: /v2/\r\nContent-Length: 0\r\n\r\n",
    "of brackets alone": OK + b"\r\n" + b"[" * 100_000,
}


@contextmanager
def answering(head: bytes, more: bytes = b"", pause_s: float = 0.0) -> Iterator[str]:
    """Answer every request with ``head``, and with ``more`` again and again until it hangs up."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(ConnectionError), server.accept()[0] as client:
                    client.recv(1 << 16)
                    client.sendall(head)
                    while more and answering_still.is_set():
                        client.sendall(more)
                        time.sleep(pause_s)

    answering_still = threading.Event()
    answering_still.set()
    threading.Thread(target=answer, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    answering_still.clear()
    server.close()


def refused(address: str) -> str:
    with pytest.raises(LockError) as caught:
        registry.look_up(f"{address}/a/b:1", arch="aarch64", insecure=[address])
    [problem] = caught.value.problems
    assert problem.fix
    assert len(problem.line) < 600
    assert problem.line.isprintable()
    return problem.line


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_reports_invalid_registry_answer_in_one_line(answer: bytes) -> None:
    with answering(answer) as address:
        refused(address)


def test_limits_size_of_registry_answers() -> None:
    with answering(OK + b"\r\n", b"{" * (1 << 20)) as address:
        assert "longer than" in refused(address)


@pytest.mark.parametrize("head", [OK + b"X: ", OK + b"\r\n"], ids=["head", "body"])
def test_stops_waiting_for_a_slow_registry(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LIMIT_S", 0.5)
    with answering(head, b"x", pause_s=0.05) as address:
        began = time.monotonic()
        assert "no complete response within" in refused(address)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("target", ["ftp://127.0.0.1:1/x", "file:///etc/hostname", "gopher://a/"])
def test_registry_redirects_stay_with_http(target: str) -> None:
    redirect = f"HTTP/1.1 302 x\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
    with answering(redirect.encode()) as address:
        output = refused(address)
    assert "redirects from http to" in output or "not allowed" in output


@pytest.mark.parametrize(
    ("before", "after", "goes"),
    [("https", "https", True), ("http", "https", True), ("http", "http", True),
     ("https", "http", False), ("https", "ftp", False), ("http", "ftp", False)],
)  # fmt: skip
def test_registry_redirects_never_leave_https(before: str, after: str, goes: bool) -> None:
    handler = registry._SafeRedirects()
    asked = urllib.request.Request(f"{before}://registry.invalid/v2/")
    there = partial(
        handler.redirect_request, asked, io.BytesIO(), 302, "x", HTTPMessage(), f"{after}://a/"
    )
    if goes:
        assert there() is not None
    else:
        with pytest.raises(urllib.error.URLError, match="redirects from"):
            there()
