"""Certificate, watch and tailnet address of a gateway; the private key never leaves its host."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from spark_contract.host.units import WATCH

from spark_deploy.facts.reading import HostFact

_BREAK = "== key"


@dataclass(frozen=True, slots=True)
class HostCertificate:
    """The certificate and the public half of the key beside it, PEM; empty when absent."""

    certificate: bytes
    public_key: bytes


class GatewayCertificate(HostFact[HostCertificate]):
    """The certificate of a gateway (openssl, on which ca-certificates depends)."""

    @staticmethod
    def default() -> HostCertificate:
        """Return what a host without one has."""
        return HostCertificate(b"", b"")

    def command(self, certificate: str, key: str) -> str:
        return (
            f"cat {shlex.quote(certificate)} 2>/dev/null; echo '{_BREAK}'; "
            f"openssl pkey -in {shlex.quote(key)} -pubout 2>/dev/null; true"
        )

    def process(self, output: Iterable[str]) -> HostCertificate:
        certificate, _, key = "\n".join(output).partition(_BREAK)
        return HostCertificate(certificate.strip().encode(), key.strip().encode())


class WatchTools(HostFact[str]):
    """The folder of tools whose code the watch over a release runs; empty when none runs."""

    default = str

    def command(self, release: str) -> str:
        unit = shlex.quote(WATCH.of(release))
        return (
            f"pid=$(systemctl show -p MainPID --value {unit}); "
            "cat /proc/$pid/environ 2>/dev/null | tr '\\0' '\\n' | "
            "sed -n 's/^PYTHONPATH=//p' | cut -d: -f1"
        )

    def process(self, output: Iterable[str]) -> str:
        return next(iter(output), "")


class TailnetAddress(HostFact[str]):
    """The host's address in its tailnet; empty when tailscale is not up."""

    default = str

    def command(self) -> str:
        return "tailscale ip -4 2>/dev/null; true"

    def process(self, output: Iterable[str]) -> str:
        return next((line.strip() for line in output if line.strip()), "")
