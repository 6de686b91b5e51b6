"""Certificates are refused before any connection when they could not serve; openssl made these."""

from __future__ import annotations

import dataclasses
import stat
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.hosts import certificates
from spark_deploy.hosts.certificates import check_gateway, check_pair, issue, why_renew
from spark_deploy.plan.gateway import gateway_plan

NAMES = ("spark.example.org", "10.0.0.9")


def openssl(*words: object, text: str | None = None) -> str:
    done = subprocess.run(
        ["openssl", *map(str, words)], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pair(folder: Path, name: str = "spark.example.org", *more: str, stem: str = "one") -> list[str]:
    certificate, key = folder / f"{stem}.pem", folder / f"{stem}-key.pem"
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-subj", "/CN=x", "-addext", f"subjectAltName={name}", "-keyout", key, "-out", certificate,
        *(more or ("-days", "90")),
    )  # fmt: skip
    key.chmod(0o600)
    return [str(certificate), str(key)]


def said(found: list, *words: str) -> None:
    assert len(found) == 1, found
    for word in words:
        assert word in str(found[0])


def test_a_pair_that_covers_the_host_is_taken(tmp_path):
    assert check_pair(*pair(tmp_path, "DNS:spark.example.org"), "Spark.example.org") == []
    assert check_pair(*pair(tmp_path, "IP:10.0.0.9"), "10.0.0.9") == []


@pytest.mark.parametrize(
    ("names", "host", "good"),
    [
        ("DNS:*.example.org", "spark.example.org", True),
        ("DNS:*.example.org", "example.org", False),
        ("DNS:*.example.org", "a.spark.example.org", False),
        ("DNS:*.0.0.9", "10.0.0.9", False),
        ("DNS:other.example.org", "spark.example.org", False),
    ],
)
def test_names_are_covered_as_clients_judge_it(tmp_path, names, host, good):
    found = check_pair(*pair(tmp_path, names), host)
    if good:
        assert found == []
    else:
        said(found, f"not {host}", "serve.address")


def test_a_key_of_another_certificate_is_refused(tmp_path):
    one = pair(tmp_path, "DNS:spark.example.org")
    other = pair(tmp_path, "DNS:spark.example.org", stem="other")
    said(check_pair(one[0], other[1], NAMES[0]), "is not the key of", "other-key.pem")


def test_a_certificate_that_ended_is_refused(tmp_path, monkeypatch):
    files = pair(tmp_path, "DNS:spark.example.org", "-days", "3")
    assert check_pair(*files, NAMES[0]) == []
    later = certificates.now() + timedelta(days=4)
    monkeypatch.setattr(certificates, "now", lambda: later)
    said(check_pair(*files, NAMES[0]), "not now", "new certificate")


def test_a_key_for_everybody_a_locked_key_and_missing_files_are_refused(tmp_path):
    certificate, key = pair(tmp_path, "DNS:spark.example.org")
    Path(key).chmod(0o644)
    said(check_pair(certificate, key, NAMES[0]), "read by everybody", "chmod 600")
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked)
    said(check_pair(certificate, str(locked), NAMES[0]), "has the wrong format", "unencrypted")
    said(check_pair(certificate, "/nowhere.pem", NAMES[0]), "cannot be read")
    said(check_pair(key, key, NAMES[0])[:1], "has the wrong format")


def test_no_message_holds_a_line_of_a_key(tmp_path):
    certificate, key = pair(tmp_path, "DNS:other.example.org")
    Path(key).chmod(0o644)
    secret = Path(key).read_text().splitlines()[1]
    assert secret not in str(check_pair(certificate, key, NAMES[0]))
    assert secret not in str(check_pair(key, key, NAMES[0]))


