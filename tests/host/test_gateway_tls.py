import base64
import json
import shlex
import subprocess
import threading
from pathlib import Path

import pytest

from tests.host.gateway_host import CONFIGURE, NAME

pytestmark = pytest.mark.usefixtures("close_gateway_afterwards")


def private_ca(gateway):
    return {"expose": "lan", "tls": "private-ca", "ca_dir": str(gateway.site.root / "ca")}


def test_private_ca_issues_and_renews_certificates(gateway):
    private = private_ca(gateway)
    gateway.deploy_only_gateway(**private)
    shown = gateway.connect()
    assert shown["ca"] == f"{private['ca_dir']}/ca.pem"
    assert gateway.curl(gateway.url(scheme="https"), "--cacert", shown["ca"]) == "200"
    assert gateway.curl(gateway.url(scheme="https")) == "curl 60"
    assert gateway.curl(gateway.url()) == "400"
    verified = subprocess.run(
        ["openssl", "s_client", "-connect", f"{gateway.guest.ip}:8000", "-CAfile", shown["ca"],
         "-verify_ip", gateway.guest.ip],
        input="", capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert "Verify return code: 0 (ok)" in verified
    assert gateway.guest.run("stat -c '%a %U' /etc/spark/gateway/main.key") == "600 root"
    assert (gateway.site.root / "ca/ca-key.pem").stat().st_mode & 0o777 == 0o600
    out = subprocess.run(["sh", "-c", shown["example"]], capture_output=True, text=True, check=True)
    assert "35352137" in out.stdout

    before = gateway.guest.run("cat /etc/spark/gateway/main.crt")
    install_expiring_certificate(gateway, days=20)
    renewed = gateway.site.deploy()
    assert renewed.changed == [CONFIGURE]
    after = gateway.guest.run("cat /etc/spark/gateway/main.crt")
    assert after not in (before, "")
    assert gateway.curl(gateway.url(scheme="https"), "--cacert", shown["ca"]) == "200"
    gateway.site.deploy().assert_unchanged()


def install_expiring_certificate(gateway, days):
    ca = gateway.site.root / "ca"
    script = (
        "cd $(mktemp -d) && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
        f"-subj /CN=x -addext subjectAltName=IP:{gateway.guest.ip},DNS:{NAME} -keyout k -out r "
        f"2>/dev/null && openssl x509 -req -in r -days {days} -copy_extensions copy "
        f"-CA {ca}/ca.pem -CAkey {ca}/ca-key.pem -out c 2>/dev/null && cat c "
        "&& echo the key: && cat k"
    )
    out = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    certificate, _, key = out.partition("the key:\n")
    for path, text in (("crt", certificate), ("key", key)):
        gateway.guest.run(f"printf %s {shlex.quote(text)} > /etc/spark/gateway/main.{path}")


def own_certificate(gateway, names, stem="own", days=90):
    certificate, key = (gateway.site.root / f"{stem}{end}" for end in (".pem", "-key.pem"))
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


def test_user_provided_certificate_is_checked_before_connecting_then_served(gateway):
    right = own_certificate(gateway, f"IP:{gateway.guest.ip}")
    wrong_name = own_certificate(gateway, "DNS:other.example.org", "name")
    wrong_key = {**right, "tls_key": wrong_name["tls_key"]}
    connections = "journalctl -u ssh -o cat | grep -c 'Accepted publickey'"
    for settings in (wrong_name, wrong_key, {**right, "tls_key": "/nowhere.pem"}):
        before = int(gateway.guest.run(connections))
        refused = gateway.deploy(**settings)
        assert refused.exit_code != 0
        assert "fix: " in refused.stderr
        assert int(gateway.guest.run(connections)) == before + 1

    gateway.deploy_only_gateway(**right)
    trust = ("--cacert", right["tls_certificate"])
    assert gateway.curl(gateway.url(scheme="https"), *trust) == "200"
    assert gateway.curl(gateway.url(scheme="https"), *trust, key=None) == "401"
    assert gateway.connect()["ca"] is None
    assert gateway.guest.run("stat -c '%a %U' /etc/spark/gateway/main.key") == "600 root"

    gateway.deploy_only_gateway()
    assert gateway.guest.run("ls /etc/spark/gateway") == "main.json"


def test_private_keys_never_appear_in_output_arguments_or_logs(gateway):
    key = "a-key-of-my-own-0123456789"
    key_file = gateway.site.root / "api-key"
    key_file.write_text(key + "\n")
    right = own_certificate(gateway, f"IP:{gateway.guest.ip}")
    private = Path(right["tls_key"]).read_text().splitlines()
    processes: list[str] = []
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            processes.append(gateway.guest.run("ps axww -o args", check=False))

    watcher = threading.Thread(target=watch)
    watcher.start()
    run = gateway.deploy("--diff", "-vvv", **right, api_key={"file": str(key_file)})
    stop.set()
    watcher.join()
    assert run.exit_code == 0, run.stderr[-3000:]
    assert gateway.curl(gateway.url(scheme="https"), "-k", key=key) == "200"
    engine, old, key = gateway.engine(), key, key[::-1]
    key_file.write_text(key + "\n")
    renewed = gateway.site.deploy()
    assert (renewed.exit_code, renewed.changed) == (0, [CONFIGURE])
    assert gateway.engine() == engine
    assert gateway.curl(gateway.url(scheme="https"), "-k", key=old) == "401"
    assert gateway.curl(gateway.url(scheme="https"), "-k", key=key) == "200"
    commands = ("journalctl -b -o cat", "systemctl cat 'spark-*'", "docker inspect $(docker ps -q)")
    outputs = [run.stderr, renewed.stderr, json.dumps(run.document), *processes]
    everything = "\n".join(outputs + [gateway.guest.run(command) for command in commands])
    for secret in (key, old, private[1], base64.b64encode(key.encode()).decode()[:20]):
        assert secret not in everything
    gateway.site.deploy().assert_unchanged()
