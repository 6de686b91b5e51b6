"""Certificates of gateways, on the controller: read, and judged when given."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from spark_deploy.errors import Problem
from spark_deploy.planning.types import GatewayPlan

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its chain and the key that belongs to it, both PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def now() -> datetime:
    """Return the time certificates are judged at."""
    return datetime.now(timezone.utc)


def given_pair(certificate: str, key: str) -> Pair:
    """Read a pair of files of the controller."""
    return Pair(Path(certificate).expanduser().read_bytes(), Path(key).expanduser().read_bytes())


def check_gateway(plan: GatewayPlan) -> list[Problem]:
    """Return why a gateway cannot have the certificate its settings ask for."""
    if plan.tls is None:
        return []
    if plan.address is None:
        what = "nobody said what clients of the network call this host"
        return [Problem("serve.address", what, "set it: the certificate must cover it")]
    if plan.tls.mode == "own-cert":
        return given_problems(plan.tls.certificate, plan.tls.key, plan.address)
    return []


def given_problems(certificate: str, key: str, name: str) -> list[Problem]:
    """Return why a certificate and key of the user's own cannot serve a host.

    Args:
        certificate: path of a PEM file with the certificate first.
        key: path of its key.
        name: what clients call the host.
    """
    found: list[Problem] = []
    chain = _read(certificate, "serve.tls_certificate", x509.load_pem_x509_certificates, found)
    private = _read(key, "serve.tls_key", read_key, found)
    if private is not None and Path(key).expanduser().stat().st_mode & 0o007:
        what = f"{key} can be read by everybody on this machine"
        found.append(Problem("serve.tls_key", what, f"chmod 600 {key}; if others had access, "
                             "ask for a new certificate with a new key"))  # fmt: skip
    if chain is None:
        return found
    leaf = chain[0]
    if private is not None and public_half(leaf) != public_half(private):
        what = f"{key} is not the key of {certificate}"
        fix = "name the two files that were made together, the host's own certificate first"
        found.append(Problem("serve.tls_key", what, fix))
    if not leaf.not_valid_before_utc <= now() < leaf.not_valid_after_utc:
        what = (
            f"{certificate} is valid from {leaf.not_valid_before_utc:%Y-%m-%d} to "
            f"{leaf.not_valid_after_utc:%Y-%m-%d}, not now"
        )
        found.append(Problem("serve.tls_certificate", what, "get a new certificate"))
    if not covers(leaf, name):
        what = f"{certificate} is for {', '.join(names_in(leaf)) or 'no name at all'}, not {name}"
        fix = "get one that covers it, or set serve.address to a name it covers"
        found.append(Problem("serve.tls_certificate", what, fix))
    return found


def covers(certificate: x509.Certificate, name: str) -> bool:
    """Return whether clients that call a host ``name`` accept the certificate for it."""
    names = list(map(str.lower, names_in(certificate)))
    wanted = name.lower()
    # A star stands for exactly one label, and addresses have none.
    star = f"*.{wanted.partition('.')[2]}"
    return wanted in names or ("." in wanted and not is_address(wanted) and star in names)


def is_address(name: str) -> bool:
    """Return whether clients call a host by an address, not by a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def names_in(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that a certificate covers."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [
        *found.get_values_for_type(x509.DNSName),
        *map(str, found.get_values_for_type(x509.IPAddress)),
    ]


def read_key(text: bytes) -> PrivateKeyTypes:
    """Return a private key, which must not be encrypted."""
    return load_pem_private_key(text, password=None)


def public_half(of: x509.Certificate | PrivateKeyTypes) -> bytes:
    """Return the public key of a certificate or of a private key, PEM."""
    public = of.public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).strip()


def _read(
    path: str, setting: str, load: Callable[[bytes], _Loaded], found: list[Problem]
) -> _Loaded | None:
    try:
        return load(Path(path).expanduser().read_bytes())
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
    except (ValueError, TypeError) as error:
        what = f"{path} is not what it should be ({str(error).splitlines()[0][:80]})"
    found.append(Problem(setting, what, "name a PEM file of this machine, its key unencrypted"))
    return None
