import dataclasses
import stat
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.hosts import certificates
from spark_deploy.hosts.certificates import (
    check_certificate_and_key,
    check_gateway_certificate,
    issue_certificate,
    renewal_reason,
)
from spark_deploy.plan.gateway import gateway_plan

NAMES = ("spark.example.org", "10.0.0.9")
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments, text=None):
    result = subprocess.run(
        ["openssl", *map(str, arguments)], input=text, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def public_key_of(key):
    return openssl("pkey", "-pubout", text=key.decode()).encode()


def make_pair(folder, name, days=90, stem="host"):
    certificate, key = folder / f"{stem}.pem", folder / f"{stem}-key.pem"
    openssl("req", "-x509", *EC, "-subj", "/CN=x", "-addext", f"subjectAltName={name}",
            "-keyout", key, "-out", certificate, "-days", days)  # fmt: skip
    key.chmod(0o600)
    return [str(certificate), str(key)]


def verify(ca, leaf, *arguments):
    result = subprocess.run(
        ["openssl", "verify", "-purpose", "sslserver", *arguments, "-CAfile", ca / "ca.pem", leaf],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return result.stdout + result.stderr


def make_ca(folder, *extensions):
    folder.mkdir(mode=0o700)
    usage = ("-addext", "keyUsage=critical,keyCertSign", *extensions)
    openssl("req", "-x509", *EC, "-subj", "/CN=own CA", "-days", "900", *usage,
            "-keyout", folder / "ca-key.pem", "-out", folder / "ca.pem")  # fmt: skip


def assert_one(problems, *parts):
    assert len(problems) == 1, problems
    assert [part for part in parts if part not in str(problems[0])] == []


@pytest.mark.parametrize(
    ("names", "host", "good"),
    [
        ("DNS:spark.example.org", "Spark.example.org", True),
        ("IP:10.0.0.9", "10.0.0.9", True),
        ("DNS:*.example.org", "spark.example.org", True),
        ("DNS:*.example.org", "example.org", False),
        ("DNS:*.example.org", "a.spark.example.org", False),
        ("DNS:*.0.0.9", "10.0.0.9", False),
        ("DNS:other.example.org", "spark.example.org", False),
    ],
)
def test_certificate_must_cover_the_gateway_address(tmp_path, names, host, good):
    problems = check_certificate_and_key(*make_pair(tmp_path, names), host)
    if good:
        assert problems == []
    else:
        assert_one(problems, f"not {host}", "serve.address")


def test_unusable_certificate_and_key_are_rejected(tmp_path, monkeypatch):
    certificate, key = make_pair(tmp_path, f"DNS:{NAMES[0]}", days=3)
    other_key = make_pair(tmp_path, f"DNS:{NAMES[0]}", stem="other")[1]
    encrypted = str(tmp_path / "encrypted.pem")
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", encrypted)
    for files, fragments in (
        ((certificate, other_key), ("does not match", "other-key.pem")),
        ((certificate, encrypted), ("has the wrong format", "unencrypted")),
        ((certificate, "/nowhere.pem"), ("cannot be read",)),
        ((key, key), ("has the wrong format",)),
    ):
        assert_one(check_certificate_and_key(*files, NAMES[0]), *fragments)
    later = certificates.now() + timedelta(days=4)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "now", lambda: later)
        assert_one(
            check_certificate_and_key(certificate, key, NAMES[0]),
            "is only valid from",
            "new certificate",
        )
    assert check_certificate_and_key(certificate, key, NAMES[0]) == []
    Path(key).chmod(0o644)
    problems = check_certificate_and_key(certificate, key, NAMES[0])
    assert_one(problems, "read by every user", "chmod 600")
    secret = Path(key).read_text().splitlines()[1]
    assert secret not in f"{problems} {check_certificate_and_key(key, key, NAMES[0])}"


def test_certificate_is_renewed_only_if_it_expires_or_no_longer_matches(tmp_path):
    ca = str(tmp_path / "ca")
    assert "creating a CA" in renewal_reason(b"", b"", NAMES, ca)
    assert not (tmp_path / "ca").exists()
    issued, other = issue_certificate(NAMES, ca), issue_certificate(NAMES, ca)
    due = issue_certificate(NAMES, ca, days=certificates.RENEW_DAYS - 1)
    foreign = issue_certificate(NAMES, str(tmp_path / "other"))
    for certificate, key, names, reason in (
        (b"", issued.key, NAMES, "no certificate"),
        (issued.certificate, other.key, NAMES, "does not match"),
        (issued.certificate, issued.key, (*NAMES, "new.org"), "does not cover new.org"),
        (due.certificate, due.key, NAMES, "the certificate expires on"),
        (foreign.certificate, foreign.key, NAMES, "did not issue"),
        (b"rubbish", issued.key, NAMES, "did not issue"),
    ):
        assert reason in renewal_reason(certificate, public_key_of(key), names, ca)
    assert renewal_reason(issued.certificate, public_key_of(issued.key), NAMES, ca) == ""


def test_incomplete_or_expiring_ca_is_never_replaced(tmp_path, monkeypatch):
    ca = tmp_path / "ca"
    issue_certificate(NAMES, str(ca))
    later = certificates.now() + timedelta(days=certificates.CA_DAYS - 10)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "now", lambda: later)
        with pytest.raises(SettingsError, match="install the new CA on the clients"):
            issue_certificate(NAMES, str(ca))
    (ca / "ca-key.pem").unlink()
    with pytest.raises(SettingsError, match="contains no CA"):
        issue_certificate(NAMES, str(ca))


