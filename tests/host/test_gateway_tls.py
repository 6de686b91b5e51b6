"""Certificates of a gateway on the network, judged with curl and openssl from this machine."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.host.exposure import CONFIGURE, NAME, Place

pytestmark = pytest.mark.usefixtures("narrow_again")


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
    place.site.deploy().must_have_changed_nothing()


def plant(place: Place, days: int) -> None:
    """Put a certificate of the CA on the guest that ends in some days; openssl makes it."""
    ca = place.site.root / "ca"
    script = (
        "cd $(mktemp -d) && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
        f"-subj /CN=x -addext subjectAltName=IP:{place.guest.ip},DNS:{NAME} -keyout k -out r "
        f"2>/dev/null && openssl x509 -req -in r -days {days} -copy_extensions copy "
        f"-CA {ca}/ca.pem -CAkey {ca}/ca-key.pem -out c 2>/dev/null && cat c "
        "&& echo the key: && cat k"
    )
    out = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    certificate, _, key = out.partition("the key:\n")
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
    # A new key in that file is the only thing the next run changes.
    engine, old, key = place.engine(), key, key[::-1]
    mine.write_text(key + "\n")
    renewed = place.site.deploy()
    assert (renewed.exit_code, renewed.changed) == (0, [CONFIGURE])
    assert place.engine() == engine
    assert place.curl(place.url(scheme="https"), "-k", key=old) == "401"
    assert place.curl(place.url(scheme="https"), "-k", key=key) == "200"
    looks = ("journalctl -b -o cat", "systemctl cat 'spark-*'", "docker inspect $(docker ps -q)")
    everything = "\n".join(
        [
            run.stderr,
            renewed.stderr,
            json.dumps(run.document),
            *seen,
            *(place.guest.run(look) for look in looks),
        ]
    )
    for secret in (key, old, private[1], base64.b64encode(key.encode()).decode()[:20]):
        assert secret not in everything
    place.site.deploy().must_have_changed_nothing()