def test_a_leaf_of_the_private_ca_is_accepted_by_openssl_for_its_names(tmp_path):
    ca = tmp_path / "ca"
    made = issue(NAMES, str(ca))
    leaf = tmp_path / "leaf.pem"
    leaf.write_bytes(made.certificate)
    for words in (("-verify_hostname", NAMES[0]), ("-verify_ip", NAMES[1])):
        openssl("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", ca / "ca.pem",
                *words, leaf)  # fmt: skip
    assert openssl("pkey", "-pubout", text=made.key.decode()) == openssl(
        "x509", "-in", leaf, "-pubkey", "-noout"
    )
    assert stat.S_IMODE((ca / "ca-key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(ca.stat().st_mode) == 0o700
    assert made.key.decode().splitlines()[1] not in repr(made)


def public(key: bytes) -> bytes:
    return openssl("pkey", "-pubout", text=key.decode()).encode()


def test_the_ca_is_made_once_and_its_leaves_are_left_alone_until_they_are_due(tmp_path):
    ca = str(tmp_path / "ca")
    assert "no CA" in why_renew(b"", b"", NAMES, ca)
    assert not (tmp_path / "ca").exists()
    one = issue(NAMES, ca)
    first = (tmp_path / "ca/ca.pem").read_bytes()
    other = issue(NAMES, ca)
    assert (tmp_path / "ca/ca.pem").read_bytes() == first

    assert why_renew(one.certificate, public(one.key), NAMES, ca) == ""
    assert "no certificate" in why_renew(b"", public(one.key), NAMES, ca)
    assert "does not match" in why_renew(one.certificate, public(other.key), NAMES, ca)
    assert "does not cover new.example.org" in why_renew(
        one.certificate, public(one.key), (*NAMES, "new.example.org"), ca
    )
    due = issue(NAMES, ca, days=certificates.RENEW_DAYS - 1)
    assert "it ends on" in why_renew(due.certificate, public(due.key), NAMES, ca)
    foreign = issue(NAMES, str(tmp_path / "other"))
    assert "not issued by" in why_renew(foreign.certificate, public(foreign.key), NAMES, ca)
    assert "not issued by" in why_renew(b"rubbish", public(one.key), NAMES, ca)


def test_half_a_ca_is_never_replaced_silently(tmp_path):
    ca = tmp_path / "ca"
    issue(NAMES, str(ca))
    (ca / "ca-key.pem").unlink()
    with pytest.raises(SettingsError, match="contains no CA"):
        issue(NAMES, str(ca))


def test_a_ca_that_ends_is_said_before_clients_notice(tmp_path, monkeypatch):
    ca = str(tmp_path / "ca")
    issue(NAMES, ca)
    later = certificates.now() + timedelta(days=certificates.CA_DAYS - 10)
    monkeypatch.setattr(certificates, "now", lambda: later)
    with pytest.raises(SettingsError, match="clients must be given"):
        issue(NAMES, ca)


def test_a_gateway_without_a_name_cannot_have_a_certificate(tmp_path):
    overrides = {"serve.expose": "lan", "serve.tls": "private-ca"}
    found = load_hosts({"spark": ["@local"]}, root=tmp_path, overrides=overrides)
    plan = gateway_plan(found["@local"].settings, "@local")
    said(check_gateway(plan), "serve.address", "serve.address")
    assert check_gateway(dataclasses.replace(plan, address="spark.example.org")) == []


def signed_by(ca: Path, name: str, folder: Path) -> Path:
    """Return a certificate that whoever stole the CA's key made with openssl."""
    key, request, leaf, more = (folder / f"stolen.{end}" for end in ("key", "csr", "pem", "ext"))
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-subj", "/CN=x", "-keyout", key, "-out", request)  # fmt: skip
    more.write_text(f"subjectAltName={name}\nextendedKeyUsage=serverAuth\n")
    openssl("x509", "-req", "-in", request, "-CA", ca / "ca.pem", "-CAkey", ca / "ca-key.pem",
            "-CAcreateserial", "-days", "30", "-extfile", more, "-out", leaf)  # fmt: skip
    return leaf


def verified(ca: Path, leaf: Path) -> str:
    done = subprocess.run(
        ["openssl", "verify", "-purpose", "sslserver", "-CAfile", str(ca / "ca.pem"), str(leaf)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    [
        *("DNS:bank.example.com", "DNS:example.org", "DNS:other.example.org", "DNS:com"),
        *("IP:10.0.0.8", "IP:192.0.2.7", "IP:2001:db8::1", "DNS:invalid"),
    ],
)
def test_a_stolen_ca_signs_for_no_name_but_those_of_its_hosts(tmp_path, name):
    ca = tmp_path / "ca"
    issue(NAMES, str(ca))
    assert "permitted subtree violation" in verified(ca, signed_by(ca, name, tmp_path))
    assert verified(ca, signed_by(ca, f"DNS:{NAMES[0]}", tmp_path)).endswith(": OK\n")


@pytest.mark.parametrize(
    "names",
    [
        *(["spark-1"], ["10.0.0.9"], ["fd00::9"], ["*.lab.example.org", "lab.example.org"]),
        ["Spark.Example.org"],
    ],
)
def test_hosts_of_every_kind_of_name_are_covered(tmp_path, names):
    ca, leaf = tmp_path / "ca", tmp_path / "leaf.pem"
    leaf.write_bytes(issue(names, str(ca)).certificate)
    assert verified(ca, leaf).endswith(": OK\n")
    other = signed_by(ca, "DNS:bank.example.com,IP:192.0.2.9", tmp_path)
    assert "permitted subtree violation" in verified(ca, other)


def test_another_host_widens_the_same_ca_and_the_hosts_before_stay_trusted(tmp_path):
    ca, first, second = tmp_path / "ca", tmp_path / "first.pem", tmp_path / "second.pem"
    made = issue(NAMES, str(ca))
    first.write_bytes(made.certificate)
    key, before = (ca / "ca-key.pem").read_bytes(), (ca / "ca.pem").read_bytes()
    issue(NAMES, str(ca))
    assert (ca / "ca.pem").read_bytes() == before  # nothing new to sign for

    second.write_bytes(issue(["spark-2.example.org"], str(ca)).certificate)
    assert (ca / "ca-key.pem").read_bytes() == key
    for leaf in (first, second):
        assert verified(ca, leaf).endswith(": OK\n")
    assert why_renew(made.certificate, public(made.key), NAMES, str(ca)) == ""
    # Clients that have the earlier file go on with the hosts that it was made for.
    (ca / "ca.pem").write_bytes(before)
    assert verified(ca, first).endswith(": OK\n")
    assert "permitted subtree violation" in verified(ca, second)


def test_a_ca_that_was_made_without_limits_goes_on_as_it_is(tmp_path, monkeypatch):
    ca, leaf = tmp_path / "ca", tmp_path / "leaf.pem"
    ca.mkdir(mode=0o700)
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-subj", "/CN=earlier CA", "-days", "900", "-addext", "keyUsage=critical,keyCertSign",
            "-keyout", ca / "ca-key.pem", "-out", ca / "ca.pem")  # fmt: skip
    before = (ca / "ca.pem").read_bytes()
    leaf.write_bytes(issue(NAMES, str(ca)).certificate)
    assert (ca / "ca.pem").read_bytes() == before
    assert verified(ca, leaf).endswith(": OK\n")