def test_gateway_with_a_certificate_needs_an_address(tmp_path):
    overrides = {"serve.expose": "lan", "serve.tls": "private-ca"}
    hosts = load_hosts({"spark": ["@local"]}, root=tmp_path, overrides=overrides)
    plan = gateway_plan(hosts["@local"].settings, "@local")
    assert_one(check_gateway_certificate(plan), "serve.address")
    assert check_gateway_certificate(dataclasses.replace(plan, address=NAMES[0])) == []


def sign_with_stolen_key(ca, name, folder):
    key, request, leaf, more = (folder / f"stolen.{end}" for end in ("key", "csr", "pem", "ext"))
    openssl("req", *EC, "-subj", "/CN=x", "-keyout", key, "-out", request)
    more.write_text(f"subjectAltName={name}\nextendedKeyUsage=serverAuth\n")
    openssl("x509", "-req", "-in", request, "-CA", ca / "ca.pem", "-CAkey", ca / "ca-key.pem",
            "-CAcreateserial", "-days", "30", "-extfile", more, "-out", leaf)  # fmt: skip
    return leaf


@pytest.mark.parametrize(
    "name",
    [
        *("DNS:bank.example.com", "DNS:example.org", "DNS:other.example.org", "DNS:com"),
        *("IP:10.0.0.8", "IP:192.0.2.7", "IP:2001:db8::1", "DNS:invalid"),
    ],
)
def test_stolen_ca_can_sign_only_for_its_hosts(tmp_path, name):
    ca = tmp_path / "ca"
    issue_certificate(NAMES, str(ca))
    stolen = verify(ca, sign_with_stolen_key(ca, name, tmp_path))
    assert "permitted subtree violation" in stolen
    own = sign_with_stolen_key(ca, f"DNS:{NAMES[0]}", tmp_path)
    assert verify(ca, own).endswith(": OK\n")


@pytest.mark.parametrize(
    ("names", "verified"),
    [
        (NAMES, ("-verify_hostname", NAMES[0])),
        (NAMES, ("-verify_ip", NAMES[1])),
        (["spark-1"], ()),
        (["10.0.0.9"], ()),
        (["fd00::9"], ()),
        (["*.lab.example.org", "lab.example.org"], ()),
        (["Spark.Example.org"], ()),
    ],
)
def test_private_ca_covers_every_kind_of_host_name(tmp_path, names, verified):
    ca, leaf = tmp_path / "ca", tmp_path / "leaf.pem"
    issued = issue_certificate(names, str(ca))
    leaf.write_bytes(issued.certificate)
    assert verify(ca, leaf, "-x509_strict", *verified).endswith(": OK\n")
    assert public_key_of(issued.key).decode() == openssl("x509", "-in", leaf, "-pubkey", "-noout")
    assert stat.S_IMODE((ca / "ca-key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(ca.stat().st_mode) == 0o700
    assert issued.key.decode().splitlines()[1] not in repr(issued)
    other = sign_with_stolen_key(ca, "DNS:bank.example.com,IP:192.0.2.9", tmp_path)
    assert "permitted subtree violation" in verify(ca, other)


def test_new_host_extends_the_ca_and_earlier_hosts_stay_trusted(tmp_path):
    ca, first, second = tmp_path / "ca", tmp_path / "first.pem", tmp_path / "second.pem"
    issued = issue_certificate(NAMES, str(ca))
    first.write_bytes(issued.certificate)
    key, before = (ca / "ca-key.pem").read_bytes(), (ca / "ca.pem").read_bytes()
    issue_certificate(NAMES, str(ca))
    assert (ca / "ca.pem").read_bytes() == before

    second.write_bytes(issue_certificate(["spark-2.example.org"], str(ca)).certificate)
    assert (ca / "ca-key.pem").read_bytes() == key
    for leaf in (first, second):
        assert verify(ca, leaf).endswith(": OK\n")
    assert renewal_reason(issued.certificate, public_key_of(issued.key), NAMES, str(ca)) == ""
    # Clients with the earlier file still trust the hosts that it covers.
    (ca / "ca.pem").write_bytes(before)
    assert verify(ca, first).endswith(": OK\n")
    assert "permitted subtree violation" in verify(ca, second)


def test_extended_ca_of_the_owner_still_covers_its_networks(tmp_path):
    ca = tmp_path / "ca"
    make_ca(ca, "-addext", "nameConstraints=critical,permitted;IP:2001:db8::/ffff:ffff::")
    issue_certificate(NAMES, str(ca))
    other = sign_with_stolen_key(ca, "IP:2001:db8::7", tmp_path)
    assert verify(ca, other).endswith(": OK\n")


def test_existing_ca_without_name_limits_is_used_unchanged(tmp_path):
    ca, leaf = tmp_path / "ca", tmp_path / "leaf.pem"
    make_ca(ca)
    before = (ca / "ca.pem").read_bytes()
    leaf.write_bytes(issue_certificate(NAMES, str(ca)).certificate)
    assert (ca / "ca.pem").read_bytes() == before
    assert verify(ca, leaf).endswith(": OK\n")
