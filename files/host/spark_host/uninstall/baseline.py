"""What the host was before the first deploy: written down once, and read when we leave."""

from __future__ import annotations

import grp
import os
import shutil
from pathlib import Path

from spark_contract import files
from spark_contract.documents import DocumentError, parse, text_of
from spark_contract.keep import Before, Footprint
from spark_contract.paths import Paths

from spark_host.system import docker, systemd
from spark_host.system.programs import run_program

RECORD = "before.json"
_LIMIT_S = 900.0  # apt on a busy host
# What packages make while they run, and leave behind when they are purged.
REMAINS = {
    "docker.io": ("/etc/docker", "/etc/cni", "/var/lib/containerd"),
    "nginx-light": ("/var/www",),
}


def noted(paths: Paths) -> Before | None:
    """Return what was written down; ``None`` where an earlier version deployed first."""
    try:
        return parse(Before, (paths.state / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError, DocumentError):
        return None


def note(wanted: Footprint, paths: Paths) -> bool:
    """Write down what the host is now; return whether that was done.

    The folder of our records comes with it in one step: a host that has the folder and not the
    record was deployed to before, and what it was then is unknown.
    """
    if paths.state.exists():
        return False
    aside = paths.state.with_name(f".{paths.state.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    files.write_text(aside / RECORD, text_of(seen(wanted, paths)))
    aside.chmod(0o755)
    aside.rename(paths.state)
    files.sync_directory(paths.state.parent)
    return True


def seen(wanted: Footprint, paths: Paths) -> Before:
    """Look at everything of the host that a deploy may change."""
    return Before(
        at=files.now(),
        packages=installed(),
        groups=groups(),
        masked=masked(wanted.masked),
        boot_target=boot_target(),
        docker_members=docker_members(),
        images=tuple(sorted(str(image.get("Id")) for image in docker.query("/images/json") or [])),
        directories=directories(wanted, paths),
        files={path: content_of(paths.below(path)) for path in wanted.shared_files},
    )


def content_of(path: Path) -> str | None:
    """Return the text of a file; ``None`` when there is none."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def installed() -> tuple[str, ...]:
    """Return the names of all installed packages."""
    lines = told("dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package}\n").splitlines()
    return tuple(sorted({line.split()[-1] for line in lines if line.startswith(("ii", "hi"))}))


def masked(units: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of ``units`` that are masked for good."""
    states = systemd.show(units, ["UnitFileState"])
    return tuple(name for name in units if states.get(name, {}).get("UnitFileState") == "masked")


def boot_target() -> str:
    """Return what the host boots into."""
    return systemd.systemctl("get-default").stdout.strip()


def docker_members() -> tuple[str, ...]:
    """Return who may use docker without sudo."""
    try:
        return tuple(sorted(grp.getgrnam("docker").gr_mem))
    except KeyError:
        return ()


def groups() -> tuple[str, ...]:
    """Return the names of all groups."""
    return tuple(sorted(entry.gr_name for entry in grp.getgrall()))


def directories(wanted: Footprint, paths: Paths) -> tuple[str, ...]:
    """List the directories below /etc, those that lead to large data, and those of packages."""
    found = {folder for folder, _, _ in os.walk(paths.below("/etc"))}
    large = (wanted.models_dir, wanted.sources_dir, wanted.cache_dir)
    for path in (*large, *(path for of in REMAINS.values() for path in of)):
        ways = (paths.below(path), *paths.below(path).parents)
        found |= {str(way) for way in ways if way.is_dir()}
    return tuple(sorted(found))


def told(*argv: str) -> str:
    """Return what a program prints, in English; empty where it is not installed."""
    return run_program(["env", "DEBIAN_FRONTEND=noninteractive", *argv], _LIMIT_S).stdout
