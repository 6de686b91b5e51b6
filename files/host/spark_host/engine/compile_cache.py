"""Compile caches of releases; a new release starts with a copy of a proven cache.

A cache is valid for a base image and a number of drafts (in the name of the parent folder) and for
a driver (in the state file, which is written last). After a failed start, the next start continues
with the cache, unless a check failed. A power cut can damage files that an engine has just written:
a proven cache was written to disk before it was recorded, and a boot ends the use of other caches.
Engines can write anything to these folders, so coreutils copy and remove the folders without
following links.
"""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from spark_contract.machine import BOOT_ID
from spark_contract.records import CompileCache
from spark_contract.release import READY, Release
from spark_contract.tool import COMPILING, PHASE

from spark_host.records import boot, versions
from spark_host.system import folders
from spark_host.system.host import Host, find_account
from spark_host.system.programs import Report

# A normal cache is several times smaller.
_MAX_BYTES, _MAX_FILES = 8 << 30, 200_000
# Above these limits the watchdog stops the engine, whose account has no disk quota. The next start
# uses an empty cache.
LIMIT_BYTES, LIMIT_FILES = 20 << 30, 400_000


def prepare(release: Release, host: Host, report: Report) -> None:
    """Keep the release's cache if it is usable; otherwise copy another cache or start empty."""
    if release.cache is None:
        return
    driver = versions.read_or_unknown(versions.read_driver)
    proven = release.name in boot.read_known_good(release.service, host).names
    usable = _is_usable(release, driver, host)
    if proven and usable:  # a proven release keeps the cache
        return
    folder, state_file = host.paths.below(release.cache), host.paths.compile_cache(release.name)
    invocation_id = os.environ.get("INVOCATION_ID", "")
    state, boot_id = _read_state(release, host), Path(BOOT_ID).read_text().strip()
    # An unproven release continues with the cache of the earlier start, unless it was rejected.
    if state and usable and not _is_rejected(release, state, boot_id, host):
        _write(state_file, replace(state, invocation_id=invocation_id), host, report)
        return
    host.disk.remove(state_file)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders.create(folder.parent, os.geteuid(), os.getegid(), 0o700)
    _discard(folder)
    source = _find_source(release, driver, host)
    if source is None or not _copy(host.paths.below(str(source.cache)), folder, report):
        source, owner = None, find_account(release.engine.user)
        folders.create(folder, owner.pw_uid, owner.pw_gid, 0o755)
        report(f"{PHASE}cache starting with an empty compile cache")
    new_state = CompileCache(driver, source.name if source else None, invocation_id, boot_id)
    _write(state_file, new_state, host, report)


def _write(state_file: Path, state: CompileCache, host: Host, report: Report) -> None:
    try:
        host.disk.write(state_file, state)
    except OSError as error:  # on a full disk the next start compiles again
        report(f"cannot write the state of the compile cache: {error}")


def _read_state(release: Release, host: Host) -> CompileCache | None:
    return host.disk.read(CompileCache, host.paths.compile_cache(release.name))


def compiling_note(release: Release, invocation_id: str, host: Host) -> str:
    """Return a note if this start compiles kernels, or ""."""
    state = _read_state(release, host)
    if state is None or state.copied_from is not None or release.check.portable:
        return ""
    return COMPILING if state.invocation_id == invocation_id else ""


def is_complete(release: Release, driver: str, host: Host) -> bool:
    state = _read_state(release, host)
    return state is not None and driver in (state.driver, versions.UNKNOWN)


def size_problem(release: Release, host: Host) -> str:
    """Return why the cache is too large, or ""."""
    if release.cache is None:
        return ""
    folder = host.paths.below(release.cache)
    size, count = folders.measure(folder, LIMIT_BYTES, LIMIT_FILES)
    if size <= LIMIT_BYTES and count <= LIMIT_FILES:
        return ""
    limits = f"{LIMIT_BYTES >> 30} GiB, {LIMIT_FILES} files or the maximum path length"
    return f"{folder} exceeds the limits of a compile cache ({limits})"


def _is_usable(release: Release, driver: str, host: Host) -> bool:
    if (
        release.cache is None
        or not is_complete(release, driver, host)
        or size_problem(release, host)
    ):
        return False
    folder = host.paths.below(release.cache)
    return folder.is_dir() and folder.lstat().st_uid == find_account(release.engine.user).pw_uid


def _is_rejected(release: Release, state: CompileCache, boot_id: str, host: Host) -> bool:
    """Return whether the last engine with this cache failed its check, or ran before the boot."""
    if state.boot_id != boot_id:
        return True
    result = boot.read_proof(release.name, host)
    if result is None or result.invocation_id != state.invocation_id:
        return False
    was_ready = any(finding.name == READY and finding.ok for finding in result.checks)
    return bool(result.failed) and was_ready


def _find_source(release: Release, driver: str, host: Host) -> Release | None:
    """Return the latest proven release whose cache this release can use."""
    for name in boot.read_known_good(release.service, host).names:
        other = host.release(name)
        if other is None or other.name == release.name or not other.cache:
            continue
        same_parent = Path(other.cache).parent == Path(str(release.cache)).parent
        if same_parent and _is_usable(other, driver, host):
            return other
    return None


def _copy(source: Path, target: Path, report: Report) -> bool:
    size, count = folders.measure(source, _MAX_BYTES, _MAX_FILES)
    free = shutil.disk_usage(target.parent).free
    if size > min(_MAX_BYTES, free // 2) or count > _MAX_FILES:
        report(f"{source} is too large to copy: {size} bytes in {count} files, {free} bytes free")
        return False
    if folders.copy_tree(source, target):
        return True
    report(f"{source} cannot be copied")
    _discard(target)
    return False


def _discard(folder: Path) -> None:
    if not folders.remove_tree(folder) and os.path.lexists(folder):
        folder.rename(folder.with_name(f".{folder.name}.{time.time_ns()}.pruned"))
