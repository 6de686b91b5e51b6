"""Who reaches a server, from outside: every exposure, its certificate, key and limits.

The engine is the stand-in; judged with curl, openssl, ss and docker, from this machine (the
guest's network) and from the guest itself.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.labkit import CHECKOUT, Guest, Run, Site, info, lab

NAME = "lab-12"
CONFIGURE = "Serve | Configure the gateway"
QUESTION = "What is 7823 * 4519?"
TAILNET = "100.101.102.103"
# A piece each 50 ms: what a buffer would hold back is seen.
SLOW = {"STUB_PIECE_S": "0.05"}


@dataclass
class Place:
    """The guest and the user's repository."""

    site: Site
    guest: Guest

    def deploy(self, *arguments: str, **serve: Any) -> Run:
        """Deploy with these choices for the gateway, and no others of earlier tests."""
        self.site.choices["serve"] = {"address": self.guest.ip, **serve}
        self.site.choose()
        return self.site.deploy(*arguments)

    def exposed(self, **serve: Any) -> Run:
        """Deploy, and insist that only the gateway changed and nothing is left to change."""
        engine = self.engine()
        run = self.deploy(**serve)
        assert run.exit_code == 0, run.stderr[-3000:]
        assert run.changed in ([CONFIGURE], []), run.changed
        again = self.site.deploy()
        assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
        assert self.engine() == engine
        return run

    def engine(self) -> str:
        """Return what identifies the running engine: unit, run, process."""
        unit = self.guest.serving()[0]
        shown = self.guest.run(f"systemctl show -p InvocationID,MainPID,NRestarts {unit}")
        return f"{unit} {shown}"

    def listening(self) -> set[str]:
        """Return the addresses of the gateway's port, by ss."""
        out = self.guest.run("ss -Hltn 'sport = :8000' | awk '{print $4}'")
        return {line.rpartition(":")[0] for line in out.split()}

    def curl(self, url: str, *words: str, key: str | None = "", body: Any = None) -> str:
        """Ask from this machine; return the status, or curl's own error as ``curl N``.

        The host's own key is used for ``""`` and travels on standard input, none for ``None``.
        """
        secret = self.guest.key() if key == "" else key
        given = f'header = "Authorization: Bearer {secret}"' if secret else ""
        more = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body else []
        done = subprocess.run(
            ["curl", "-K", "-", "-sS", "-m", "30", "-o", "/dev/null", "-w", "%{http_code}",
             *words, *more, url],
            input=given, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else f"curl {done.returncode}"

    def url(self, path: str = "/v1/models", scheme: str = "http") -> str:
        return f"{scheme}://{self.guest.ip}:8000{path}"

    def connect(self) -> dict[str, Any]:
        """Return what `spark-deploy connect` says."""
        out = subprocess.run(
            [sys.executable, "-m", "spark_deploy", "connect",
             str(self.site.root / "inventory/lab.py"), "--limit", NAME, "--json"],
            capture_output=True, text=True, check=True, cwd=CHECKOUT,
        ).stdout  # fmt: skip
        return json.loads(out)[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    if os.geteuid() != 0:
        pytest.skip("the virtual lab needs root")
    lab("up", NAME, "--fresh", "--engine", "stub")
    guest = next(Guest(one["name"], one["ip"]) for one in info()["guests"] if one["name"] == NAME)
    site = Site(tmp_path_factory.mktemp("gateway"), hosts=[NAME])
    made = Place(site, guest)
    site.choose(model="lab-stub", profile="v2", engine={"environment": SLOW})
    first = made.deploy()
    assert first.exit_code == 0, first.stderr[-4000:]
    return made


@pytest.fixture(autouse=True)
def narrow_again(place: Place) -> Iterator[None]:
    yield
    assert place.deploy().exit_code == 0
    assert place.listening() == {"127.0.0.1"}


def test_by_default_nobody_outside_reaches_it(place: Place) -> None:
    place.exposed()
    assert place.listening() == {"127.0.0.1"}
    assert place.curl(place.url()) == "curl 7"
    assert place.guest.ask(QUESTION)[0] == 200


def test_containers_reach_it_when_asked_for_and_the_network_does_not(place: Place) -> None:
    run = place.exposed(expose="docker")
    bridge = place.guest.run("ip -4 -o addr show docker0 | sed 's/.*inet //; s,/.*,,'")
    assert run.changed == [CONFIGURE]
    assert place.listening() == {"127.0.0.1", bridge}
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
    assert (refused.changed, place.engine()) == ([], before)
    assert place.listening() == {"127.0.0.1"}

    place.guest.run("tailscale up")
    place.exposed(address=None, expose="tailscale")
    assert place.listening() == {"127.0.0.1", TAILNET}
    assert place.curl(place.url()) == "curl 7"
    assert place.connect()["base_url"] == f"http://{TAILNET}:8000/v1"
    assert place.guest.run(f"curl -s -o /dev/null -w '%{{http_code}}' http://{TAILNET}:8000/health")

    # The tunnel goes and comes: this host is served all the time, and nobody has to deploy.
    place.guest.run("tailscale down")
    place.guest.wait(f"! ss -Hltn 'sport = :8000' | grep -q {TAILNET}", seconds=30)
    assert place.guest.ask(QUESTION)[0] == 200
    place.guest.run("tailscale up")
    place.guest.wait(f"ss -Hltn 'sport = :8000' | grep -q {TAILNET}", seconds=30)
    assert place.site.deploy().changed == []


def test_the_network_needs_the_key_and_sees_only_what_is_allowed(place: Place) -> None:
    place.exposed(expose="lan")
    assert {"127.0.0.1", "0.0.0.0"} <= place.listening()
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


def ca_of(place: Place) -> dict[str, Any]:
    return {"expose": "lan", "tls": "private-ca", "ca_dir": str(place.site.root / "ca")}


def test_a_private_ca_is_made_once_and_hosts_get_certificates_of_it(place: Place) -> None:
    private = ca_of(place)
    place.exposed(**private)
    said = place.connect()
    assert said["ca"] == f"{private['ca_dir']}/ca.pem"
    assert place.curl(place.url(scheme="https"), "--cacert", said["ca"]) == "200"
    assert place.curl(place.url(scheme="https")) == "curl 60"  # nobody else vouches for it
    assert place.curl(place.url()) == "400"
    look = subprocess.run(
        ["openssl", "s_client", "-connect", f"{place.guest.ip}:8000", "-CAfile", said["ca"],
         "-verify_ip", place.guest.ip],
        input="", capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert "Verify return code: 0 (ok)" in look
    assert place.guest.run("stat -c '%a %U' /etc/spark/gateway/main.key") == "600 root"
    assert (place.site.root / "ca/ca-key.pem").stat().st_mode & 0o777 == 0o600
    # What `connect` prints is what works, to the letter.
    out = subprocess.run(["sh", "-c", said["example"]], capture_output=True, text=True, check=True)
    assert "35352137" in out.stdout

    # A certificate that ends soon is the only thing the next run changes.
    made = place.guest.run("cat /etc/spark/gateway/main.crt")
    plant(place, days=20)
    renewed = place.site.deploy()
    assert renewed.changed == [CONFIGURE]
    assert "it ends on" in renewed.stderr
    now = place.guest.run("cat /etc/spark/gateway/main.crt")
    assert now not in (made, "")
    assert place.curl(place.url(scheme="https"), "--cacert", said["ca"]) == "200"
    assert place.site.deploy().changed == []


def plant(place: Place, days: int) -> None:
    """Put a certificate of the CA on the guest that ends in some days; openssl makes it."""
    ca = place.site.root / "ca"
    script = (
        "cd $(mktemp -d) && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
        f"-subj /CN=x -addext subjectAltName=IP:{place.guest.ip},DNS:{NAME} -keyout k -out r "
        f"2>/dev/null && openssl x509 -req -in r -days {days} -copy_extensions copy "
        f"-CA {ca}/ca.pem -CAkey {ca}/ca-key.pem -out c 2>/dev/null && cat c && echo == && cat k"
    )
    out = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    certificate, _, key = out.partition("==\n")
    for path, text in (("crt", certificate), ("key", key)):
        place.guest.run(f"printf %s {shlex.quote(text)} > /etc/spark/gateway/main.{path}")


def own(place: Place, names: str, stem: str = "own", days: int = 90) -> dict[str, Any]:
    """Make a certificate of the user's own with openssl; return the settings for it."""
    certificate, key = (place.site.root / f"{stem}{end}" for end in (".pem", "-key.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-addext",
         f"subjectAltName={names}", "-days", str(days), "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
    return {
        "expose": "lan", "tls": "own-cert",
        "tls_certificate": str(certificate), "tls_key": str(key),
    }  # fmt: skip


def test_an_own_certificate_is_judged_before_any_connection_and_then_served(place: Place) -> None:
    right = own(place, f"IP:{place.guest.ip}")
    wrong_name = own(place, "DNS:other.example.org", "name")
    wrong_key = {**right, "tls_key": wrong_name["tls_key"]}
    connections = "journalctl -u ssh -o cat | grep -c 'Accepted publickey'"
    for settings, words in (
        (wrong_name, f"is for other.example.org, not {place.guest.ip}"),
        (wrong_key, "is not the key of"),
        ({**right, "tls_key": "/nowhere.pem"}, "cannot be read"),
    ):
        before = int(place.guest.run(connections))
        refused = place.deploy(**settings)
        assert refused.exit_code != 0
        assert words in refused.stderr
        assert int(place.guest.run(connections)) == before + 1  # the look itself

    place.exposed(**right)
    trust = ("--cacert", right["tls_certificate"])
    assert place.curl(place.url(scheme="https"), *trust) == "200"
    assert place.curl(place.url(scheme="https"), *trust, key=None) == "401"
    assert place.connect()["ca"] is None
    assert place.guest.run("stat -c '%a %U' /etc/spark/gateway/main.key") == "600 root"

    place.exposed()
    assert place.guest.run("ls /etc/spark/gateway") == "main.json"


def test_secrets_are_in_no_output_argv_or_log(place: Place) -> None:
    key = "a-key-of-my-own-0123456789"
    mine = place.site.root / "api-key"
    mine.write_text(key + "\n")
    right = own(place, f"IP:{place.guest.ip}")
    private = Path(right["tls_key"]).read_text().splitlines()
    seen: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(place.guest.run("ps axww -o args", check=False))

    watcher = threading.Thread(target=watch)
    watcher.start()
    # What the host made stays with the host: taken away, so that the next test gets a new one.
    run = place.deploy("--diff", "-vvv", **right, api_key={"file": str(mine)})
    stop.set()
    watcher.join()
    assert run.exit_code == 0, run.stderr[-3000:]
    assert place.curl(place.url(scheme="https"), "-k", key=key) == "200"
    looks = ("journalctl -b -o cat", "systemctl cat 'spark-*'", "docker inspect $(docker ps -q)")
    everything = "\n".join(
        [run.stderr, json.dumps(run.document), *seen, *(place.guest.run(look) for look in looks)]
    )
    for secret in (key, private[1], base64.b64encode(key.encode()).decode()[:20]):
        assert secret not in everything
    assert place.site.deploy().changed == []


def test_a_new_key_holds_at_once_and_the_engine_goes_on(place: Place) -> None:
    place.exposed(expose="lan")
    old, engine = place.guest.key(), place.engine()
    answer = stream(place, old)
    first = answer.stdout.readline()
    rotated = place.site.deploy(deploy="deploys/rotate_key.py")
    new = place.guest.key()

    assert rotated.exit_code == 0, rotated.stderr[-3000:]
    assert first.startswith("data: ")
    assert "[DONE]" in answer.communicate(timeout=60)[0]
    assert new != old
    assert place.curl(place.url(), key=old) == "401"
    assert place.curl(place.url(), key=new) == "200"
    assert place.engine() == engine
    assert place.site.deploy().changed == []


def stream(place: Place, key: str, letters: int = 200) -> subprocess.Popen[str]:
    """Begin a streamed answer of one piece for each four letters, read as it comes."""
    body = {
        "model": "lab-model", "stream": True,
        "messages": [{"role": "user", "content": "Repeat exactly: " + "abcd" * (letters // 4)}],
    }  # fmt: skip
    curl = subprocess.Popen(
        ["curl", "-K", "-", "-sSN", "-m", "90", "-H", "Content-Type: application/json",
         "-d", json.dumps(body), place.url("/v1/chat/completions")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    curl.stdin.write(f'header = "Authorization: Bearer {key}"\n')
    curl.stdin.close()
    curl.stdin = None
    return curl


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
    answer = stream(place, key, letters=400)  # five seconds
    assert answer.stdout.readline().startswith("data: ")
    place.site.choose(profile="v2-tq")
    change = place.site.start()
    refused = ""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not refused.startswith("503"):
        refused = place.curl(place.url(), "-D", "/dev/stderr", key=key)
    text, _ = answer.communicate(timeout=60)
    change.communicate(timeout=300)
    place.site.choose(profile="v2")

    assert refused == "503"
    assert text.rstrip().endswith("data: [DONE]")
    assert change.returncode == 0
    assert place.guest.serving() != before
    back = place.site.deploy()
    assert back.exit_code == 0
    assert place.guest.serving() == before
