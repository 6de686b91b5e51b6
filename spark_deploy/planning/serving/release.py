"""The files of one release on a host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spark_contract.documents import plain, text_of
from spark_contract.host import tool
from spark_contract.host.paths import engine_dir, release_file
from spark_contract.host.units import UNITS_DIR, WATCH, drop_in_dir, mount_unit
from spark_contract.serving.release import Release

from spark_deploy.managed import ManagedFile
from spark_deploy.planning.budget.disk import disk_total
from spark_deploy.planning.serving.unit_limits import limits
from spark_deploy.planning.types import HostPlan, ServicePlan


def unit_files_of(units: tuple[ManagedFile, ...]) -> tuple[ManagedFile, ...]:
    """Return the static units, and the commands that people and our own messages use by name."""
    return (*units, _command(tool.CHECK_TOOL, f" {tool.CHECK}"), _command(tool.TOOL, ""))


def _command(name: str, verb: str) -> ManagedFile:
    path = f"{tool.COMMANDS_DIR}/{name}"
    # Sockets, proofs and journals are root's; who logs in to look is mostly not.
    as_root = f'[ "$(id -u)" = 0 ] || exec sudo -- {path} "$@"'
    text = f'#!/bin/sh\n{as_root}\nexec {tool.HOST_TOOL}{verb} "$@"\n'
    return ManagedFile(path, text.encode(), 0o755)


def release_files_of(plan: ServicePlan) -> tuple[ManagedFile, ...]:
    """Return release.json and the unit's limits, of what is served and of what has its times."""
    others = {one.release.name: one.release for one in plan.schedule if one.release != plan.serve}
    files = (file for release in (*others.values(), plan.serve) for file in _files(release))
    return tuple({file.path: file for file in files}.values())


def _files(release: Release) -> tuple[ManagedFile, ...]:
    return (
        ManagedFile(release_file(release.name), text_of(release).encode()),
        _socket_mount(release.service),
        *_reaching(release),
        ManagedFile(f"{drop_in_dir(release.serve_unit)}/50-release.conf", limits(release).encode()),
    )


def _reaching(release: Release) -> Iterator[ManagedFile]:
    """Yield what lets members of a cluster reach each other, and nobody else."""
    if release.cluster is not None:
        addresses = " ".join(member.address for member in release.cluster.members)
        path = f"{drop_in_dir(WATCH.of(release.name))}/50-cluster.conf"
        yield ManagedFile(path, f"[Service]\nIPAddressAllow={addresses}\n".encode())
        # With all of root's rights, which the unit has not; a start does not depend on it.
        up, down = (tool.line(tool.FENCE, order, release.name) for order in ("up", "down"))
        text = f"[Service]\nExecStartPre=-+{up}\nExecStopPost=-+{down}\n"
        yield ManagedFile(f"{drop_in_dir(release.serve_unit)}/50-cluster.conf", text.encode())


def _socket_mount(service: str) -> ManagedFile:
    """Return the mount unit of the folder in which the engine makes its socket.

    Whatever the engine writes there fills a file system of its own, and no link in it is followed.
    """
    folder = engine_dir(service)
    text = (
        "[Unit]\n"
        f"Description=Folder of the socket of the Spark engine {service}\n"
        "[Mount]\n"
        f"What=tmpfs\nWhere={folder}\nType=tmpfs\n"
        "Options=mode=0700,size=256k,nr_inodes=64,nosuid,nodev,noexec,nosymfollow\n"
    )
    return ManagedFile(f"{UNITS_DIR}/{mount_unit(folder)}", text.encode())


def document(plan: HostPlan) -> dict[str, Any]:
    """Return the whole plan of a host as plain data, with what follows from its parts."""
    drop_in = release_files_of(plan)[-1]
    peak_bytes, after_bytes = disk_total(plan.disk)
    return {
        **plain(plan),
        "disk_total": {"peak_bytes": peak_bytes, "after_bytes": after_bytes},
        "unit": {
            "name": plan.serve.serve_unit,
            "drop_in": drop_in.path,
            "lines": drop_in.content.decode().splitlines(),
        },
    }
