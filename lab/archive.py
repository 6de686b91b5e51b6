"""Signed package repositories: apt-ftparchive writes the indexes; each has a separate key."""

import gzip
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lab.content import content_key
from lab.paths import APT_PORT, HOST_IP, LabPaths
from lab.shell import run


@dataclass(frozen=True, slots=True)
class Archive:
    name: str
    suite: str
    directory: str
    preconfigured: bool  # in every guest's sources, like the distribution's archive on a Spark

    @property
    def url(self) -> str:
        return f"http://{HOST_IP}:{APT_PORT}/{self.directory}"

    @property
    def key_url(self) -> str:
        return f"{self.url}/archive-key.asc"


OS_ARCHIVE = Archive("lab-os", "lab", "os", preconfigured=True)
VENDOR_ARCHIVE = Archive("lab-vendor", "vendor", "vendor", preconfigured=False)
ARCHIVES = (OS_ARCHIVE, VENDOR_ARCHIVE)


def of_variant(name: str) -> Archive:
    return replace(OS_ARCHIVE, directory=f"variant-{name}")


def publish(paths: LabPaths, archive: Archive, debs: Iterable[Path], deb_arch: str) -> None:
    root = paths.apt / archive.directory
    pool = root / "pool"
    pool.mkdir(parents=True, exist_ok=True)
    offered = {deb.name: deb for deb in debs}
    key = _signing_key(paths, archive)
    stamp = content_key(sorted(str(deb) for deb in offered.values()), deb_arch, key)
    mark = root / ".published"
    if mark.exists() and mark.read_text() == stamp:
        return
    for old in pool.glob("*.deb"):
        old.unlink()
    for name, deb in offered.items():
        _link(deb, pool / name)
    _write_indexes(paths, archive, root, deb_arch)
    mark.write_text(stamp)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem
        shutil.copy(source, target)


def _write_indexes(paths: LabPaths, archive: Archive, root: Path, deb_arch: str) -> None:
    fresh = root / "dists.new"
    if fresh.exists():
        shutil.rmtree(fresh)
    binary = fresh / archive.suite / "main" / f"binary-{deb_arch}"
    binary.mkdir(parents=True)
    packages = run(["apt-ftparchive", "packages", "pool"], cwd=root)
    (binary / "Packages").write_text(packages)
    (binary / "Packages.gz").write_bytes(gzip.compress(packages.encode(), mtime=0))
    suite = fresh / archive.suite
    fields = {
        "Origin": archive.name,
        "Label": archive.name,
        "Suite": archive.suite,
        "Codename": archive.suite,
        "Architectures": f"{deb_arch} all",
        "Components": "main",
    }
    options = [f"-oAPT::FTPArchive::Release::{key}={value}" for key, value in fields.items()]
    release = run(["apt-ftparchive", *options, "release", suite])
    (suite / "Release").write_text(release)
    _gpg(paths, archive, "--clearsign", "-o", str(suite / "InRelease"), str(suite / "Release"))
    armored = _gpg(paths, archive, "--armor", "--export")
    (root / "archive-key.asc").write_text(armored)
    if (root / "dists").exists():
        shutil.rmtree(root / "dists")
    fresh.rename(root / "dists")


def key_sha256(paths: LabPaths, archive: Archive) -> str:
    return hashlib.sha256(
        (paths.apt / archive.directory / "archive-key.asc").read_bytes()
    ).hexdigest()


def _signing_key(paths: LabPaths, archive: Archive) -> str:
    if not (_gnupg(paths, archive) / "made").exists():
        if _gnupg(paths, archive).exists():
            shutil.rmtree(_gnupg(paths, archive))
        _gnupg(paths, archive).mkdir(parents=True, mode=0o700)
        user = f"{archive.name} archive (virtual lab)"
        _gpg(
            paths, archive, "--passphrase", "", "--quick-generate-key", user, "ed25519", "sign", "0"
        )
        (_gnupg(paths, archive) / "made").write_text("")
    listing = _gpg(paths, archive, "--with-colons", "--list-keys")
    return next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr"))


def _gnupg(paths: LabPaths, archive: Archive) -> Path:
    return paths.state / "gnupg" / archive.directory


def _gpg(paths: LabPaths, archive: Archive, *words: str) -> str:
    env = {"GNUPGHOME": str(_gnupg(paths, archive))}
    try:
        return run(["gpg", "--batch", "--yes", *words], env=env)
    finally:
        # gpg's agent would otherwise survive the lab.
        run(["gpgconf", "--kill", "gpg-agent"], env=env, check=False)
