"""Access to a service: gateway settings, TLS and URLs, independent of any release."""

from collections.abc import Sequence
from dataclasses import replace

from spark_contract.documents import to_json
from spark_contract.gateway import EXPOSURES, Gateway, NamedKey, Replicas, tls_paths
from spark_contract.paths import API_KEY
from spark_contract.release import parse_service
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.documents import MIB
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.service import ServeSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.types import GatewayPlan, ManagedFile, ServicePlan, TlsPlan

CONTAINER_NAME = "host.docker.internal"
LOOPBACK = "127.0.0.1"

_MAX_CONNECTIONS = 256  # per client address; all clients of a proxy share its address


def gateway_plan(
    settings: Settings,
    host: str,
    service: str = MAIN_SERVICE,
    on_request: dict[str, int] | None = None,
) -> GatewayPlan:
    serve = settings.serve
    return GatewayPlan(
        settings=Gateway(
            service=service,
            expose=serve.expose,
            port=serve.port,
            max_body_bytes=serve.max_body_bytes,
            max_requests_per_s=serve.max_requests_per_s,
            max_connections=_MAX_CONNECTIONS,
            key_path=API_KEY,
            routes={
                path: name for name, other in settings.services.items() for path in other.paths
            },
            tls=None if serve.tls == "off" else tls_paths(service),
            replicas=_replicas(settings, host) if service == MAIN_SERVICE else None,
            on_request=on_request or None,
            keys=named_keys(serve),
        ),
        address=client_address(settings, host),
        key=serve.api_key,
        tls=_tls(settings, host),
    )


def named_keys(serve: ServeSettings) -> dict[str, NamedKey] | None:
    return {
        name: NamedKey(
            sha256=key.sha256,
            max_concurrent=key.max_concurrent,
            max_requests_per_min=key.max_requests_per_min,
            max_body_bytes=key.max_body_mib and key.max_body_mib * MIB,
            max_output_tokens=key.max_output_tokens,
        )
        for name, key in serve.keys.items()
    } or None


def route_by_name(main: ServicePlan, others: Sequence[ServicePlan]) -> GatewayPlan:
    """Return the main gateway, which routes requests by model name.

    Raises PlanError if two services have the same model name.
    """
    if not others:
        return main.gateway
    names = {parse_service(plan.release.name): plan.release.names for plan in (main, *others)}
    owners: dict[str, str] = {}
    for service, service_names in names.items():
        for name in service_names:
            if owners.setdefault(name, service) != service:
                message = f"{name} is also a model name of service {owners[name]}"
                raise PlanError.single(f"services.{service}.names", message, "use a unique name")
    return replace(main.gateway, settings=replace(main.gateway.settings, names=names))


def _replicas(settings: Settings, host: str) -> Replicas | None:
    replicas, port = settings.replicas, settings.serve.port
    others = [name for name in replicas.hosts if name != host and name in replicas.addresses]
    gateways = tuple(f"{_bracketed(replicas.addresses[name])}:{port}" for name in others)
    return Replicas(replicas.port, gateways) if replicas.hosts else None


def client_address(settings: Settings, host: str) -> str | None:
    if settings.serve.expose == "tailscale":
        # The SSH name may not exist in the tailnet.
        return settings.serve.address
    address = settings.serve.address or settings.ssh.hostname
    return address or (None if host.startswith("@") else host)


def _tls(settings: Settings, host: str) -> TlsPlan | None:
    serve, address = settings.serve, client_address(settings, host)
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
    return ManagedFile(plan.settings.path, to_json(plan.settings).encode())


def base_urls(plan: GatewayPlan) -> tuple[tuple[str, str], ...]:
    """Return each base URL with its audience. The host's own URL comes first."""
    local = (url(plan, LOOPBACK), "the host itself")
    audience = EXPOSURES[plan.settings.expose].audience
    if audience is None:
        return (local,)
    unknown = "TAILSCALE-ADDRESS" if plan.settings.expose == "tailscale" else "ADDRESS"
    address = CONTAINER_NAME if plan.settings.expose == "docker" else (plan.address or unknown)
    remote = (url(plan, address), audience)
    if plan.settings.replicas is None:
        return (local, remote)
    balanced = replace(plan, settings=replace(plan.settings, port=plan.settings.replicas.port))
    return (local, remote, (url(balanced, address), f"{audience}, all replicas"))


def url(plan: GatewayPlan, address: str) -> str:
    scheme = "https" if plan.tls and address != LOOPBACK else "http"
    return f"{scheme}://{_bracketed(address)}:{plan.settings.port}/v1"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
