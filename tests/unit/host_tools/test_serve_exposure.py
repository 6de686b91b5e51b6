"""Addresses, TLS and limits of a running gateway."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_host.gateway import gateway, listeners
from stub_gateway import Door, long_answer
from stub_host import Host


def addresses(port: int) -> set[str]:
    out = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    found = (line.split()[3].rpartition(":") for line in out.splitlines())
    return {address for address, _, number in found if number == str(port)}


HERE = {"127.0.0.1", "[::1]"} if socket.has_ipv6 and listeners._is_local("::1") else {"127.0.0.1"}


def outside() -> str:
    """Return an address of this machine other than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def certificate(host: Host, stem: str = "main") -> dict[str, str]:
    folder = host.paths.root / "etc/spark/gateway"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=x", "-addext", "subjectAltName=DNS:spark.example.org",
         "-keyout", folder / f"{stem}.key", "-out", folder / f"{stem}.crt", "-days", "9"],
        check=True, capture_output=True,
    )  # fmt: skip
    return {
        "certificate": f"/etc/spark/gateway/{stem}.crt",
        "key": f"/etc/spark/gateway/{stem}.key",
    }


def served(port: int, *words: str) -> str:
    done = subprocess.run(
        ["openssl", "s_client", "-connect", f"{outside()}:{port}", *words],
        input="", capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    return done.stdout


def test_exposure_changes_keep_running_answers(gate: Door) -> None:
    port, pid = gate.settings.port, gate.process.pid
    assert addresses(port) == HERE
    answer = long_answer(gate)

    gate.host.gateway(port=port, expose="lan")
    assert "changed" in str(gateway.difference("main", gate.host.paths))
    gateway.reload("main", gate.host.paths)
    assert {*HERE, "0.0.0.0"} <= addresses(port)
    assert gateway.difference("main", gate.host.paths) is None

    gate.host.gateway(port=port)
    gateway.reload("main", gate.host.paths)
    assert addresses(port) == HERE
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((outside(), port), 2)
    assert answer.read().rstrip().endswith(b"data: [DONE]")
    assert gate.process.pid == pid
    assert gate.process.poll() is None


def test_lan_uses_tls_and_loopback_does_not(gate: Door) -> None:
    tls = certificate(gate.host)
    port = gate.settings.port
    gate.host.gateway(port=port, expose="lan", tls=tls)
    gateway.reload("main", gate.host.paths)
    root = gate.host.paths.root / "etc/spark/gateway/main.crt"
    trusted = ("-CAfile", str(root), "-verify_hostname", "spark.example.org")
    assert "Verify return code: 0 (ok)" in served(port, *trusted, "-verify_return_error")
    assert "TLSv1.3" in served(port)
    assert "Cipher is (NONE)" in served(port, "-tls1_1")
    assert gate.chat(Authorization=f"Bearer {gate.key}") == 200

    at_this_machine = f"spark.example.org:{port}:{outside()}"
    ask = subprocess.run(
        ["curl", "-s", "--cacert", str(root), "--resolve", at_this_machine, "-w", "%{http_code}",
         "-o", "/dev/null", f"https://spark.example.org:{port}/v1/models"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ask.stdout == "401"
    plain = ["curl", "-s", "-w", "%{http_code}", f"http://{outside()}:{port}/v1/models"]
    said = subprocess.run(plain, capture_output=True, text=True, check=False).stdout
    assert said.endswith("400")
    assert "speaks https" in said


def test_tls_1_2_has_only_authenticated_ciphers(gate: Door) -> None:
    port = gate.settings.port
    gate.host.gateway(port=port, expose="lan", tls=certificate(gate.host))
    gateway.reload("main", gate.host.paths)
    for cipher in ("ECDHE+AES+SHA256", "ECDHE+AES+SHA1", "AES128-GCM-SHA256", "DHE+AESGCM"):
        weak = served(port, "-tls1_2", "-cipher", f"{cipher}:!AESGCM@SECLEVEL=0"
                      if "AES+" in cipher else f"{cipher}@SECLEVEL=0")  # fmt: skip
        assert "Cipher is (NONE)" in weak, cipher
    assert "Cipher is ECDHE-" in served(port, "-tls1_2", "-cipher", "ECDHE+AESGCM")


def test_reload_applies_a_renewed_certificate(gate: Door) -> None:
    port = gate.settings.port
    gate.host.gateway(port=port, expose="lan", tls=certificate(gate.host))
    gateway.reload("main", gate.host.paths)
    first = served(port, "-showcerts")
    certificate(gate.host)
    assert "changed" in str(gateway.difference("main", gate.host.paths))
    gateway.reload("main", gate.host.paths)
    assert served(port, "-showcerts") != first
    assert gateway.difference("main", gate.host.paths) is None


def test_invalid_certificate_keeps_the_running_gateway(gate: Door) -> None:
    tls = certificate(gate.host)
    tls["key"] = certificate(gate.host, "other")["key"]
    gate.host.gateway(port=gate.settings.port, expose="lan", tls=tls)
    with pytest.raises(HostToolError, match="nginx rejects"):
        gateway.reload("main", gate.host.paths)
    assert addresses(gate.settings.port) == HERE
    assert gate.chat(Authorization=f"Bearer {gate.key}") == 200


def test_requests_above_the_limit_get_429_with_retry_after(gate: Door) -> None:
    gate.host.gateway(port=gate.settings.port, max_requests_per_s=1)
    gateway.reload("main", gate.host.paths)
    key = {"Authorization": f"Bearer {gate.key}"}

    def ask(_: int) -> tuple[int, str | None, bytes]:
        status, headers, text = gate.ask("/v1/models", **key)
        return status, headers.get("Retry-After"), text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    good = [answer for answer in answers if answer[0] == 200]
    refused = [answer for answer in answers if answer[0] == 429]
    assert 3 <= len(good) <= 4
    assert len(good) + len(refused) == 8
    assert all(again == "1" for _, again, _ in refused)
    assert json.loads(refused[0][2])["error"]["type"] == "rate_limit_error"
    # Requests with a wrong key are limited, too.
    assert 429 in {gate.ask("/v1/models")[0] for _ in range(5)}


def test_errors_fit_openai_and_anthropic_clients(gate: Door) -> None:
    _, _, text = gate.ask("/v1/messages", {})
    body = json.loads(text)
    assert body["type"] == "error"  # for Anthropic's clients
    assert body["error"]["type"] == "authentication_error"
    assert body["error"]["message"]


@pytest.fixture
def tailscale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program, state = tmp_path / "bin/tailscale", tmp_path / "bin/address"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\n[ \"$*\" = 'ip -4' ] && cat {state} 2>/dev/null && exit 0\n"
        "echo 'no current Tailscale IPs; state: Stopped' >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return state


@pytest.mark.skipif("[::1]" not in HERE, reason="needs IPv6")
def test_both_loopback_addresses_are_bound(gate: Door) -> None:
    # Many clients try ::1 first: another listener there would receive their keys.
    with (
        socket.socket(socket.AF_INET6) as taken,
        pytest.raises(OSError, match="Address already in use"),
    ):
        taken.bind(("::1", gate.settings.port))


def test_gateway_follows_the_tailnet_address(gate: Door, tailscale: Path) -> None:
    port = gate.settings.port
    gate.host.gateway(port=port, expose="tailscale")
    gateway.reload("main", gate.host.paths)
    assert addresses(port) == HERE
    assert "state: Stopped" in str(gateway.difference("main", gate.host.paths))
    assert gateway.follow("main", gate.host.paths) is None

    tailscale.write_text("127.0.0.77\n")
    assert "127.0.0.77" in str(gateway.follow("main", gate.host.paths))
    assert addresses(port) == {*HERE, "127.0.0.77"}
    assert gateway.difference("main", gate.host.paths) is None
    assert gateway.follow("main", gate.host.paths) is None

    tailscale.unlink()
    told = "listens on " + ", ".join(f"{one}:{port}" for one in sorted(HERE))
    assert gateway.follow("main", gate.host.paths) == told
    assert addresses(port) == HERE


def test_address_without_interface_is_left_out(host: Host, tailscale: Path) -> None:
    tailscale.write_text("100.101.102.103\n")
    wanted = listeners.wanted(host.gateway(expose="tailscale"))
    assert {str(one).rpartition(":")[0] for one in wanted.listeners} == HERE
    assert "on no interface" in str(wanted.missing)


def test_bridge_without_address_is_reported(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_BRIDGE", "none0")
    assert "is docker running?" in str(listeners.wanted(host.gateway(expose="docker")).missing)
    monkeypatch.setattr(listeners, "_BRIDGE", "lo")
    wanted = listeners.wanted(host.gateway(expose="docker"))
    assert ([one.address for one in wanted.listeners][-1], wanted.missing) == ("127.0.0.1", None)
    assert len(wanted.listeners) == len(HERE) + 1


def test_unknown_gateway_settings_are_refused(host: Host) -> None:
    with pytest.raises(HostToolError, match="known: loopback, docker, tailscale, lan"):
        host.gateway(expose="everywhere")
