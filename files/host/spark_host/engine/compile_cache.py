"""Compile caches: each release has its own; a candidate starts with a copy of the last proven one.

A cache fits one base image and number of drafts, which name the folder it is in, and one driver,
which its record holds. The record is written last. A release keeps its cache over starts that
fail, so that compiling continues, but not after a check refused its engine's answers. Only a
proven release's cache is copied.

Engines write to these directories, so they may hold anything. coreutils copy and remove them: they
follow no link, and whatever ends them leaves a start with an empty cache.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from spark_contract.records import CompileCache
from spark_contract.release import READY, Release
from spark_contract.tool import COMPILING, PHASE

from spark_host.engine.container import account
from spark_host.records import boot, proof, upgrades
from spark_host.system import folders
from spark_host.system.ports import Host
from spark_host.system.programs import ProgramSilent, Report

# Several times what an engine compiles; a copy takes seconds.
_MOST_BYTES, _MOST_FILES = 8 << 30, 200_000


def prepare(release: Release, host: Host, report: Report) -> None:
    """Put the cache of a release in place: its own, else a copy, else an empty one."""
    if release.cache is None:
        return
    driver = loaded_driver()
    proven = release.name in boot.good(release.service, host).all
    if proven and _is_usable(release, driver, host):
        return
    folder, record = host.paths.below(release.cache), host.paths.compile_cache(release.name)
    run, found = os.environ.get("INVOCATION_ID", ""), host.disk.read(CompileCache, record)
    if found and _is_usable(release, driver, host) and not _is_refused(release, found, host):
        _write(record, replace(found, invocation_id=run), host, report)
        return
    host.disk.remove(record)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders.give(folder.parent, os.geteuid(), os.getegid(), 0o700)
    _discard(folder)
    source = _source(release, driver, host)
    if source is None or not _copy(host.paths.below(str(source.cache)), folder, report):
        source = None
        account.make_folder(folder, release)
        report(f"{PHASE}cache starts empty")
    _write(record, CompileCache(driver, source.name if source else None, run), host, report)


def _write(record: Path, cache: CompileCache, host: Host, report: Report) -> None:
    try:
        host.disk.write(record, cache)
    except OSError as error:  # on a full disk the next start compiles again
        report(f"the compile cache has no record: {error}")


def compiling(release: Release, invocation_id: str, host: Host) -> str:
    """Return the words for a start that compiles kernels; empty for any other start."""
    record = host.disk.read(CompileCache, host.paths.compile_cache(release.name))
    empty = record is not None and record.copied_from is None
    first = empty and record is not None and record.invocation_id == invocation_id
    return f"{COMPILING}; " if first and not release.check.portable else ""


def loaded_driver() -> str:
    """Return the version of the loaded driver, or ``upgrades.UNKNOWN``."""
    try:
        return proof.driver()
    except ProgramSilent:
        return upgrades.UNKNOWN


def is_whole(release: Release, driver: str, host: Host) -> bool:
    """Return whether the cache of a release is complete and of a driver."""
    record = host.disk.read(CompileCache, host.paths.compile_cache(release.name))
    return record is not None and driver in (record.driver, upgrades.UNKNOWN)


def _is_usable(release: Release, driver: str, host: Host) -> bool:
    if release.cache is None or not is_whole(release, driver, host):
        return False
    folder = host.paths.below(release.cache)
    return folder.is_dir() and folder.lstat().st_uid == account.number(release)


def _is_refused(release: Release, cache: CompileCache, host: Host) -> bool:
    """Return whether the engine answered in the cache's last run and failed a check."""
    found = proof.read(release.name, host)
    if found is None or found.invocation_id != cache.invocation_id:
        return False
    return bool(found.failed) and any(one.name == READY and one.ok for one in found.checks)


def _source(release: Release, driver: str, host: Host) -> Release | None:
    """Return the last proven release of the service whose cache a candidate can start with."""
    proven = (host.release(name) for name in boot.good(release.service, host).all)
    others = (one for one in proven if one and one.name != release.name)
    same = (one for one in others if one.cache and _key(one) == _key(release))
    return next((one for one in same if _is_usable(one, driver, host)), None)


def _key(release: Release) -> Path:
    return Path(str(release.cache)).parent


def _copy(source: Path, target: Path, report: Report) -> bool:
    size, count = folders.measure(source, _MOST_BYTES, _MOST_FILES)
    room = shutil.disk_usage(target.parent).free
    if size > min(_MOST_BYTES, room // 2) or count > _MOST_FILES:
        report(f"{source} is not copied: {size} bytes in {count} files, {room} bytes are free")
        return False
    if folders.copy_tree(source, target):
        return True
    report(f"{source} cannot be copied; the new compile cache starts empty")
    _discard(target)
    return False


def _discard(folder: Path) -> None:
    """Remove a cache; what cannot be removed moves aside for the next cleanup."""
    if not folders.remove_tree(folder) and os.path.lexists(folder):
        folder.rename(folder.with_name(f".{folder.name}.{time.time_ns()}.pruned"))
