"""What a CA may sign for: the names of its own hosts, so that its key is worth little elsewhere.

RFC 5280, 4.2.1.10: a kind of name of which nothing is permitted would be free: each kind has one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from cryptography import x509

# Names that no host has (RFC 6761, RFC 5737).
_NO_NAME, _NO_ADDRESS = "invalid", "192.0.2.1/32"


def constraints(names: Sequence[str]) -> x509.NameConstraints:
    """Return the extension that permits these names and addresses, and what lies below names."""
    subtrees = {_subtree(name) for name in names}
    found = (
        [one for one in sorted(subtrees) if "/" not in one] or [_NO_NAME],
        [one for one in sorted(subtrees) if "/" in one] or [_NO_ADDRESS],
    )
    permitted: list[x509.GeneralName] = [x509.DNSName(name) for name in found[0]]
    permitted += [x509.IPAddress(ipaddress.ip_network(address)) for address in found[1]]
    return x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=None)


def permitted(certificate: x509.Certificate) -> list[str] | None:
    """Return what a CA may sign for; ``None`` when it has no limits, as the first ones had."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return None
    return [str(one.value) for one in found.permitted_subtrees or ()]


def missing(certificate: x509.Certificate, names: Sequence[str]) -> list[str]:
    """Return the names that a CA may not sign for."""
    allowed = permitted(certificate)
    return [] if allowed is None else [name for name in names if _subtree(name) not in allowed]


def _subtree(name: str) -> str:
    try:
        return str(ipaddress.ip_network(name.removesuffix("/32").removesuffix("/128")))
    except ValueError:
        return name.lower().removeprefix("*.")
