"""Read, check and issue gateway certificates on the controller.

Private keys are returned as bytes and never printed.
"""

import ipaddress
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from spark_contract.files import write_chunks

from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.plan.types import GatewayPlan

CA_DAYS = 3650
LEAF_DAYS = 365
RENEW_DAYS = 30  # a run renews certificates that expire sooner
CA_FILE, CA_KEY_FILE = "ca.pem", "ca-key.pem"
# No host has these names (RFC 6761, RFC 5737).
_NO_NAME, _NO_ADDRESS = "invalid", "192.0.2.1/32"

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True)
class CertificateAndKey:
    certificate: bytes
    key: bytes = field(repr=False)


def now() -> datetime:
    return datetime.now(timezone.utc)


def read_certificate_and_key(certificate: str, key: str) -> CertificateAndKey:
    return CertificateAndKey(
        Path(certificate).expanduser().read_bytes(), Path(key).expanduser().read_bytes()
    )


def check_gateway_certificate(plan: GatewayPlan) -> list[Problem]:
    if plan.tls is None:
        return []
    if plan.address is None:
        message = "the name that clients use for this host is not set"
        fix = "set serve.address, because the certificate must cover that name"
        return [Problem("serve.address", message, fix)]
    if plan.tls.mode == "own-cert":
        return check_certificate_and_key(plan.tls.certificate, plan.tls.key, plan.address)
    return []


def check_certificate_and_key(certificate: str, key: str, name: str) -> list[Problem]:
    problems: list[Problem] = []
    chain = _read(certificate, "serve.tls_certificate", x509.load_pem_x509_certificates, problems)
    private_key = _read(key, "serve.tls_key", load_key, problems)

    def add(setting: str, message: str, fix: str) -> None:
        problems.append(Problem(f"serve.{setting}", message, fix))

    if private_key is not None and Path(key).expanduser().stat().st_mode & 0o007:
        fix = f"run `chmod 600 {key}`; if others may have read it, replace key and certificate"
        add("tls_key", f"{key} can be read by every user of this machine", fix)
    if chain is None:
        return problems
    leaf = chain[0]
    begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if private_key is not None and public_key_pem(leaf) != public_key_pem(private_key):
        fix = "set the matching key; the certificate file must start with the host's certificate"
        add("tls_key", f"{key} does not match {certificate}", fix)
    if not begin <= now() < end:
        message = f"{certificate} is only valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
        add("tls_certificate", message, "get a new certificate")
    if not covers_name(leaf, name):
        message = (
            f"{certificate} is for {', '.join(alternative_names(leaf)) or 'no name'}, not {name}"
        )
        fix = "get a certificate for this name, or set serve.address to a name in the certificate"
        add("tls_certificate", message, fix)
    return problems


def _read(
    path: str, setting: str, load: Callable[[bytes], _Loaded], problems: list[Problem]
) -> _Loaded | None:
    try:
        return load(Path(path).expanduser().read_bytes())
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror})"
    except (ValueError, TypeError) as error:
        message = f"{path} has the wrong format ({str(error).splitlines()[0][:80]})"
    fix = "set the path of a PEM file on this machine; keys must be unencrypted"
    problems.append(Problem(setting, message, fix))
    return None


def covers_name(certificate: x509.Certificate, name: str) -> bool:
    names = [certified.lower() for certified in alternative_names(certificate)]
    name = name.lower()
    if name in names:
        return True
    # A wildcard stands for one label of a domain name.
    _, dot, domain = name.partition(".")
    return bool(dot) and not is_address(name) and f"*.{domain}" in names


def is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def alternative_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def load_key(pem: bytes) -> PrivateKeyTypes:
    return load_pem_private_key(pem, password=None)


def public_key_pem(source: x509.Certificate | PrivateKeyTypes) -> bytes:
    return source.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).strip()


def name_constraints(names: Sequence[str]) -> x509.NameConstraints:
    """Permit these names (with subdomains) and addresses.

    Names and addresses both get an entry, because a kind without an entry is unlimited (RFC 5280,
    4.2.1.10).
    """
    subtrees = sorted({_name_constraint(name) for name in names})
    domains = [subtree for subtree in subtrees if "/" not in subtree] or [_NO_NAME]
    networks = [subtree for subtree in subtrees if "/" in subtree] or [_NO_ADDRESS]
    permitted: list[x509.GeneralName] = [x509.DNSName(domain) for domain in domains]
    permitted += [x509.IPAddress(ipaddress.ip_network(network)) for network in networks]
    return x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=None)


def permitted_names(certificate: x509.Certificate) -> list[str] | None:
    """Return the names that a CA may sign for; ``None`` if all names are permitted."""
    try:
        limits = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return None
    return [str(subtree.value) for subtree in limits.permitted_subtrees or ()]


