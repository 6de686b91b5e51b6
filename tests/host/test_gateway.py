import base64
import itertools
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.host.gateway_host import CONFIGURE, LOOPBACK, NAME, QUESTION, TAILNET, stream
from tests.labkit import CHECKOUT, info

pytestmark = pytest.mark.usefixtures("close_gateway_afterwards")


def test_gateway_is_closed_to_the_network_by_default(gateway):
    gateway.deploy_only_gateway()
    assert gateway.listening() == LOOPBACK
    assert gateway.curl(gateway.url()) == "curl 7"
    assert gateway.guest.answers()


@pytest.fixture
def other_network(gateway):
    gateway.guest.run("docker network create other")
    yield
    gateway.guest.run("docker network rm other")


@pytest.mark.usefixtures("other_network")
def test_gateway_can_be_open_to_containers_but_not_to_the_network(gateway):
    run = gateway.deploy_only_gateway(expose="docker")
    bridge = gateway.guest.run("ip -4 -o addr show docker0 | sed 's/.*inet //; s,/.*,,'")
    assert run.changed == [CONFIGURE]
    assert gateway.listening() == {*LOOPBACK, bridge}
    assert gateway.curl(gateway.url()) == "curl 7"

    image = info()["images"]["cuda-check"]
    url = f"{gateway.connect()['container']}/models"
    for network in ("", "--network other"):
        container = (
            f"docker run --rm -e KEY {network} --add-host host.docker.internal:host-gateway "
            f"{image['repository']}@{image['digest']}"
        )
        with_key = f"sh -c 'busybox wget -qO- --header \"Authorization: Bearer $KEY\" {url}'"
        listed = gateway.guest.run(f"KEY=$(cat /etc/spark/api-key) {container} {with_key}")
        assert "lab-model" in listed
        refused = gateway.guest.run(f"{container} busybox wget -qO- {url}", check=False)
        assert "lab-model" not in refused


@pytest.fixture
def tailscale(gateway, tmp_path):
    deb = tmp_path / "tailscale.deb"
    stub = CHECKOUT / "lab/stubs/tailscale"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", stub, deb], check=True)
    text = base64.b64encode(deb.read_bytes()).decode()
    gateway.guest.run(f"echo {text} | base64 -d > /root/t.deb && dpkg -i /root/t.deb")
    yield
    gateway.guest.run("tailscale down; dpkg -r tailscale", check=False)


@pytest.mark.usefixtures("tailscale")
def test_gateway_listens_on_the_tailnet_only_while_tailscale_is_up(gateway):
    before = gateway.engine()
    refused = gateway.deploy(expose="tailscale")
    assert refused.exit_code != 0
    assert "tailscale up" in refused.stderr
    assert gateway.engine() == before
    assert gateway.listening() == LOOPBACK

    gateway.guest.run("tailscale up")
    gateway.deploy_only_gateway(address=None, expose="tailscale")
    assert gateway.listening() == {*LOOPBACK, TAILNET}
    assert gateway.curl(gateway.url()) == "curl 7"
    assert gateway.connect()["base_url"] == f"http://{TAILNET}:8000/v1"
    code = "curl -s -o /dev/null -w '%{http_code} '"
    tailnet = f"http://{TAILNET}:8000"
    probe = f"{code} {tailnet}/health; {code} {tailnet}/v1/models"
    assert gateway.guest.run(probe).split() == ["200", "401"]

    gateway.guest.run("tailscale down")
    gateway.guest.wait(f"! ss -Hltn 'sport = :8000' | grep -q {TAILNET}", seconds=30)
    assert gateway.guest.answers()
    gateway.guest.run("tailscale up")
    gateway.guest.wait(f"ss -Hltn 'sport = :8000' | grep -q {TAILNET}", seconds=30)
    gateway.site.deploy().assert_unchanged()


