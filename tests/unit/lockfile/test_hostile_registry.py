import contextlib
import io
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial
from http.client import HTTPMessage

import pytest

from spark_deploy.config.errors import LockError
from spark_deploy.lock import registry

OK = b"HTTP/1.1 200 OK\r\n"
REFUSED = b"HTTP/1.1 401 no\r\nContent-Length: 0\r\nWWW-Authenticate: "
ANSWERS = {
    "another protocol": b"SSH-2.0-x\r\n\r\n",
    "ends early": OK + b"Content-Length: 50\r\n\r\n{}",
    "an endless line": b"HTTP/1.1 200 " + b"a" * 70_000 + b"\r\n\r\n",
    "endless headers": OK + b"X: 1\r\n" * 300 + b"\r\n{}",
    "invalid chunks": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "terminal escapes": b"HTTP/1.1 500 \x1b]0;own\x07\x1b[2J\r\nContent-Length: 0\r\n\r\n",
    "terminal escapes in the digest": OK
    + b"Docker-Content-Digest: \x1b[2J\r\nContent-Length: 2\r\n\r\n{}",
    "escapes in the realm": REFUSED + b'Bearer realm="https://127.0.0.1:1/\x1b[2J"\r\n\r\n',
    "redirects in a loop": b"HTTP/1.1 302 x\r\nLocation: /v2/\r\nContent-Length: 0\r\n\r\n",
    "only brackets": OK + b"\r\n" + b"[" * 100_000,
}


@contextmanager
def respond_with(head, more=b"", pause_s=0.0):
    server = socket.create_server(("127.0.0.1", 0))

    def respond():
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(ConnectionError), server.accept()[0] as client:
                    client.recv(1 << 16)
                    client.sendall(head)
                    while more and is_open.is_set():
                        client.sendall(more)
                        time.sleep(pause_s)

    is_open = threading.Event()
    is_open.set()
    threading.Thread(target=respond, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    is_open.clear()
    server.close()


def look_up_refused(address):
    with pytest.raises(LockError) as caught:
        registry.look_up_image(f"{address}/a/b:1", arch="aarch64", insecure=[address])
    [problem] = caught.value.problems
    assert problem.fix
    assert len(problem.line) < 600
    assert problem.line.isprintable()
    return problem.line


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_reports_invalid_registry_response_in_one_line(answer):
    with respond_with(answer) as address:
        look_up_refused(address)


def test_limits_size_of_registry_responses():
    with respond_with(OK + b"\r\n", b"{" * (1 << 20)) as address:
        assert "longer than" in look_up_refused(address)


@pytest.mark.parametrize("head", [OK + b"X: ", OK + b"\r\n"], ids=["head", "body"])
def test_stops_waiting_for_a_slow_registry(head, monkeypatch):
    monkeypatch.setattr(registry, "LOOKUP_TIMEOUT_S", 0.5)
    with respond_with(head, b"x", pause_s=0.05) as address:
        began = time.monotonic()
        assert "no complete response within" in look_up_refused(address)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("target", ["ftp://127.0.0.1:1/x", "file:///etc/hostname", "gopher://a/"])
def test_follows_registry_redirects_between_http_addresses(target):
    redirect = f"HTTP/1.1 302 x\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
    with respond_with(redirect.encode()) as address:
        output = look_up_refused(address)
    assert "redirects from http to" in output or "not allowed" in output


@pytest.mark.parametrize(
    ("before", "after", "accepted"),
    [("https", "https", True), ("http", "https", True), ("http", "http", True),
     ("https", "http", False), ("https", "ftp", False), ("http", "ftp", False)],
)  # fmt: skip
def test_registry_redirects_never_leave_https(before, after, accepted):
    handler = registry._SafeRedirects()
    request = urllib.request.Request(f"{before}://registry.invalid/v2/")
    redirect = partial(
        handler.redirect_request, request, io.BytesIO(), 302, "x", HTTPMessage(), f"{after}://a/"
    )
    if accepted:
        assert redirect() is not None
    else:
        with pytest.raises(urllib.error.URLError, match="redirects from"):
            redirect()
