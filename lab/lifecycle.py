import fcntl
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab import cgroup, guest, identity, mounts, network, record, servers, stock
from lab.distribution import this_distribution
from lab.errors import LabError
from lab.guest import Guest, GuestSpec
from lab.paths import LabPaths
from lab.shell import inherited_descriptor, run
from lab.variant import OWNER_DONE, build_base
from lab.variant import read as read_variant

BOOT_TIMEOUT_S = 60
OWNER_TIMEOUT_S = 180


@contextmanager
def lab_lock(paths: LabPaths, name: str = "lock") -> Iterator[None]:
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
        with inherited_descriptor(lock.fileno()):
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
    guests = [Guest(paths, name) for name in names]
    with lab_lock(paths):
        reject_second_lab(paths)
        _owner_file().write_text(str(paths.state))
        ground = stock.prepare(paths, engine_trees=engine_trees or engine == "cpu")
        base = ground.base
        if variant:
            base = build_base(paths, ground.distribution, read_variant(variant))
        for member in guests:
            if fresh:
                guest.destroy(member)
            _start(member, base, bootstrap=member.name in bootstrap, variant=variant)
        for member in guests:
            wait_until_reachable(member)
            wait_for_owner(member)
        _prune_bases(paths, {ground.base, base})
        record.write_record(paths, ground.distribution)
    # Images and models can take minutes; other commands do not wait for them.
    with lab_lock(paths, "stock.lock"):
        stock.publish_engine(paths, ground, engine)
        record.write_record(paths, ground.distribution)
    return guests


def _start(host: Guest, base: Path, *, bootstrap: bool, variant: str) -> None:
    if variant and host.exists() and host.variant != variant:
        raise LabError(
            host.name, f"is {host.variant or 'plain'} and not {variant}",
            f"recreate it: `lab up {host.name} --fresh --variant {variant}`",
        )  # fmt: skip
    if guest.state(host) == "running":
        if bootstrap and not host.spec().bootstrap:
            raise LabError(
                host.name, "runs as a bootstrapped guest",
                f"recreate it: `lab up {host.name} --fresh --bootstrap-guest {host.name}`",
            )  # fmt: skip
        return
    guest.clean(host)
    if not host.exists():
        password = secrets.token_urlsafe(12) if bootstrap else None
        spec = GuestSpec(host.name, str(base), bootstrap, password)
        disks = read_variant(variant).disks if variant else ()
        guest.create(host, spec, variant=variant, disks=disks)
    guest.mount_root(host)
    if not (host.home / "identity").exists():
        identity.write_identity(host)
    guest.start(host)


def wait_until_reachable(host: Guest, timeout_s: float = BOOT_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host.ip, 22), timeout=2) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            time.sleep(0.1)
    tail = (
        host.console.read_text(errors="replace").splitlines()[-15:] if host.console.exists() else []
    )
    log = (host.home / "supervisor.log").read_text(errors="replace").splitlines()[-3:]
    raise LabError(
        host.name, "\n".join([f"not reachable after {timeout_s:.0f} s", *tail, *log]),
        f"read {host.console}; then `lab down {host.name}` and `lab up {host.name}`",
    )  # fmt: skip


def wait_for_owner(host: Guest, timeout_s: float = OWNER_TIMEOUT_S) -> None:
    unit, done = "lab-owner.service", host.root / OWNER_DONE
    if not (host.root / "etc/systemd/system" / unit).exists():
        return
    deadline = time.monotonic() + timeout_s
    query = guest.enter_argv(host, ["systemctl", "show", "-p", "ActiveState", "--value", unit])
    while not done.exists():
        if (state := run(query).strip()) == "failed" or time.monotonic() > deadline:
            words = ["journalctl", "-u", unit, "-n", "15", "-o", "cat", "--no-pager"]
            log = run(guest.enter_argv(host, words))
            raise LabError(f"{host.name} {unit}", f"{state}\n{log}", "fix the variant's owner.sh")
        time.sleep(0.2)


def _prune_bases(paths: LabPaths, current: set[Path]) -> None:
    used = {Path(member.spec().base) for member in record.all_guests(paths)} | current
    variants = {tree.name.rpartition("-")[0] for tree in current} - {"base"}
    for pattern in ("base-*", *(f"{variant}-*" for variant in variants)):
        for tree in paths.cache.glob(pattern):
            if tree not in used:
                shutil.rmtree(tree)


def down(paths: LabPaths, names: Sequence[str], *, delete: bool) -> None:
    if not names:
        reject_second_lab(paths)
    existing = {member.name for member in record.all_guests(paths)} | {*cgroup.list_trees()}
    for name in names or sorted(existing - {"host"}):
        host = Guest(paths, name)
        guest.power_off(host)
        if delete:
            guest.destroy(host)
    if not names:
        servers.stop_all(paths)
        network.remove_bridge()
        _owner_file().unlink(missing_ok=True)
        if delete and paths.guests.exists():
            mounts.unmount_below(paths.guests)
            shutil.rmtree(paths.guests)
    if delete and paths.record.exists():
        record.write_record(paths, this_distribution())


def reject_second_lab(paths: LabPaths) -> None:
    owner = _owner_file().read_text() if _owner_file().exists() else str(paths.state)
    if owner != str(paths.state) and cgroup.list_trees():
        fix = f"SPARK_LAB_DIR={owner} make lab-down, or use a separate network namespace"
        raise LabError("lab", f"another lab is running in {owner}", fix)


def _owner_file() -> Path:
    return Path("/run") / f"spark-{cgroup.TREE}.state"


def leftovers(paths: LabPaths) -> list[str]:
    names = network.leftovers()
    names += [f"mount {point}" for point in mounts.mount_points(paths.state)]
    names += [f"cgroup {name}" for name in cgroup.list_trees()]
    return names
