import json
import os
import socket
import subprocess

import pytest
from gateway_client import CHAT, OWN_KEY, QUESTION
from simulated_host import Killed
from spark_contract.tool import HostToolError
from spark_host.gateway import gateway, listeners, nginx
from stub_host import write_certificate, write_program


def listening(client):
    done = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True)
    ends = (line.split()[3].rpartition(":") for line in done.stdout.splitlines())
    return {address for address, _, port in ends if port == str(client.settings.port)}


def apply_settings(client, **settings):
    client.host.gateway(port=client.settings.port, **settings)
    gateway.reload("main", client.host.paths)


def difference(client):
    return gateway.find_difference("main", client.host.paths)


LOOPBACK = {"127.0.0.1"} | ({"[::1]"} if socket.has_ipv6 and listeners._is_local("::1") else set())


def lan_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def tls_handshake(client, *options):
    address = f"{lan_address()}:{client.settings.port}"
    return subprocess.run(
        ["openssl", "s_client", "-connect", address, *options],
        input="", capture_output=True, text=True, check=False, timeout=20,
    ).stdout  # fmt: skip


def curl(*options):
    command = ["curl", "-s", "-w", "%{http_code}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_changing_the_exposure_does_not_interrupt_in_flight_responses(client):
    port, pid = client.settings.port, client.process.pid
    assert listening(client) == LOOPBACK
    answer = client.start_long_answer()

    client.host.gateway(port=port, expose="lan")
    assert "changed" in str(difference(client))
    gateway.reload("main", client.host.paths)
    assert {*LOOPBACK, "0.0.0.0"} <= listening(client)
    assert difference(client) is None

    apply_settings(client)
    assert listening(client) == LOOPBACK
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((lan_address(), port), 2)
    assert answer.read().rstrip().endswith(b"data: [DONE]")
    assert client.process.pid == pid
    assert client.process.poll() is None


def test_status_is_readable_while_the_gateway_exits(client, monkeypatch):
    is_applied = gateway._is_applied

    def exit_meanwhile(*words):
        client.process.kill()
        client.process.wait()
        return is_applied(*words)

    monkeypatch.setattr(gateway, "_is_applied", exit_meanwhile)
    assert difference(client) is None


def test_reload_sets_no_time_limit_for_running_responses(host):
    # 262,144 tokens can take more than an hour.
    assert "worker_shutdown_timeout" not in nginx.render_config(host.gateway(), host.paths)


def test_lan_uses_tls_and_loopback_does_not(client):
    apply_settings(client, expose="lan", tls=write_certificate(client.host.paths))
    root = str(client.host.paths.root / "etc/spark/gateway/main.certificate")
    trust = ("-CAfile", root, "-verify_hostname", "spark.example.org", "-verify_return_error")
    assert "Verify return code: 0 (ok)" in tls_handshake(client, *trust)
    assert "TLSv1.3" in tls_handshake(client)
    assert "Cipher is (NONE)" in tls_handshake(client, "-tls1_1")
    assert client.status(CHAT, QUESTION) == 200

    server = f"spark.example.org:{client.settings.port}"
    resolve = ("--cacert", root, "--resolve", f"{server}:{lan_address()}", "-o", "/dev/null")
    assert curl(*resolve, f"https://{server}/v1/models") == "401"
    plain = curl(f"http://{lan_address()}:{client.settings.port}/v1/models")
    assert plain.endswith("400")
    assert "requires https" in plain


@pytest.mark.slow
def test_tls_1_2_allows_only_authenticated_ciphers(client):
    apply_settings(client, expose="lan", tls=write_certificate(client.host.paths))
    for cipher in ("ECDHE+AES+SHA256", "ECDHE+AES+SHA1", "AES128-GCM-SHA256", "DHE+AESGCM"):
        suffix = ":!AESGCM@SECLEVEL=0" if "AES+" in cipher else "@SECLEVEL=0"
        weak = tls_handshake(client, "-tls1_2", "-cipher", f"{cipher}{suffix}")
        assert "Cipher is (NONE)" in weak, cipher
    assert "Cipher is ECDHE-" in tls_handshake(client, "-tls1_2", "-cipher", "ECDHE+AESGCM")


def test_reload_applies_a_renewed_certificate(client):
    apply_settings(client, expose="lan", tls=write_certificate(client.host.paths))
    first = tls_handshake(client, "-showcerts")
    write_certificate(client.host.paths)
    assert "changed" in str(difference(client))
    gateway.reload("main", client.host.paths)
    assert tls_handshake(client, "-showcerts") != first
    assert difference(client) is None


def test_gateway_keeps_running_if_the_new_certificate_is_invalid(client):
    tls = write_certificate(client.host.paths)
    tls["key"] = write_certificate(client.host.paths, "other")["key"]
    with pytest.raises(HostToolError, match="nginx rejects"):
        apply_settings(client, expose="lan", tls=tls)
    assert listening(client) == LOOPBACK
    assert client.status(CHAT, QUESTION) == 200


@pytest.mark.parametrize("step", ["_worker_pids", "wait_until_listening", "_update_on_demand_unit"])
def test_unfinished_reload_remains_a_difference_until_it_is_repeated(client, monkeypatch, step):
    def die(*_):
        raise Killed

    assert difference(client) is None
    with monkeypatch.context() as patch:
        patch.setattr(gateway, step, die)
        with pytest.raises(Killed):
            apply_settings(client, max_requests_per_s=1)
    assert "since the last reload" in str(difference(client))
    gateway.reload("main", client.host.paths)
    assert difference(client) is None


def test_requests_above_the_limit_get_429_with_retry_after(client):
    apply_settings(client, max_requests_per_s=1)
    answers = [client.send("/v1/models", key=None if n % 2 else OWN_KEY) for n in range(16)]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) >= 4
    assert {answer.headers["Retry-After"] for answer in refused} == {"1"}
    assert json.load(refused[0])["error"]["type"] == "rate_limit_error"


