"""The part of a gateway that hands requests to the least busy of several hosts.

nginx chooses. It knows nothing of proofs, and need not: each host's own gateway is open only while
what stands behind it is proven, and says 503 otherwise, before any engine has the request. So it is
asked of the next host, and that one is left alone for a moment.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace
from importlib import resources

from spark_contract.host.paths import Paths
from spark_contract.serving.gateway import Gateway

from spark_host.gateway.listeners import Listener

# What has just refused is asked again after so long.
_REST = "max_fails=1 fail_timeout=2s"


@dataclass(frozen=True, slots=True)
class Together:
    """What stands in the configuration for the replicas; nothing where there are none."""

    http: str = ""  # beside the servers
    client: str = "$binary_remote_addr"  # whom limits count
    listen: str = ""  # where the gateway of this host is asked by the balancer of this host
    listeners: tuple[Listener, ...] = ()  # of the balancer


def together(settings: Gateway, listeners: tuple[Listener, ...], paths: Paths) -> Together:
    """Return the balancer of a gateway; replicas whose names nobody knows are left out for now."""
    if settings.replicas is None:
        return Together()
    own = f"unix:{paths.gateway_run(settings.service)}/replicas.sock"
    others = [found for one in settings.replicas.others if (found := _resolved(one))]
    servers = [own, *(f"{address}:{port}" for address, port in others)]
    # Each client was counted where it came in, at the balancer.
    near = ("unix:", *(address.strip("[]") for address, _ in others))
    port = settings.replicas.port
    heard = tuple(replace(one, port=port) for one in listeners)
    values = {
        "NEAR": " ".join(f'"{one}" "";' for one in near),
        "SERVERS": "\n    ".join(f"server {one} {_REST};" for one in servers),
        "LISTEN": "\n    ".join(f"listen {one} reuseport;" for one in heard),
        "TRIES": str(len(servers)),
    }
    template = resources.files("spark_host.gateway").joinpath("templates/replicas.conf").read_text()
    text = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], template)
    return Together("\n\n" + text.rstrip(), "$spark_client", f"listen {own};", heard)


def _resolved(place: str) -> tuple[str, str] | None:
    host, _, port = place.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    family, *_, address = found[0]
    shown = f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
    return shown, port
