"""Who reaches a gateway: the ways there are, and what follows from each on both sides.

What else differs is how the host finds the addresses to listen on (``listeners``) and what clients
call it (``base_urls``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Expose = Literal["loopback", "docker", "tailscale", "lan"]


@dataclass(frozen=True, slots=True)
class Exposure:
    """One way of being reached, beside by the host itself."""

    audience: str | None  # who else reaches it; None: nobody
    late: bool  # its address may come after the gateway has started, and go
    open: bool  # what leaves the host is encrypted by nothing but TLS


EXPOSURES: dict[Expose, Exposure] = {
    "loopback": Exposure(audience=None, late=False, open=False),
    "docker": Exposure(audience="containers of this host", late=True, open=False),
    "tailscale": Exposure(audience="the tailnet", late=True, open=False),
    "lan": Exposure(audience="the network", late=False, open=True),
}
