"""Up and down of the whole lab: what `lab up` and `lab down` do, in order."""

from __future__ import annotations

import fcntl
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab import (
    archive,
    cgroup,
    guest,
    identity,
    mounts,
    network,
    packages,
    recipes,
    record,
    rootfs,
    servers,
)
from lab.code import use_copied_code
from lab.distribution import Distribution, install_programs, this_distribution
from lab.errors import LabError
from lab.guest import Guest
from lab.paths import LabPaths

BOOT_TIMEOUT_S = 60


@contextmanager
def lab_lock(paths: LabPaths) -> Iterator[None]:
    """Let one lab command change things at a time; the next one waits."""
    paths.state.mkdir(parents=True, exist_ok=True, mode=0o755)
    with (paths.state / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class Ground:
    """What every guest stands on."""

    distribution: Distribution
    base: Path  # read-only tree below every new guest's disk
    debs: Path  # packages that the base lacks


def prepare(paths: LabPaths) -> Ground:
    """Have programs, packages, base and servers."""
    installed = install_programs()
    if installed:
        print(f"installed on this machine: {' '.join(installed)}", flush=True)
    for directory in (paths.cache, paths.guests, paths.run, paths.hub, paths.registry):
        directory.mkdir(parents=True, exist_ok=True)
    use_copied_code(paths)
    distribution = this_distribution()
    ground = _publish_packages(paths, distribution)
    identity.ensure_ssh_key(paths)
    network.ensure_bridge()
    servers.start_all(paths)
    return ground


def _publish_packages(paths: LabPaths, distribution: Distribution) -> Ground:
    """Have the base and both package repositories."""
    tree = rootfs.bootstrap(paths, distribution)
    preinstalled = [packages.build_stub(paths, name) for name in packages.PREINSTALLED_STUBS]
    vendor = [packages.build_stub(paths, name) for name in packages.VENDOR_STUBS]
    base = rootfs.base(paths, tree, preinstalled)
    offered = packages.download(paths, distribution, tree)
    debs = [*(paths.cache / "debootstrap-debs").glob("*.deb"), *offered.glob("*.deb")]
    arch = distribution.deb_arch
    archive.publish(paths, archive.OS_ARCHIVE, [*debs, *preinstalled], arch)
    archive.publish(paths, archive.VENDOR_ARCHIVE, vendor, arch)
    return Ground(distribution, base, offered)


def publish_images(paths: LabPaths, ground: Ground, engine: str) -> None:
    """Have the images in the registry; ``engine`` is ``none``, ``stub`` or ``cpu`` (both)."""
    made = [recipes.gpu_check(paths, ground.distribution, ground.debs)]
    if engine in ("stub", "cpu") and recipes.STUB_ENGINE_DIR.exists():
        made.append(recipes.stub_engine(paths, ground.distribution))
    for recipe in made:
        recipes.publish(paths, recipe)


def up(
    paths: LabPaths, names: Sequence[str], *, fresh: bool, bootstrap: frozenset[str], engine: str
) -> list[Guest]:
    """Have the named guests running and reachable; running ones are left alone."""
    ground = prepare(paths)
    guests = [Guest(paths, name) for name in names]
    for one in guests:
        if fresh:
            guest.destroy(one)
        _up_one(one, ground.base, bootstrap=one.name in bootstrap)
    publish_images(paths, ground, engine)
    for one in guests:
        wait_until_reachable(one)
    record.write_record(paths, ground.distribution)
    return guests


def _up_one(one: Guest, base: Path, *, bootstrap: bool) -> None:
    if guest.state(one) == "running":
        if bootstrap and not one.spec().bootstrap:
            raise LabError(
                one.name, "runs as a bootstrapped guest",
                f"make it anew: `lab up {one.name} --fresh --bootstrap-guest {one.name}`",
            )  # fmt: skip
        return
    guest.clean(one)
    if not one.exists():
        guest.create(one, identity.new_spec(one.name, base, bootstrap=bootstrap))
    guest.mount_root(one)
    if not (one.home / "identity").exists():
        identity.write_identity(one)
    guest.start(one)


def wait_until_reachable(one: Guest, timeout_s: float = BOOT_TIMEOUT_S) -> None:
    """Wait until the guest's SSH server greets.

    Raises:
        LabError: it does not in time; the end of its console is shown.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((one.ip, 22), timeout=2) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            time.sleep(0.1)
    tail = (
        one.console.read_text(errors="replace").splitlines()[-15:] if one.console.exists() else []
    )
    log = (one.home / "supervisor.log").read_text(errors="replace").splitlines()[-3:]
    raise LabError(
        one.name, "\n".join([f"not reachable after {timeout_s:.0f} s", *tail, *log]),
        f"read {one.console}; then `lab down {one.name}` and `lab up {one.name}`",
    )  # fmt: skip


def down(paths: LabPaths, names: Sequence[str], *, delete: bool) -> None:
    """Power the named guests off; without names all of them, the servers and the bridge."""
    known = {one.name for one in record.all_guests(paths)} | (set(cgroup.trees()) - {"host"})
    for name in names or sorted(known):
        one = Guest(paths, name)
        guest.power_off(one)
        if delete:
            guest.destroy(one)
    if not names:
        servers.stop_all(paths)
        network.remove_bridge()
        if delete and paths.guests.exists():
            mounts.unmount_below(paths.guests)
            shutil.rmtree(paths.guests)
    if delete and paths.record.exists():
        record.write_record(paths, this_distribution())


def leftovers(paths: LabPaths) -> list[str]:
    """Return what a lab that is down should have taken away: links, mounts, cgroups."""
    found = network.leftovers()
    found += [f"mount {point}" for point in mounts.mount_points(paths.state)]
    found += [f"cgroup {name}" for name in cgroup.trees()]
    return found