@pytest.fixture
def tailnet_address(tmp_path, monkeypatch):
    address = tmp_path / "bin/address"
    program = write_program(
        tmp_path / "bin/tailscale",
        f"[ \"$*\" = 'ip -4' ] && cat {address} 2>/dev/null && exit 0\n"
        "echo 'no current Tailscale IPs; state: Stopped' >&2; exit 1",
    )
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return address


@pytest.mark.skipif("[::1]" not in LOOPBACK, reason="needs IPv6")
def test_gateway_listens_on_both_loopback_addresses(client):
    # Many clients try ::1 first: another listener there would receive their keys.
    with (
        socket.socket(socket.AF_INET6) as other,
        pytest.raises(OSError, match="Address already in use"),
    ):
        other.bind(("::1", client.settings.port))


def test_listens_on_a_changed_tailnet_address(client, tailnet_address):
    paths = client.host.paths
    apply_settings(client, expose="tailscale")
    assert listening(client) == LOOPBACK
    assert "state: Stopped" in str(difference(client))
    assert gateway.apply_address_change("main", paths) is None

    tailnet_address.write_text("127.0.0.77\n")
    assert "127.0.0.77" in str(gateway.apply_address_change("main", paths))
    assert listening(client) == {*LOOPBACK, "127.0.0.77"}
    assert difference(client) is None
    assert gateway.apply_address_change("main", paths) is None

    tailnet_address.unlink()
    addresses = (f"{address}:{client.settings.port}" for address in sorted(LOOPBACK))
    assert gateway.apply_address_change("main", paths) == f"listens on {', '.join(addresses)}"
    assert listening(client) == LOOPBACK


def test_gateway_skips_an_address_that_no_interface_has(host, tailnet_address):
    tailnet_address.write_text("100.101.102.103\n")
    wanted = listeners.planned_listeners(host.gateway(expose="tailscale"))
    assert {str(listener).rpartition(":")[0] for listener in wanted.listeners} == LOOPBACK
    assert "no interface of this host" in str(wanted.missing)


def test_gateway_reports_a_bridge_without_address(host, monkeypatch):
    monkeypatch.setattr(listeners, "_BRIDGE", "none0")
    assert "docker is running" in str(
        listeners.planned_listeners(host.gateway(expose="docker")).missing
    )
    monkeypatch.setattr(listeners, "_BRIDGE", "lo")
    wanted = listeners.planned_listeners(host.gateway(expose="docker"))
    assert (wanted.listeners[-1].address, wanted.missing) == ("127.0.0.1", None)
    assert len(wanted.listeners) == len(LOOPBACK) + 1
