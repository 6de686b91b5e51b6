"""Up and down of the whole lab: what `lab up` and `lab down` do, in order."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab import (
    cgroup,
    guest,
    identity,
    mounts,
    network,
    record,
    servers,
    stock,
    variant_base,
)
from lab.distribution import this_distribution
from lab.errors import LabError
from lab.guest import Guest
from lab.paths import LabPaths
from lab.shell import kept_open, run
from lab.variant import OWNER_DONE
from lab.variant import read as read_variant

BOOT_TIMEOUT_S = 60
OWNER_TIMEOUT_S = 180


@contextmanager
def lab_lock(paths: LabPaths, name: str = "lock") -> Iterator[None]:
    """Let one lab command change things at a time; the next one waits."""
    paths.state.mkdir(parents=True, exist_ok=True, mode=0o755)
    with (paths.state / name).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            print(f"waiting for another lab command: {lock.read().strip()}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        print(f"pid {os.getpid()}: {' '.join(sys.argv[1:])}", file=lock, flush=True)
        with kept_open(lock.fileno()):
            yield


def up(
    paths: LabPaths,
    names: Sequence[str],
    *,
    fresh: bool,
    bootstrap: frozenset[str],
    engine: str,
    engine_trees: bool = False,
    variant: str = "",
) -> list[Guest]:
    """Have the named guests running and reachable; running ones are left alone."""
    guests = [Guest(paths, name) for name in names]
    with lab_lock(paths):
        refuse_beside_another(paths)
        _owner().write_text(str(paths.state))
        ground = stock.prepare(paths, engine_trees=engine_trees or engine == "cpu")
        base = _base(paths, ground, variant)
        for one in guests:
            if fresh:
                guest.destroy(one)
            _up_one(one, base, bootstrap=one.name in bootstrap, variant=variant)
        for one in guests:
            wait_until_reachable(one)
            wait_for_owner(one)
        _prune_bases(paths, {ground.base, base})
        record.write_record(paths, ground.distribution)
    # Images and models can take minutes; other commands need not wait for them.
    with lab_lock(paths, "stock.lock"):
        stock.publish_engine(paths, ground, engine)
        record.write_record(paths, ground.distribution)
    return guests


def _base(paths: LabPaths, ground: stock.Ground, name: str) -> Path:
    """Return what new guests stand on: the plain base, or that of the variant."""
    if not name:
        return ground.base
    return variant_base.base(paths, ground.distribution, read_variant(name))


def _up_one(one: Guest, base: Path, *, bootstrap: bool, variant: str) -> None:
    if variant and one.exists() and one.variant != variant:
        raise LabError(
            one.name, f"is {one.variant or 'plain'} and not {variant}",
            f"make it anew: `lab up {one.name} --fresh --variant {variant}`",
        )  # fmt: skip
    if guest.state(one) == "running":
        if bootstrap and not one.spec().bootstrap:
            raise LabError(
                one.name, "runs as a bootstrapped guest",
                f"make it anew: `lab up {one.name} --fresh --bootstrap-guest {one.name}`",
            )  # fmt: skip
        return
    guest.clean(one)
    if not one.exists():
        spec = identity.new_spec(one.name, base, bootstrap=bootstrap)
        disks = read_variant(variant).disks if variant else ()
        guest.create(one, spec, variant=variant, disks=disks)
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


def wait_for_owner(one: Guest, timeout_s: float = OWNER_TIMEOUT_S) -> None:
    """Wait until what the owner of a host of this variant did, once, is done.

    Raises:
        LabError: it failed, or takes too long.
    """
    unit, done = "lab-owner.service", one.root / OWNER_DONE
    if not (one.root / "etc/systemd/system" / unit).exists():
        return
    deadline = time.monotonic() + timeout_s
    ask = guest.enter_argv(one, ["systemctl", "show", "-p", "ActiveState", "--value", unit])
    while not done.exists():
        if (state := run(ask).strip()) == "failed" or time.monotonic() > deadline:
            words = ["journalctl", "-u", unit, "-n", "15", "-o", "cat", "--no-pager"]
            said = run(guest.enter_argv(one, words))
            raise LabError(f"{one.name} {unit}", f"{state}\n{said}", "mend owner.sh of its variant")
        time.sleep(0.2)


def _prune_bases(paths: LabPaths, current: set[Path]) -> None:
    """Delete bases that no guest stands on any more; of a variant its newest is kept."""
    used = {Path(one.spec().base) for one in record.all_guests(paths)} | current
    variants = {tree.name.rpartition("-")[0] for tree in current} - {"base"}
    for pattern in ("base-*", *(f"{variant}-*" for variant in variants)):
        for tree in paths.cache.glob(pattern):
            if tree not in used:
                shutil.rmtree(tree)


def down(paths: LabPaths, names: Sequence[str], *, delete: bool) -> None:
    """Power the named guests off; without names all of them, the servers and the bridge."""
    if not names:
        refuse_beside_another(paths)
    known = {one.name for one in record.all_guests(paths)} | (set(cgroup.trees()) - {"host"})
    for name in names or sorted(known):
        one = Guest(paths, name)
        guest.power_off(one)
        if delete:
            guest.destroy(one)
    if not names:
        servers.stop_all(paths)
        network.remove_bridge()
        _owner().unlink(missing_ok=True)
        if delete and paths.guests.exists():
            mounts.unmount_below(paths.guests)
            shutil.rmtree(paths.guests)
    if delete and paths.record.exists():
        record.write_record(paths, this_distribution())


def refuse_beside_another(paths: LabPaths) -> None:
    """Keep two state folders from sharing one bridge and one tree of cgroups.

    Raises:
        LabError: a lab with another folder is up: taking this one down would end its guests.
    """
    owner = _owner().read_text() if _owner().exists() else str(paths.state)
    if owner != str(paths.state) and cgroup.trees():
        fix = f"SPARK_LAB_DIR={owner} make lab-down, or give this one a network of its own"
        raise LabError("lab", f"another is up, in {owner}", fix)


def _owner() -> Path:
    """Return the file that names the folder of the lab that is up; a reboot ends both."""
    return Path("/run") / f"spark-{cgroup.TREE}.state"


def leftovers(paths: LabPaths) -> list[str]:
    """Return what a lab that is down should have taken away: links, mounts, cgroups."""
    found = network.leftovers()
    found += [f"mount {point}" for point in mounts.mount_points(paths.state)]
    found += [f"cgroup {name}" for name in cgroup.trees()]
    return found
