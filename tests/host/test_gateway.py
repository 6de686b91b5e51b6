"""Who reaches a server, from outside: every exposure, its key and limits.

The engine is the stand-in; judged with curl, ss and docker, from this machine (the guest's network)
and from the guest itself.
"""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.exposure import CONFIGURE, HERE, NAME, QUESTION, TAILNET, Place, stream
from tests.labkit import CHECKOUT, info

pytestmark = pytest.mark.usefixtures("narrow_again")


def test_by_default_nobody_outside_reaches_it(place: Place) -> None:
    place.exposed()
    assert place.listening() == HERE
    assert place.curl(place.url()) == "curl 7"
    assert place.guest.ask(QUESTION)[0] == 200


def test_containers_reach_it_when_asked_for_and_the_network_does_not(place: Place) -> None:
    run = place.exposed(expose="docker")
    bridge = place.guest.run("ip -4 -o addr show docker0 | sed 's/.*inet //; s,/.*,,'")
    assert run.changed == [CONFIGURE]
    assert place.listening() == {*HERE, bridge}
    assert place.curl(place.url()) == "curl 7"

    image = info()["images"]["cuda-check"]
    name = f"{image['repository']}@{image['digest']}"
    place.guest.run("docker network create other")
    try:
        for words in (
            f"--add-host host.docker.internal:host-gateway {name}",
            f"--network other --add-host host.docker.internal:host-gateway {name}",
        ):
            asked = place.guest.run(
                f"KEY=$(cat /etc/spark/api-key) docker run --rm -e KEY {words} sh -c 'busybox wget "
                '-qO- --header "Authorization: Bearer $KEY" '
                f"{place.connect()['container']}/models'"
            )
            assert "lab-model" in asked
            refused = place.guest.run(
                f"docker run --rm {words} busybox wget -qO- {place.connect()['container']}/models",
                check=False,
            )
            assert "lab-model" not in refused
    finally:
        place.guest.run("docker network rm other")


@pytest.fixture
def tailscale(place: Place, tmp_path: Path) -> Iterator[None]:
    """The lab's stand-in for tailscale on the guest, not up yet."""
    deb = tmp_path / "tailscale.deb"
    stub = CHECKOUT / "lab/stubs/tailscale"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", stub, deb], check=True)
    text = base64.b64encode(deb.read_bytes()).decode()
    place.guest.run(f"echo {text} | base64 -d > /root/t.deb && dpkg -i /root/t.deb")
    yield
    place.guest.run("tailscale down; dpkg -r tailscale", check=False)


@pytest.mark.usefixtures("tailscale")
def test_a_tailnet_is_refused_until_it_is_up_and_then_bound(place: Place) -> None:
    before = place.engine()
    refused = place.deploy(expose="tailscale")
    assert refused.exit_code != 0
    assert "tailscale: has no address on this host: no current Tailscale IPs" in refused.stderr
    assert "tailscale up" in refused.stderr
    assert place.engine() == before
    assert place.listening() == HERE

    place.guest.run("tailscale up")
    place.exposed(address=None, expose="tailscale")
    assert place.listening() == {*HERE, TAILNET}
    assert place.curl(place.url()) == "curl 7"
    assert place.connect()["base_url"] == f"http://{TAILNET}:8000/v1"
    code = "curl -s -o /dev/null -w '%{http_code} '"
    tailnet = f"http://{TAILNET}:8000"
    asked = f"{code} {tailnet}/health; {code} {tailnet}/v1/models"
    assert place.guest.run(asked).split() == ["200", "401"]

    # The tunnel goes and comes: this host is served all the time, and nobody has to deploy.
    place.guest.run("tailscale down")
    place.guest.wait(f"! ss -Hltn 'sport = :8000' | grep -q {TAILNET}", seconds=30)
    assert place.guest.ask(QUESTION)[0] == 200
    place.guest.run("tailscale up")
    place.guest.wait(f"ss -Hltn 'sport = :8000' | grep -q {TAILNET}", seconds=30)
    place.site.deploy().must_have_changed_nothing()


