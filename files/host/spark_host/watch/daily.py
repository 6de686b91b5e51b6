"""Once a day: what decays on a host without anybody noticing. Found, written down, and told.

Nothing is repaired here; `spark-deploy status` and `doctor` tell what was found, until the next.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from spark_contract.errors import HostToolError, Problem
from spark_contract.paths import Paths
from spark_contract.records import DailyLook, Proof
from spark_contract.release import Release
from spark_contract.units import GATEWAY, WATCH

from spark_host.records import boot, proof
from spark_host.system import folders, programs
from spark_host.system.host import Host, load_gateway, release_names
from spark_host.system.programs import log

CERTIFICATE_DAYS = 30
PROOF_DAYS = 60
JOURNAL_BYTES = 4 << 30
FREE_BYTES = 5 << 30
FREE_INODES_SHARE = 0.02
# What an engine compiled, several times over; it has no quota.
CACHE_BYTES = 20 << 30
CACHE_FILES = 200_000
_DAY_S = 86_400
_CLOCK_S = 3_600
_GIB = 1 << 30


def look(host: Host) -> DailyLook:
    """Return what is wrong now."""
    running = [release for name in release_names(host.paths) if (release := _running(name, host))]
    found = (
        *_watched(running, host),
        *_certificates(running, host.paths),
        *_journal(host.paths),
        *_disks(running, host.paths),
        *_caches(running, host.paths),
        *_clock(running, host),
        *_trees(host),
        *_proofs(running, host),
    )
    return DailyLook(at=host.clock.now(), problems=tuple(found))


def _running(name: str, host: Host) -> Release | None:
    release = host.release(name)
    return release if release and host.units.is_active(release.serve_unit) else None


def _watched(running: list[Release], host: Host) -> Iterator[Problem]:
    for release in running:
        for unit in (WATCH.of(release.name), GATEWAY.of(release.service)):
            if not host.units.is_active(unit):
                what = f"{unit} does not run beside {release.serve_unit}"
                yield Problem("watch", what, f"journalctl -u {unit}; systemctl start {unit}")


def _certificates(running: list[Release], paths: Paths) -> Iterator[Problem]:
    for service in sorted({release.service for release in running}):
        try:
            tls = load_gateway(service, paths).tls
        except HostToolError as error:
            yield Problem("gateway", error.what, error.fix)
            continue
        if tls is None:
            continue
        path = paths.below(tls.certificate)
        said = programs.output_of("openssl", "x509", "-in", str(path), "-noout", "-enddate")
        ends = _end(said or "")
        if ends is None:
            yield Problem("certificate", f"{path} cannot be read", "run the deploy again")
        elif (left := (ends - _now()).total_seconds() / _DAY_S) < CERTIFICATE_DAYS:
            what = f"the certificate of {service} ends on {ends:%Y-%m-%d}, in {left:.0f} days"
            fix = "renew it and run the deploy; private-ca makes a new one by itself"
            yield Problem("certificate", what, fix)


def _end(said: str) -> datetime | None:
    found = re.search(r"notAfter=(\w{3} +\d+ [\d:]+ \d{4}) GMT", said)
    if found is None:
        return None
    return datetime.strptime(found[1], "%b %d %H:%M:%S %Y").replace(tzinfo=timezone.utc)


def _journal(paths: Paths) -> Iterator[Problem]:
    size = 0
    for place, _, names in os.walk(paths.below("/var/log/journal")):
        size += sum(os.lstat(Path(place, name)).st_blocks * 512 for name in names)
    if size > JOURNAL_BYTES:
        what = f"the journal takes {size / _GIB:.1f} GiB"
        yield Problem("journal", what, "journalctl --vacuum-size=2G; set SystemMaxUse=2G")


def _disks(running: list[Release], paths: Paths) -> Iterator[Problem]:
    places = {
        paths.root,
        paths.below("/var"),
        *(paths.below(tree.path) for release in running for tree in release.trees),
        *_written(running, paths),
    }
    seen: set[int] = set()
    for place in sorted(place for place in places if place.exists()):
        device = place.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        if free < FREE_BYTES:
            what = f"{free / _GIB:.1f} GiB are free on the disk of {place}"
            yield Problem("disk", what, "spark-deploy prune, or df -h")
        if room.f_files and room.f_favail < FREE_INODES_SHARE * room.f_files:
            what = f"{room.f_favail} of {room.f_files} inodes are free on the disk of {place}"
            yield Problem("disk", what, "find what made so many small files: df -i")


def _written(running: list[Release], paths: Paths) -> set[Path]:
    """Return the folders of the host's disk that engines write to."""
    return {paths.below(release.cache) for release in running if release.cache}


def _caches(running: list[Release], paths: Paths) -> Iterator[Problem]:
    for folder in sorted(_written(running, paths)):
        size, count = folders.measure(folder, CACHE_BYTES, CACHE_FILES)
        if size > CACHE_BYTES or count > CACHE_FILES:
            what = f"{folder} holds {size / _GIB:.1f} GiB in {count} files; a compiler's is smaller"
            fix = "spark-deploy logs: who wrote it? Stop the engine, remove it, start it again"
            yield Problem("cache", what, fix)


def _clock(running: list[Release], host: Host) -> Iterator[Problem]:
    if programs.output_of("timedatectl", "show", "--property=NTPSynchronized", "--value") == "no":
        fix = "timedatectl set-ntp true; look whether a time server can be reached"
        yield Problem("clock", "is not synchronised", fix)
    for release in running:
        age_s = _age_s(proof.read(release.name, host))
        if age_s is not None and age_s < -_CLOCK_S:
            what = f"went back: {release.name} was proven {-age_s / 3600:.0f} hours from now"
            yield Problem("clock", what, "set it right, then spark-check")


def _trees(host: Host) -> Iterator[Problem]:
    for service in sorted({r.service for n in release_names(host.paths) if (r := host.release(n))}):
        for name in boot.enabled(service, host):
            release = host.release(name)
            gone = [
                tree.path for tree in (release.trees if release else ())
                if not host.paths.below(tree.path).is_dir()
            ]  # fmt: skip
            if gone:
                what = f"{gone[0]}, which {name} boots with, is not there"
                yield Problem("mounts", what, "mount its disk (findmnt --verify), or deploy again")


def _proofs(running: list[Release], host: Host) -> Iterator[Problem]:
    for release in running:
        age_s = _age_s(proof.read(release.name, host))
        if age_s is None:
            yield Problem("proof", f"{release.name} runs without a proof", "spark-check")
        elif age_s > PROOF_DAYS * _DAY_S:
            what = f"{release.name} was proven {age_s / _DAY_S:.0f} days ago"
            yield Problem("proof", what, "spark-check")


def _age_s(found: Proof | None) -> float | None:
    if found is None:
        return None
    try:
        checked = datetime.fromisoformat(found.checked_at.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (_now() - checked).total_seconds()


def _now() -> datetime:
    return datetime.now(timezone.utc)


def main(words: list[str], paths: Paths) -> int:
    """Run ``daily``: look, and write down what was found."""
    host = Host(paths)
    found = look(host)
    for one in found.problems:
        log(one.line)
    host.disk.write(paths.daily, found)
    return 0
