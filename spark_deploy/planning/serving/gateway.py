"""Who may reach a service, and how: from the settings alone, apart from any release."""

from __future__ import annotations

import json

from spark_contract.exposure import EXPOSURES

from spark_deploy.managed import ManagedFile
from spark_deploy.planning.types import CONFIG_DIR, GatewayPlan, SecretSource, TlsPlan
from spark_deploy.settings.types import Settings

SERVICE = "main"
CONTAINER_NAME = "host.docker.internal"
LOOPBACK = "127.0.0.1"


def gateway_plan(settings: Settings, host: str) -> GatewayPlan:
    """Return the gateway of a host's service.

    Args:
        settings: of the host.
        host: its name in the inventory; ``@local`` is this machine.
    """
    serve = settings.serve
    return GatewayPlan(
        service=SERVICE,
        expose=serve.expose,
        port=serve.port,
        address=address_of(settings, host),
        max_body_bytes=serve.max_body_bytes,
        max_requests_per_s=serve.max_requests_per_s,
        settings_path=f"{CONFIG_DIR}/gateway/{SERVICE}.json",
        certificate_path=f"{CONFIG_DIR}/gateway/{SERVICE}.crt",
        certificate_key_path=f"{CONFIG_DIR}/gateway/{SERVICE}.key",
        key_path=f"{CONFIG_DIR}/api-key",
        key=SecretSource(serve.api_key.kind, serve.api_key.value),
        tls=_tls(settings, host),
    )


def address_of(settings: Settings, host: str) -> str | None:
    """Return what clients of the network call a host; ``None`` when nobody said so."""
    if settings.serve.expose == "tailscale":
        # The name SSH uses need not be one of the tailnet.
        return settings.serve.address
    known = settings.serve.address or settings.ssh.hostname
    return known or (None if host.startswith("@") else host)


def _tls(settings: Settings, host: str) -> TlsPlan | None:
    serve, address = settings.serve, address_of(settings, host)
    if serve.tls == "off":
        return None
    names = [address, None if host.startswith("@") else host, *serve.tls_names]
    return TlsPlan(
        mode=serve.tls,
        certificate=serve.tls_certificate or "",
        key=serve.tls_key or "",
        ca_dir=serve.ca_dir,
        names=tuple(dict.fromkeys(name for name in names if name)),
    )


def gateway_file(plan: GatewayPlan) -> ManagedFile:
    """Return the gateway's settings as the host tools read them."""
    tls = {"certificate": plan.certificate_path, "key": plan.certificate_key_path}
    data = {
        "schema_version": 1,
        "service": plan.service,
        "expose": plan.expose,
        "port": plan.port,
        "max_body_bytes": plan.max_body_bytes,
        "max_requests_per_s": plan.max_requests_per_s,
        "key_path": plan.key_path,
        "tls": tls if plan.tls else None,
    }
    text = json.dumps(data, indent=1, sort_keys=True) + "\n"
    return ManagedFile(plan.settings_path, text.encode())


def base_urls(plan: GatewayPlan) -> tuple[tuple[str, str], ...]:
    """Return each base URL with who uses it; this host's own comes first."""
    here = (url(plan, LOOPBACK), "this host")
    audience = EXPOSURES[plan.expose].audience
    if audience is None:
        return (here,)
    unknown = "TAILSCALE-ADDRESS" if plan.expose == "tailscale" else "ADDRESS"
    address = CONTAINER_NAME if plan.expose == "docker" else plan.address or unknown
    return (here, (url(plan, address), audience))


def url(plan: GatewayPlan, address: str) -> str:
    """Return the base URL of an address; TLS ends at everything but this host."""
    scheme = "https" if plan.tls and address != LOOPBACK else "http"
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{plan.port}/v1"