def _name_constraint(name: str) -> str:
    try:
        return str(ipaddress.ip_network(name))
    except ValueError:
        return name.lower().removeprefix("*.")


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def renewal_reason(
    certificate: bytes | None, public_key: bytes | None, names: Sequence[str], ca_dir: str
) -> str:
    """Return why a certificate (PEM) must be renewed for ``names``; "" if it is valid."""
    authority = _read_authority(ca_dir)
    if authority is None:
        return f"creating a CA, because {ca_dir} contains none yet"
    if not certificate or not public_key:
        return "the host has no certificate or no key"
    try:
        leaf = x509.load_pem_x509_certificates(certificate)[0]
        leaf.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature) as error:
        return f"the CA in {ca_dir} did not issue the certificate ({type(error).__name__})"
    if public_key_pem(leaf) != public_key.strip():
        return "the host's key does not match the certificate"
    covered = list(map(str.lower, alternative_names(leaf)))
    if missing := [name for name in names if name.lower() not in covered]:
        return f"the certificate does not cover {', '.join(missing)}"
    if leaf.not_valid_after_utc - now() < timedelta(days=RENEW_DAYS):
        return f"the certificate expires on {leaf.not_valid_after_utc:%Y-%m-%d}"
    return ""


def issue_certificate(
    names: Sequence[str], ca_dir: str, days: int = LEAF_DAYS
) -> CertificateAndKey:
    authority = _read_authority(ca_dir) or _create_authority(ca_dir, names)
    authority = _extend_permitted_names(authority, names, ca_dir)
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now() + timedelta(days=days), authority.certificate.not_valid_after_utc)
    general_names: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_address(name)) if is_address(name) else x509.DNSName(name)
        for name in names
    ]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        # Not only the host's name: without a DNS name, clients would match the common name.
        _certificate_builder(_common_name(f"gateway of {names[0]}"), end, key)
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(general_names), critical=False)
        .add_extension(issuer, critical=False)
    )
    leaf = builder.sign(authority.key, hashes.SHA256())
    return CertificateAndKey(leaf.public_bytes(Encoding.PEM), _key_pem(key))


def ca_path(ca_dir: str) -> Path:
    return Path(ca_dir).expanduser() / CA_FILE


def _read_authority(ca_dir: str) -> _Authority | None:
    folder = Path(ca_dir).expanduser()
    if not folder.exists():
        return None
    fix = f"restore both files of the CA from a backup, or remove {folder} to create a new CA"
    try:
        certificate = x509.load_pem_x509_certificates((folder / CA_FILE).read_bytes())[0]
        key = load_key((folder / CA_KEY_FILE).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        message = f"{folder} contains no CA ({type(error).__name__})"
        raise SettingsError.single("serve.ca_dir", message, fix) from error
    matches = public_key_pem(certificate) == public_key_pem(key)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not matches:
        message = f"certificate and key in {folder} do not match"
        raise SettingsError.single("serve.ca_dir", message, fix)
    if certificate.not_valid_after_utc - now() < timedelta(days=RENEW_DAYS):
        message = f"the CA in {folder} expires on {certificate.not_valid_after_utc:%Y-%m-%d}"
        fix = f"rename {folder} and retry; then install the new CA on the clients"
        raise SettingsError.single("serve.ca_dir", message, fix)
    return _Authority(certificate, key)


def _create_authority(ca_dir: str, names: Sequence[str]) -> _Authority:
    """Create the CA in a temporary directory and rename it, so that it is never incomplete."""
    folder = Path(ca_dir).expanduser()
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _common_name(f"dgx-spark-deploy CA {now():%Y-%m-%d %H:%M:%S}")
    certificate = _self_signed(key, subject, now() + timedelta(days=CA_DAYS), names)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    (new / CA_FILE).write_bytes(certificate.public_bytes(Encoding.PEM))
    (new / CA_KEY_FILE).touch(0o600)
    (new / CA_KEY_FILE).write_bytes(_key_pem(key))
    new.rename(folder)
    return _Authority(certificate, key)


def _extend_permitted_names(authority: _Authority, names: Sequence[str], ca_dir: str) -> _Authority:
    """Let the CA sign for more names; clients that have its earlier certificate still trust it."""
    old = authority.certificate
    permitted = permitted_names(old)
    if permitted is None or {_name_constraint(name) for name in names} <= set(permitted):
        return authority
    certificate = _self_signed(
        authority.key, old.subject, old.not_valid_after_utc, [*permitted, *names]
    )
    write_chunks(ca_path(ca_dir), [certificate.public_bytes(Encoding.PEM)])
    return _Authority(certificate, authority.key)


def _self_signed(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, end: datetime, names: Sequence[str]
) -> x509.Certificate:
    usage = x509.KeyUsage(
        key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        _certificate_builder(subject, end, key)
        .issuer_name(subject)
        .add_extension(name_constraints(names), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


def _certificate_builder(
    subject: x509.Name, end: datetime, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        # The clocks of clients may be behind.
        .not_valid_before(now() - timedelta(hours=1))
        .not_valid_after(end)
        .public_key(key.public_key())
        .add_extension(identifier, critical=False)
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
