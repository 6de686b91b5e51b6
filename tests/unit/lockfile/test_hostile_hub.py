import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.utils._http import default_client_factory
from hypothesis import example, given, settings

from spark_deploy.config.errors import LockError
from spark_deploy.lock import hub as lookup
from spark_deploy.lock.resolve import read_lock, write_lock
from spark_deploy.lock.types import EMPTY_LOCK
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.hostile import hostile

REPO = "lab/tiny"
ANSWER: dict[str, Any] = {
    "id": REPO,
    "sha": "1" * 40,
    "siblings": [
        {"rfilename": "config.json", "size": 9, "blobId": "b" * 40},
        {
            "rfilename": "model.safetensors",
            "size": 5000,
            "blobId": "c" * 40,
            "lfs": {"sha256": "d" * 64, "size": 5000, "pointerSize": 130},
        },
    ],
    "tags": [],
    "gated": False,
    "lastModified": "2026-01-01T00:00:00.000Z",
    "safetensors": {"parameters": {"BF16": 1}, "total": 1},
}


def change_large_file(**changes):
    [small, large] = json.loads(json.dumps(ANSWER["siblings"]))
    return json.dumps({**ANSWER, "siblings": [small, {**large, **changes}]}).encode()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with Hub(tmp_path_factory.mktemp("hub")) as running:
        listing = running.root / "api/models" / REPO / "revision/main"
        listing.parent.mkdir(parents=True)
        listing.write_text(json.dumps(ANSWER))
        yield running


def test_retries_public_repository_without_the_expired_token(hub):
    refusal = {"X-Error-Message": "Invalid credentials in Authorization header"}
    hub.fault = lambda handler, path, data: (
        handler.headers.get("Authorization") and (handler.answer(401, b"", refusal) or True)
    )
    try:
        assert lookup.look_up_repo(hub.url, REPO, "main", "hf_expired").commit == "1" * 40
    finally:
        hub.fault = None


@pytest.mark.slow
@settings(max_examples=100)
@given(answer=hostile(json.dumps(ANSWER).encode()))
@example(answer=change_large_file(size=-1))
@example(answer=change_large_file(size=2**80))
@example(answer=change_large_file(size="5000"))
@example(answer=change_large_file(size=True))
@example(answer=change_large_file(size=5000.0))
@example(answer=change_large_file(lfs={"sha256": "d" * 63, "size": 5000, "pointerSize": 130}))
@example(answer=change_large_file(lfs={"sha256": None, "size": 5000, "pointerSize": 130}))
@example(answer=change_large_file(lfs={"size": 5000}))
@example(answer=change_large_file(lfs=[]))
@example(answer=change_large_file(blobId=7, lfs=None))
@example(answer=change_large_file(rfilename="../../etc/passwd"))
@example(answer=change_large_file(rfilename="/etc/passwd"))
@example(answer=change_large_file(rfilename=None))
@example(answer=change_large_file(rfilename="a\x1b[2Jb", size=-1))
@example(answer=change_large_file(rfilename="config.json"))
@example(answer=change_large_file(rfilename="receipt.json"))
@example(answer=json.dumps({**ANSWER, "sha": "main"}).encode())
@example(answer=json.dumps({**ANSWER, "sha": 7}).encode())
@example(answer=json.dumps({**ANSWER, "sha": "\ud7fc"}).encode())
@example(answer=json.dumps({**ANSWER, "siblings": {"a": 1}}).encode())
@example(answer=json.dumps({**ANSWER, "id": "other/repo"}).encode())
def test_any_hub_response_yields_a_valid_lock_or_a_single_error(hub, answer):
    hub.fault = lambda handler, path, data: handler.serve(answer) or True
    path = hub.root / "spark.lock.yml"
    try:
        result = lookup.look_up_repo(hub.url, REPO, "main", None)
    except LockError as error:
        [problem] = error.problems
        assert problem.where
        assert problem.fix
        assert len(problem.line) < 600
        assert re.fullmatch(r"[^\n]+", problem.line)
        assert problem.line.isprintable()
        return
    write_lock(path, EMPTY_LOCK.with_entries([result]))
    assert read_lock(path).sources == {REPO: result}
    assert all(type(file.size_bytes) is int for file in result.files)
    assert len({file.path for file in result.files}) == len(result.files)
    assert not any(Path(file.path).is_absolute() or ".." in file.path for file in result.files)


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def stay_silent(handler):
    time.sleep(1)


def send_too_little(handler):
    handler.answer(200, b"{", announced=5000)
    hang_up(handler)


def refuse_with_escapes(handler):
    handler.answer(500, b"\x1b[2J", {"X-Error-Message": "over\x1b[2Jhere"})


def send_forever(handler):
    handler.answer(200, b"", announced=1 << 40)
    while True:
        handler.wfile.write(b" " * 100_000)


def send_slowly(handler):
    handler.answer(200, b"", announced=1 << 40)
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("act", "message"),
    [(send_forever, "the response is too long"), (send_slowly, "the response took too long")],
)
def test_limits_size_and_time_of_hub_responses(hub, act, message, monkeypatch):
    monkeypatch.setattr(lookup, "_MAX_BODY_S", 1)
    monkeypatch.setattr(lookup, "_MAX_BODY_BYTES", 10_000_000)
    hub.fault = lambda handler, path, data: act(handler) or True
    with pytest.raises(LockError, match=message):
        lookup.look_up_repo(hub.url, REPO, "main", None)


@pytest.mark.parametrize("act", [hang_up, stay_silent, send_too_little, refuse_with_escapes])
def test_reports_interrupted_hub_response_in_one_line(hub, act, monkeypatch):
    monkeypatch.setattr(lookup, "_TIMEOUT_S", 0.3)
    hub.fault = lambda handler, path, data: act(handler) or True
    with pytest.raises(LockError, match="the hub cannot be reached: ") as caught:
        lookup.look_up_repo(hub.url, REPO, "main", None)
    [problem] = caught.value.problems
    assert problem.line.isprintable()


def test_stops_waiting_for_a_slow_hub(hub, monkeypatch):
    def send_single_bytes(handler, path, data):
        handler.answer(200, b"", announced=len(data))
        for at in range(len(data)):
            handler.wfile.write(data[at : at + 1])
            time.sleep(0.1)
        return True

    monkeypatch.setattr(lookup, "LOOKUP_TIMEOUT_S", 0.5)
    hub.fault = send_single_bytes
    with pytest.raises(LockError, match="no complete response within"):
        lookup.look_up_repo(hub.url, REPO, "main", None)


@pytest.mark.parametrize(
    ("before", "location", "accepted"),
    [("https", "https://other.invalid/x", True), ("https", "/there", True),
     ("http", "http://other.invalid/x", True), ("http", "https://other.invalid/x", True),
     ("https", "http://hub.invalid/x", False), ("https", "ftp://hub.invalid/x", False)],
)  # fmt: skip
def test_hub_redirects_never_leave_https(before, location, accepted):
    answered = []

    def answer(request):
        answered.append(str(request.url))
        if len(answered) == 1:
            return httpx2.Response(302, headers={"Location": location})
        return httpx2.Response(200, json=ANSWER)

    def client():
        return httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True)

    huggingface_hub.set_client_factory(client)
    try:
        if accepted:
            assert (
                lookup.look_up_repo(f"{before}://hub.invalid", REPO, "main", None).commit
                == "1" * 40
            )
        else:
            with pytest.raises(LockError, match="redirects from https to"):
                lookup.look_up_repo(f"{before}://hub.invalid", REPO, "main", None)
            assert len(answered) == 1
    finally:
        huggingface_hub.set_client_factory(default_client_factory)
