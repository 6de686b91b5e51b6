"""Progress and stall timeout of an image pull."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker_daemon import Answer, Daemon, listening
from spark_contract.errors import HostToolError
from spark_contract.job import read_progress
from spark_host import image as images
from spark_host.image import Layers
from spark_host.system import docker

DIGEST = f"sha256:{'5' * 64}"
REFERENCE = f"registry.invalid:5000/lab/engine@{DIGEST}"
STALL_S = 0.5
A, B = "a" * 12, "b" * 12


def layer(name: str, status: str, current: int = 0, total: int = 0) -> dict[str, Any]:
    detail = {"current": current, "total": total} if total else {}
    return {"status": status, "progressDetail": detail, "id": name}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(path))
    monkeypatch.setattr(images, "_POLL_S", 0.02)
    monkeypatch.setattr(images, "_REPORT_S", 0.05)
    home = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    monkeypatch.setattr(docker, "client_environment", lambda: home)
    with listening(path) as made:
        yield made


def refused(stall_s: float = STALL_S) -> str:
    with pytest.raises(HostToolError) as caught:
        images.pull(REFERENCE, stall_s=stall_s)
    said = str(caught.value)
    assert "\n" not in said
    assert "; fix: " in said
    assert REFERENCE in said
    return said


def test_pulls_by_digest(daemon: Daemon) -> None:
    images.pull(REFERENCE, stall_s=STALL_S)
    assert (daemon.pulled, daemon.auth) == ([REFERENCE], [None])


def test_progress_sums_the_bytes_of_all_layers(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def slowly(answer: Answer, reference: str) -> None:
        answer.says(layer(A, "Pulling fs layer"), layer(B, "Pulling fs layer"))
        answer.says(layer("c" * 12, "Already exists"), layer(A, "Downloading", 10, 40))
        time.sleep(0.2)
        answer.says(layer(B, "Downloading", 20, 60))
        time.sleep(0.2)
        answer.says(layer(A, "Download complete"), layer(B, "Download complete"))
        answer.says(layer(A, "Extracting", 7, 40))
        time.sleep(0.2)
        daemon.has(answer, reference)

    daemon.script = slowly
    images.pull(REFERENCE, stall_s=STALL_S)
    told = [read_progress(line, 500) for line in capsys.readouterr().out.splitlines()]
    found = {(one.phase, one.bytes, one.total) for one in told}
    assert {("pull", 10, 500), ("pull", 30, 100), ("unpack", 7, 100)} <= found


def test_stalled_registry_ends_the_pull(daemon: Daemon) -> None:
    def stalls(answer: Answer, reference: str) -> None:
        answer.says(layer(A, "Pulling fs layer"))
        # The store of containerd repeats itself ten times a second.
        answer.repeats(layer(A, "Downloading", 3_000_000_000, 9_000_000_000))

    daemon.script = stalls
    said = refused()
    assert f"the pull stalls: nothing of layer {A}" in said
    assert "after 3,000.0 MB" in said
    assert daemon.left.wait(5)


def test_silent_docker_is_a_stall(daemon: Daemon) -> None:
    daemon.script = lambda answer, reference: time.sleep(5)
    began = time.monotonic()
    assert "stalls" in refused()
    assert time.monotonic() - began < 3


def test_trickling_bytes_are_a_stall(daemon: Daemon) -> None:
    def trickles(answer: Answer, reference: str) -> None:
        for count in range(1, 200):
            answer.says(layer(A, "Downloading", count, 1 << 30))
            time.sleep(0.05)

    daemon.script = trickles
    assert "stalls" in refused()


def test_slow_download_is_not_a_stall(daemon: Daemon) -> None:
    def slowly(answer: Answer, reference: str) -> None:
        for count in range(30):  # 6 KB/s, three times as long as a stall may last
            answer.says(layer(A, "Downloading", count * 300, 1 << 20))
            time.sleep(0.05)
        daemon.has(answer, reference)

    daemon.script = slowly
    images.pull(REFERENCE, stall_s=STALL_S)


@pytest.mark.parametrize("status", ["Verifying Checksum", "Download complete", "Extracting"])
def test_unpacking_may_take_long(daemon: Daemon, status: str) -> None:
    def unpacks(answer: Answer, reference: str) -> None:
        answer.says(layer(A, "Downloading", 5, 5), layer(A, status))
        time.sleep(3 * STALL_S)
        daemon.has(answer, reference)

    daemon.script = unpacks
    images.pull(REFERENCE, stall_s=STALL_S)


def test_unpacking_is_limited() -> None:
    layers = Layers(0.0, 300.0)
    layers.take(layer(A, "Download complete"), 1.0)
    for second in range(1, 4000):
        ticking = {"current": second, "units": "s"}
        layers.take({"id": A, "status": "Extracting", "progressDetail": ticking}, float(second))
    assert layers.stalled(3500.0) is None
    assert "docker has all bytes" in str(layers.stalled(3999.0))


def test_unpacking_hides_no_stall_of_another_layer() -> None:
    layers = Layers(0.0, 300.0)
    layers.take(layer(B, "Downloading", 10, 100), 1.0)
    for second in range(1, 400):
        ticking = {"current": second, "units": "s"}
        layers.take({"id": A, "status": "Extracting", "progressDetail": ticking}, float(second))
        layers.take(layer(B, f"Retrying in {second % 7} seconds"), float(second))
    assert "layer bbbb" in str(layers.stalled(399.0))


def test_registry_error_is_shown_on_one_line(daemon: Daemon) -> None:
    why = "received unexpected HTTP status: 503\n\x1b[2Jwait" + "!" * 5000

    def fails(answer: Answer, reference: str) -> None:
        answer.says(layer(A, "Downloading", 5, 50), {"errorDetail": {"message": why}, "error": why})

    daemon.script = fails
    said = refused()
    assert "received unexpected HTTP status: 503 [2Jwait!" in said
    assert len(said) < 1000


def test_http_error_is_shown_with_its_message(daemon: Daemon) -> None:
    daemon.status = 404
    daemon.script = lambda answer, reference: answer.says({"message": "manifest unknown"})
    assert "manifest unknown" in refused()
    daemon.script = lambda answer, reference: answer.sends(b"<html>")
    assert "status 404" in refused()


@pytest.mark.parametrize("half", [b"", b'{"status":"Downloading","progressDet'])
def test_dying_daemon_is_an_error(daemon: Daemon, half: bytes) -> None:
    def dies(answer: Answer, reference: str) -> None:
        answer.says(layer(A, "Downloading", 5, 50))
        answer.sends(half) if half else None
        raise ConnectionAbortedError

    daemon.script = dies
    assert "docker's daemon is away, or broke the pull off" in refused()


def test_absent_daemon_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(tmp_path / "none.sock"))
    assert "no such file" in refused()


def test_missing_image_after_the_pull_is_an_error(daemon: Daemon) -> None:
    daemon.script = lambda answer, reference: answer.sends(b'{"status": "Status: half a li')
    assert "without the image" in refused()


def test_overlong_lines_are_skipped(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    object_of = images._parse_event

    def measured(line: bytes) -> dict[str, Any] | None:
        nonlocal longest
        longest = max(longest, len(line))
        return object_of(line)

    def floods(answer: Answer, reference: str) -> None:
        answer.sends(b'{"status": "')
        for _ in range(160):
            answer.sends(b"x" * (1 << 16))
        answer.sends(b'"}\r\n')
        answer.says({"error": "no space left on device"})

    monkeypatch.setattr(images, "_parse_event", measured)
    daemon.script = floods
    assert "no space left on device" in refused(stall_s=10)
    assert longest < 2 << 20


AUTH = base64.b64encode(b"somebody:s3cret").decode()


@pytest.mark.parametrize(
    ("reference", "config"),
    [
        (REFERENCE, {"auths": {"registry.invalid:5000": {"auth": AUTH}}}),
        (REFERENCE, {"auths": {"https://registry.invalid:5000/v2/": {"auth": AUTH}}}),
        (f"vllm/vllm@{DIGEST}", {"auths": {"https://index.docker.io/v1/": {"auth": AUTH}}}),
        (REFERENCE, {"credsStore": "lab"}),
        (REFERENCE, {"credHelpers": {"registry.invalid:5000": "lab"}}),
    ],
)
def test_registry_login_is_sent_only_in_the_header(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str], reference: str,
    config: dict[str, Any],
) -> None:  # fmt: skip
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text(json.dumps(config))
    helper = tmp_path / "docker-credential-lab"
    helper.write_text(
        '#!/bin/sh\nread -r host; [ "$host" = registry.invalid:5000 ] || exit 1\n'
        'echo \'{"Username": "somebody", "Secret": "s3cret"}\'\n'
    )
    helper.chmod(0o755)
    images.pull(reference, stall_s=5)
    sent = json.loads(base64.urlsafe_b64decode(daemon.auth[0] or ""))
    assert (sent["username"], sent["password"]) == ("somebody", "s3cret")
    assert "s3cret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"auths": 3}', '{"auths": {"registry.invalid:5000": {"auth": "%%%"}}}',
     '{"credsStore": "../../evil"}', '{"auths": {"other.invalid": {"auth": "eDp5"}}}'],
)  # fmt: skip
def test_pulls_anonymously_without_a_login(daemon: Daemon, tmp_path: Path, text: str) -> None:
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text(text)
    images.pull(REFERENCE, stall_s=5)
    assert daemon.auth == [None]


def test_unresponsive_docker_socket_is_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "deaf.sock"))
        listener.listen(1)
        monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(tmp_path / "deaf.sock"))
        assert "stalls" in refused()
