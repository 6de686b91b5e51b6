"""lab.json and known_hosts: the running lab for inventories, tests and people."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from lab import packages
from lab.archive import ARCHIVES, key_sha256
from lab.distribution import Distribution
from lab.guest import Guest
from lab.hub.store import Store
from lab.images import read_published
from lab.paths import HOST_IP, HUB_PORT, REGISTRY_PORT, USER, LabPaths


def all_guests(paths: LabPaths) -> list[Guest]:
    homes = paths.guests.glob("*/guest.json") if paths.guests.exists() else []
    return sorted((Guest(paths, home.parent.name) for home in homes), key=lambda guest: guest.index)


def host_key(guest: Guest) -> str | None:
    path = guest.disk / "upper/etc/ssh/ssh_host_ed25519_key.pub"
    try:
        return " ".join(path.read_text().split()[:2])
    except OSError:  # before the first boot, or after a power cut
        return None


def _guest_record(guest: Guest) -> dict[str, object]:
    spec = guest.spec()
    return {
        "name": guest.name,
        "ip": guest.ip,
        "user": USER,
        "port": 22,
        "bootstrap": spec.bootstrap,
        "password": spec.password,
        "host_key": host_key(guest),
        "variant": guest.variant,
    }


def lab_record(paths: LabPaths, distribution: Distribution) -> dict[str, object]:
    return {
        "state_dir": str(paths.state),
        "ssh": {"user": USER, "key": str(paths.ssh_key), "known_hosts": str(paths.known_hosts)},
        "guests": [_guest_record(guest) for guest in all_guests(paths)],
        "apt": [
            {
                "name": archive.name,
                "url": archive.url,
                "suite": archive.suite,
                "components": ["main"],
                "key_url": archive.key_url,
                "key_sha256": key_sha256(paths, archive),
                "preconfigured": archive.preconfigured,
            }
            for archive in ARCHIVES
        ],
        "hub": {
            "endpoint": f"http://{HOST_IP}:{HUB_PORT}",
            "repos": Store(paths.hub).repositories(),
        },
        "registry": f"{HOST_IP}:{REGISTRY_PORT}",
        "docker_packages": packages.docker_packages(),
        "images": {name: asdict(image) for name, image in read_published(paths).items()},
        "os": {
            "arch": distribution.machine,
            "os_id": distribution.os_id,
            "os_version": distribution.version,
        },
    }


def write_record(paths: LabPaths, distribution: Distribution) -> None:
    # Mode 600: lab.json contains passwords of bootstrap guests.
    text = json.dumps(lab_record(paths, distribution), indent=1)
    _replace(paths.record, text + "\n", 0o600)
    recorded = paths.known_hosts.read_text().splitlines() if paths.known_hosts.exists() else []
    lines = [
        line
        for guest in all_guests(paths)
        for line in known_hosts_lines(
            guest.ip, guest.name, host_key(guest), bootstrap=guest.spec().bootstrap,
            recorded=recorded,
        )
    ]  # fmt: skip
    _replace(paths.known_hosts, "".join(f"{line}\n" for line in lines), 0o644)


def known_hosts_lines(
    ip: str, name: str, key: str | None, *, bootstrap: bool, recorded: list[str]
) -> list[str]:
    """A new host has lines only after a bootstrap recorded them."""
    if key is None:
        return []
    lines = [f"{ip} {key}", f"{name} {key}"]
    if not bootstrap:
        return lines
    return [line for line in recorded if " ".join(line.split()[:3]) in lines]


def _replace(path: Path, text: str, mode: int) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.touch(mode=mode)
    os.chmod(fresh, mode)
    fresh.write_text(text)
    fresh.rename(path)
