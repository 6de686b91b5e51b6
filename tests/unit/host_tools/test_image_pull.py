import base64
import json
import re
import time

import pytest
from socket_servers import docker_daemon, listening
from spark_contract.job import parse_progress
from spark_contract.paths import Paths
from spark_contract.tool import LAYERS_OPTION, HostToolError
from spark_host import image
from spark_host.image import PullProgress
from spark_host.system import docker
from stub_host import write_program

DIGEST = f"sha256:{'5' * 64}"
REFERENCE = f"registry.invalid:5000/lab/engine@{DIGEST}"
STALL_S = 1.0
A, B = "a" * 12, "b" * 12


def layer(name, status, current=0, total=0):
    detail = {"current": current, "total": total} if total else {}
    return {"status": status, "progressDetail": detail, "id": name}


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(tmp_path / "docker.sock"))
    monkeypatch.setattr(image, "_POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(image, "_REPORT_INTERVAL_S", 0.05)
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    monkeypatch.setattr(docker, "client_environment", lambda: environment)
    with docker_daemon(tmp_path / "docker.sock") as running:
        yield running


def pull_error(stall_s=STALL_S):
    with pytest.raises(HostToolError) as error:
        image.pull(REFERENCE, stall_s=stall_s)
    assert error.value.where == REFERENCE
    assert error.value.fix
    assert "\n" not in str(error.value)
    return str(error.value)


def test_pull_progress_sums_the_bytes_of_all_layers(daemon, capsys):
    def download(answer, reference):
        answer.send(layer(A, "Pulling fs layer"), layer(B, "Pulling fs layer"))
        answer.send(layer("c" * 12, "Already exists"), layer(A, "Downloading", 10, 40))
        time.sleep(0.2)
        answer.send(layer(B, "Downloading", 20, 60))
        time.sleep(0.2)
        answer.send(layer(A, "Download complete"), layer(B, "Download complete"))
        answer.send(layer(A, "Extracting", 7, 40))
        time.sleep(0.2)
        daemon.finish(answer, reference)

    daemon.script = download
    image.pull(REFERENCE, stall_s=STALL_S)
    reports = [parse_progress(line, 500) for line in capsys.readouterr().out.splitlines()]
    sums = {(report.phase, report.bytes, report.total) for report in reports}
    assert {("pull", 10, 500), ("pull", 30, 100), ("unpack", 7, 100)} <= sums


def repeat_status(answer, _):
    answer.repeat(layer(A, "Downloading", 3_000_000_000, 9_000_000_000))


def trickle(answer, _):
    for count in range(1, 200):
        answer.send(layer(A, "Downloading", count, 1 << 30))
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            repeat_status,
            f"the pull stalled after 3,000.0 MB: docker received no data for layer {A} in ",
        ),
        (trickle, f"the pull stalled after .* MB: docker received no data for layer {A}"),
        (lambda *_: time.sleep(5), "the pull stalled"),
    ],
)
def test_stall_ends_the_pull_and_disconnects(daemon, script, message):
    daemon.script = script
    assert re.search(message, pull_error())
    assert daemon.disconnected.wait(20)


def test_unresponsive_docker_socket_is_a_stall(tmp_path, monkeypatch):
    with listening(tmp_path / "docker.sock"):
        monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(tmp_path / "docker.sock"))
        assert "stalled" in pull_error()


def test_downloads_no_layers_of_an_image_that_docker_has(daemon, monkeypatch, tmp_path):
    daemon.images.add(REFERENCE)
    monkeypatch.setattr(image, "_pull_from_peers", lambda *_: pytest.fail("downloads layers"))
    assert image.main([LAYERS_OPTION, "layers.json", REFERENCE], Paths(tmp_path)) == 0


@pytest.mark.parametrize(("bytes_per_s", "stalls"), [(1500, False), (500, True)])
def test_only_a_download_below_the_minimum_rate_is_a_stall(bytes_per_s, stalls):
    layers = PullProgress(0.0, 60.0)
    for second in range(1, 200):
        layers.add_event(layer(A, "Downloading", second * bytes_per_s, 1 << 20), float(second))
    assert (layers.stall_message(200.0) is not None) == stalls


@pytest.mark.slow
@pytest.mark.parametrize("status", ["Verifying Checksum", "Download complete", "Extracting"])
def test_unpacking_is_not_a_stall(daemon, status):
    def unpack(answer, reference):
        answer.send(layer(A, "Downloading", 5, 5), layer(A, status))
        time.sleep(3 * STALL_S)
        daemon.finish(answer, reference)

    daemon.script = unpack
    image.pull(REFERENCE, stall_s=STALL_S)


