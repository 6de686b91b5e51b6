"""The private CA: made once on the controller, it issues certificates of gateways.

Only elliptic curve keys are made (P-256: every client of today takes it). Private keys leave this
module as bytes and are written by whoever sends them, never printed.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from spark_contract.files import write_pieces

from spark_deploy.errors import SettingsError
from spark_deploy.payload.certificates import Pair, is_address, names_in, now, public_half, read_key
from spark_deploy.payload.name_constraints import constraints, missing, permitted

CA_DAYS = 3650


LEAF_DAYS = 365


RENEW_DAYS = 30  # a certificate that ends sooner is made anew by the next run


CA_FILE, CA_KEY_FILE = "ca.pem", "ca-key.pem"


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def why_not(
    certificate: bytes | None, public_key: bytes | None, names: Sequence[str], ca_dir: str
) -> str:
    """Say why a host's certificate of the private CA has to be made anew; "" when it is right.

    Args:
        certificate: what the host has, PEM.
        public_key: the public half of the key the host has, PEM.
        names: what it shall cover.
        ca_dir: where the CA is.
    """
    authority = _authority(ca_dir)
    if authority is None:
        return f"there is no CA in {ca_dir} yet; one is made"
    if not certificate or not public_key:
        return "the host has no certificate or no key"
    try:
        leaf = x509.load_pem_x509_certificates(certificate)[0]
        leaf.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature) as error:
        return f"not issued by the CA in {ca_dir} ({type(error).__name__})"
    if public_half(leaf) != public_key.strip():
        return "the host's key is not that of its certificate"
    missing = [name for name in names if name.lower() not in map(str.lower, names_in(leaf))]
    if missing:
        return f"it does not cover {', '.join(missing)}"
    if leaf.not_valid_after_utc - now() < timedelta(days=RENEW_DAYS):
        return f"it ends on {leaf.not_valid_after_utc:%Y-%m-%d}"
    return ""


def issue(names: Sequence[str], ca_dir: str, days: int = LEAF_DAYS) -> Pair:
    """Return a new key with a certificate of the private CA, which is made when there is none."""
    authority = _widened(_authority(ca_dir) or _make_authority(ca_dir, names), names, ca_dir)
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now() + timedelta(days=days), authority.certificate.not_valid_after_utc)
    builder = (
        # Not the name itself: without a DNS name beside it, clients would take it for one.
        _builder(_name(f"gateway of {names[0]}"), end)
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    leaf = builder.sign(authority.key, hashes.SHA256())
    return Pair(leaf.public_bytes(Encoding.PEM), _pem(key))


def ca_path(ca_dir: str) -> Path:
    """Return the file that clients need to trust the CA."""
    return Path(ca_dir).expanduser() / CA_FILE


def _authority(ca_dir: str) -> _Authority | None:
    folder = Path(ca_dir).expanduser()
    if not folder.exists():
        return None
    fix = f"put the CA's two files back from a copy, or remove {folder} for a new CA"
    try:
        certificate = x509.load_pem_x509_certificates((folder / CA_FILE).read_bytes())[0]
        key = read_key((folder / CA_KEY_FILE).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        what = f"{folder} does not hold a CA ({type(error).__name__})"
        raise SettingsError.one("serve.ca_dir", what, fix) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or public_half(certificate) != public_half(
        key
    ):
        raise SettingsError.one("serve.ca_dir", f"the files in {folder} are no pair", fix)
    if certificate.not_valid_after_utc - now() < timedelta(days=RENEW_DAYS):
        what = f"the CA in {folder} ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
        fix = f"move {folder} away: the next run makes a new one, which clients must be given"
        raise SettingsError.one("serve.ca_dir", what, fix)
    return _Authority(certificate, key)


def _make_authority(ca_dir: str, names: Sequence[str]) -> _Authority:
    """Make the CA's folder in one step, so that there is a whole one or none."""
    folder = Path(ca_dir).expanduser()
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"dgx-spark-deploy CA {now():%Y-%m-%d %H:%M:%S}")
    certificate = _self_signed(key, subject, now() + timedelta(days=CA_DAYS), names)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    (made / CA_FILE).write_bytes(certificate.public_bytes(Encoding.PEM))
    with open(os.open(made / CA_KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as to:
        to.write(_pem(key))
    made.rename(folder)
    return _Authority(certificate, key)


def _widened(authority: _Authority, names: Sequence[str], ca_dir: str) -> _Authority:
    """Return the CA with leave to sign for these names, too: same key, same name, same end.

    Clients with the earlier file still trust the hosts that it was made for.
    """
    before = authority.certificate
    if not missing(before, names):
        return authority
    certificate = _self_signed(
        authority.key,
        before.subject,
        before.not_valid_after_utc,
        [*(permitted(before) or ()), *names],
    )
    path = ca_path(ca_dir)
    write_pieces(path, [certificate.public_bytes(Encoding.PEM)])
    return _Authority(certificate, authority.key)


def _self_signed(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, end: datetime, names: Sequence[str]
) -> x509.Certificate:
    return (
        _builder(subject, end)
        .issuer_name(subject)
        .public_key(key.public_key())
        .add_extension(constraints(names), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False, content_commitment=False, key_encipherment=False,
                data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
                encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip


def _builder(subject: x509.Name, end: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        # Clocks of hosts and clients differ a little.
        .not_valid_before(now() - timedelta(hours=1))
        .not_valid_after(end)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _general_name(name: str) -> x509.GeneralName:
    if is_address(name):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