def test_network_clients_need_a_key_and_reach_only_allowed_paths(gateway):
    gateway.deploy_only_gateway(expose="lan")
    assert {*LOOPBACK, "0.0.0.0"} <= gateway.listening()
    assert gateway.curl(gateway.url()) == "200"
    assert gateway.curl(gateway.url(), key=None) == "401"
    assert gateway.curl(gateway.url(), key="wrong-key-0123456789") == "401"
    for path in ("/metrics", "/invocations", "/tokenize", "/version", "/docs", "/v1/load_lora"):
        assert gateway.curl(gateway.url(path)) == "404", path
    chat = {"model": "lab-model", "messages": [{"role": "user", "content": QUESTION}]}
    for path, body in {
        "/v1/chat/completions": chat,
        "/v1/messages": {**chat, "max_tokens": 50},
        "/v1/completions": {"model": "lab-model", "prompt": QUESTION},
    }.items():
        assert gateway.curl(gateway.url(path), body=body) == "200", path


def test_gateway_rejects_requests_over_the_limits(gateway):
    gateway.deploy_only_gateway(expose="lan", max_body_mib=1, max_requests_per_s=2)
    body = {"model": "lab-model", "prompt": "x" * (2 << 20)}
    big = gateway.site.root / "big.json"
    big.write_text(json.dumps(body))
    assert gateway.curl(gateway.url("/v1/completions"), "-d", f"@{big}") == "413"
    key = gateway.guest.key()
    with ThreadPoolExecutor(12) as pool:
        requests = [pool.submit(gateway.curl, gateway.url(), key=key) for _ in range(12)]
    assert {request.result() for request in requests} == {"200", "429"}


def test_new_api_key_is_accepted_at_once_without_engine_restart(gateway):
    gateway.deploy_only_gateway(expose="lan")
    old, engine = gateway.guest.key(), gateway.engine()
    answer = stream(gateway, old)
    first = answer.stdout.readline()
    rotated = gateway.site.deploy(deploy="deploys/rotate_key.py")
    new = gateway.guest.key()

    assert rotated.exit_code == 0, rotated.stderr[-3000:]
    assert len(rotated.changed) == 1
    assert first.startswith("data: ")
    assert "[DONE]" in answer.communicate(timeout=60)[0]
    assert new != old
    assert gateway.curl(gateway.url(), key=old) == "401"
    assert gateway.curl(gateway.url(), key=new) == "200"
    assert gateway.engine() == engine
    gateway.site.deploy().assert_unchanged()


def test_gateway_streams_tokens_without_buffering(gateway):
    gateway.deploy_only_gateway(expose="lan")
    answer = stream(gateway, gateway.guest.key(), letters=80)
    assert answer.stdout is not None
    arrivals = [time.monotonic() for line in answer.stdout if line.startswith("data: ")]
    assert len(arrivals) >= 20
    gaps = sorted(b - a for a, b in itertools.pairwise(arrivals))
    assert gaps[len(gaps) // 2] > 0.03
    assert arrivals[-1] - arrivals[0] > 0.8


def test_drain_finishes_in_flight_responses_and_rejects_new_requests(gateway):
    gateway.deploy_only_gateway(expose="lan", drain_s=10)
    key, before = gateway.guest.key(), gateway.guest.serving()
    gateway.site.choose(profile="v2-tq")
    change = gateway.site.start()
    assert any(f"Serve the release on {NAME}" in line for line in change.stdout or ())
    answer = stream(gateway, key, letters=640)
    assert answer.stdout.readline().startswith("data: ")
    refused = ""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and refused != "503":
        refused = gateway.curl(gateway.url(), key=key)
    still_running = answer.poll() is None
    text, _ = answer.communicate(timeout=60)
    change.communicate(timeout=300)
    gateway.site.choose(profile="v2")

    assert (refused, still_running) == ("503", True)
    assert text.rstrip().endswith("data: [DONE]")
    assert change.returncode == 0
    assert gateway.guest.serving() != before
    gateway.site.deploy().assert_succeeded()
    assert gateway.guest.serving() == before