def test_the_network_needs_the_key_and_sees_only_what_is_allowed(place: Place) -> None:
    place.exposed(expose="lan")
    assert {*HERE, "0.0.0.0"} <= place.listening()
    assert place.curl(place.url()) == "200"
    assert place.curl(place.url(), key=None) == "401"
    assert place.curl(place.url(), key="wrong-key-0123456789") == "401"
    for path in ("/metrics", "/invocations", "/tokenize", "/version", "/docs", "/v1/load_lora"):
        assert place.curl(place.url(path)) == "404", path
    chat = {"model": "lab-model", "messages": [{"role": "user", "content": QUESTION}]}
    for path, body in {
        "/v1/chat/completions": chat,
        "/v1/messages": {**chat, "max_tokens": 50},
        "/v1/completions": {"model": "lab-model", "prompt": QUESTION},
    }.items():
        assert place.curl(place.url(path), body=body) == "200", path


def test_requests_over_the_limits_are_refused_without_touching_the_engine(place: Place) -> None:
    place.exposed(expose="lan", max_body_mib=1, max_requests_per_s=2)
    body = {"model": "lab-model", "prompt": "x" * (2 << 20)}
    # Too long for an argument; curl reads it from a file.
    big = place.site.root / "big.json"
    big.write_text(json.dumps(body))
    assert place.curl(place.url("/v1/completions"), "-d", f"@{big}") == "413"
    seen: list[str] = []
    key = place.guest.key()
    askers = [
        threading.Thread(target=lambda: seen.append(place.curl(place.url(), key=key)))
        for _ in range(12)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert set(seen) == {"200", "429"}


def test_a_new_key_holds_at_once_and_the_engine_goes_on(place: Place) -> None:
    place.exposed(expose="lan")
    old, engine = place.guest.key(), place.engine()
    answer = stream(place, old)
    first = answer.stdout.readline()
    rotated = place.site.deploy(deploy="deploys/rotate_key.py")
    new = place.guest.key()

    assert rotated.exit_code == 0, rotated.stderr[-3000:]
    assert len(rotated.changed) == 1
    assert first.startswith("data: ")
    assert "[DONE]" in answer.communicate(timeout=60)[0]
    assert new != old
    assert place.curl(place.url(), key=old) == "401"
    assert place.curl(place.url(), key=new) == "200"
    assert place.engine() == engine
    place.site.deploy().must_have_changed_nothing()


def test_pieces_of_an_answer_come_one_by_one(place: Place) -> None:
    place.exposed(expose="lan")
    answer = stream(place, place.guest.key(), letters=80)
    arrivals = [time.monotonic() for line in answer.stdout if line.startswith("data: ")]
    assert len(arrivals) >= 20
    gaps = sorted(b - a for a, b in itertools.pairwise(arrivals))
    # 50 ms apart at the engine; a buffer would give many together and long waits between.
    assert gaps[len(gaps) // 2] > 0.03
    assert arrivals[-1] - arrivals[0] > 0.8


def test_answers_under_way_are_finished_while_new_requests_are_sent_away(place: Place) -> None:
    place.exposed(expose="lan", drain_s=10)
    key, before = place.guest.key(), place.guest.serving()
    place.site.choose(profile="v2-tq")
    change = place.site.start()
    # Begun just before the change, so that the drain meets it: eight seconds of answer.
    assert any(f"Serve the release on {NAME}" in line for line in change.stdout or ())
    answer = stream(place, key, letters=640)
    assert answer.stdout.readline().startswith("data: ")
    refused = ""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and refused != "503":
        refused = place.curl(place.url(), key=key)
    under_way = answer.poll() is None
    text, _ = answer.communicate(timeout=60)
    change.communicate(timeout=300)
    place.site.choose(profile="v2")

    assert (refused, under_way) == ("503", True)
    assert text.rstrip().endswith("data: [DONE]")
    assert change.returncode == 0
    assert place.guest.serving() != before
    back = place.site.deploy()
    assert back.exit_code == 0
    assert place.guest.serving() == before