def unpack_for(layers, seconds, *others):
    for second in range(1, seconds):
        detail = {"current": second, "units": "s"}
        layers.add_event({"id": A, "status": "Extracting", "progressDetail": detail}, float(second))
        for event in others:
            layers.add_event(
                {**event, "status": f"Retrying in {second % 7} seconds"}, float(second)
            )


def test_unpacking_time_is_limited():
    layers = PullProgress(0.0, 300.0)
    layers.add_event(layer(A, "Download complete"), 1.0)
    unpack_for(layers, 4000)
    assert layers.stall_message(3500.0) is None
    assert "docker has downloaded all layers" in str(layers.stall_message(3999.0))


def test_unpacking_does_not_hide_a_stall_in_a_different_layer():
    layers = PullProgress(0.0, 300.0)
    layers.add_event(layer(B, "Downloading", 10, 100), 1.0)
    unpack_for(layers, 400, layer(B, ""))
    assert "layer bbbb" in str(layers.stall_message(399.0))


def test_registry_errors_are_reported_on_one_short_line(daemon):
    reason = "received unexpected HTTP status: 503\n\x1b[2Jwait" + "!" * 5000
    event = {"errorDetail": {"message": reason}, "error": reason}
    daemon.script = lambda answer, _: answer.send(layer(A, "Downloading", 5, 50), event)
    message = pull_error()
    assert "received unexpected HTTP status: 503 [2Jwait!" in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("status", "data", "aborts", "message"),
    [
        (404, b'{"message": "manifest unknown"}', False, "manifest unknown"),
        (404, b"<html>", False, "status 404"),
        (200, b'{"status": "Status: half a li', False, "the image is missing"),
        (200, b'{"status":"Downloading"}\r\n', True, "docker is not running, or aborted the pull"),
        (200, b'{"status":"Downlo', True, "docker is not running, or aborted the pull"),
    ],
)
def test_pull_fails_if_the_docker_response_is_incomplete(daemon, status, data, aborts, message):
    def answer_once(answer, _):
        answer.send_bytes(data)
        if aborts:
            raise ConnectionAbortedError

    daemon.status, daemon.script = status, answer_once
    assert message in pull_error()


def test_missing_docker_daemon_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_DOCKER_SOCKET", str(tmp_path / "none.sock"))
    assert "no such file" in pull_error()


@pytest.mark.slow
def test_overlong_docker_messages_are_truncated(daemon, monkeypatch):
    lengths, parse = [], image._parse_event

    def measured(line):
        lengths.append(len(line))
        return parse(line)

    def flood(answer, _):
        answer.send_bytes(b'{"status": "')
        for _count in range(160):
            answer.send_bytes(b"x" * (1 << 16))
        answer.send_bytes(b'"}\r\n')
        answer.send({"error": "no space left on device"})

    monkeypatch.setattr(image, "_parse_event", measured)
    daemon.script = flood
    assert "no space left on device" in pull_error(stall_s=10)
    assert max(lengths) < 2 << 20


AUTH = base64.b64encode(b"somebody:s3cret").decode()
HELPER = """
read -r host; [ "$host" = registry.invalid:5000 ] || exit 1
echo '{"Username": "somebody", "Secret": "s3cret"}'
"""


def write_docker_config(home, text):
    (home / ".docker").mkdir()
    (home / ".docker/config.json").write_text(text)


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
def test_sends_the_registry_login_only_in_the_header(daemon, tmp_path, capsys, reference, config):
    write_docker_config(tmp_path, json.dumps(config))
    write_program(tmp_path / "docker-credential-lab", HELPER)
    image.pull(reference, stall_s=5)
    login = json.loads(base64.urlsafe_b64decode(daemon.auth[0] or ""))
    assert (login["username"], login["password"]) == ("somebody", "s3cret")
    assert "s3cret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"auths": 3}', '{"auths": {"registry.invalid:5000": {"auth": "%%%"}}}',
     '{"credsStore": "../../evil"}', '{"auths": {"other.invalid": {"auth": "eDp5"}}}'],
)  # fmt: skip
def test_pulls_anonymously_without_a_login(daemon, tmp_path, text):
    write_docker_config(tmp_path, text)
    image.pull(REFERENCE, stall_s=5)
    assert (daemon.pulled, daemon.auth) == ([REFERENCE], [None])
