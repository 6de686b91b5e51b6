"""Records the host's state before the first deploy; finds packages and files that we changed."""

import grp
import json
import os
import pwd
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from spark_contract import files
from spark_contract.documents import to_json
from spark_contract.paths import ENGINE_USER, GATEWAY_USER, Paths, backup_path
from spark_contract.status import Baseline, Footprint, ManagedItem
from spark_contract.tool import HostToolError

from spark_host.cleanup import resources
from spark_host.system import docker, systemd
from spark_host.system.host import read_document
from spark_host.system.programs import error_line, run_program

RECORD_NAME = "before.json"
_COMMAND_TIMEOUT_S = 900.0  # apt on a busy host
# Folders that purged packages leave behind.
_LEFTOVERS = {
    "docker.io": ("/etc/docker", "/etc/cni", "/var/lib/containerd"),
    "nginx-light": ("/var/www",),
}
_UNKNOWN_ORIGINAL = (
    "the earlier content is unknown; manually remove the lines that spark-deploy added"
)
_KEEP_ENGINE = "other software may use it; to remove it, add --data uninstall.engine=true"
# We never start this unit: if it runs, the owner uses the package.
_NOT_STARTED = {"nginx-light": "nginx.service"}


def read_baseline(paths: Paths) -> Baseline | None:
    return read_document(Baseline, paths.state / RECORD_NAME)


def record_baseline(footprint: Footprint, paths: Paths) -> bool:
    """Record the host's state before the first deploy; return whether this is the first."""
    if paths.state.exists():
        return False
    new = paths.state.with_name(f".{paths.state.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    before = Baseline(
        at=files.now(),
        packages=installed_packages(),
        groups=groups(),
        masked=masked_units(footprint.masked),
        boot_target=boot_target(),
        docker_members=docker_members(),
        images=tuple(sorted(str(image.get("Id")) for image in docker.query("/images/json") or [])),
        directories=_folders(footprint, paths),
        files={path: _read(paths.below(path)) for path in footprint.shared_files},
    )
    files.write_text(new / RECORD_NAME, to_json(before))
    new.chmod(0o755)
    new.rename(paths.state)
    files.sync_directory(paths.state.parent)
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def installed_packages() -> tuple[str, ...]:
    lines = _read_output("dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package}\n").splitlines()
    return tuple(sorted({line.split()[-1] for line in lines if line.startswith(("ii", "hi"))}))


def masked_units(units: tuple[str, ...]) -> tuple[str, ...]:
    states = systemd.show(units, ["UnitFileState"])
    return tuple(name for name in units if states.get(name, {}).get("UnitFileState") == "masked")


def boot_target() -> str:
    return systemd.systemctl("get-default").stdout.strip()


def docker_members() -> tuple[str, ...]:
    try:
        return tuple(sorted(grp.getgrnam("docker").gr_mem))
    except KeyError:
        return ()


def groups() -> tuple[str, ...]:
    return tuple(sorted(entry.gr_name for entry in grp.getgrall()))


def _folders(footprint: Footprint, paths: Paths) -> tuple[str, ...]:
    folders = {folder for folder, _, _ in os.walk(paths.below("/etc"))}
    others = [footprint.models_dir, footprint.sources_dir, footprint.cache_dir]
    others += chain.from_iterable(_LEFTOVERS.values())
    for path in map(paths.below, others):
        folders |= {str(folder) for folder in (path, *path.parents) if folder.is_dir()}
    return tuple(sorted(folders))


def _read_output(*argv: str) -> str:
    result = run_program(["env", "DEBIAN_FRONTEND=noninteractive", *argv], _COMMAND_TIMEOUT_S)
    # Otherwise, the owner's packages would look as if we had installed or removed them.
    if argv[0] == "dpkg-query" and result.returncode != 0:
        fix = "run `dpkg-query -W` to see the error, repair dpkg's database, then try again"
        raise HostToolError("dpkg-query", error_line(result), fix)
    return result.stdout


def package_items(
    footprint: Footprint, before: Baseline | None, keep_reasons: Mapping[str, str]
) -> list[ManagedItem]:
    """Return the packages that we installed; ``keep_reasons`` gives reasons to keep some of them.

    Without a baseline, keep all packages.
    """
    present = set(installed_packages())
    engine_and_gpu = (*footprint.engine_packages, *footprint.gpu_packages)
    names = [name for name in (*footprint.packages, *engine_and_gpu) if name in present]
    if before is None:
        reason = "it may have been installed before the first deploy"
        return [ManagedItem("package", name, 0, reason) for name in names]
    added = [name for name in names if name not in before.packages]
    items = []
    for name in added:
        reason = _usage_reason(name, added, before)
        if name in engine_and_gpu:
            reason = reason or keep_reasons.get(name) or ("" if footprint.engine else _KEEP_ENGINE)
        items.append(ManagedItem("package", name, _size_bytes(name), reason))
    removed = [item.name for item in items if not item.kept_because]
    # Unneeded packages of the host's owner, such as an earlier kernel, stay.
    ours = _dependencies((*footprint.packages, *engine_and_gpu)) - {*before.packages, *removed}
    unneeded = sorted(_simulate_purge(removed, auto=True) & ours)
    purged = {*removed, *unneeded}
    # Keep dependencies whose removal would remove other packages.
    removable = [name for name in unneeded if not _simulate_purge([name], auto=False) - purged]
    return [*items, *(ManagedItem("package", name, _size_bytes(name)) for name in removable)]


def remove_packages(names: Iterable[str]) -> str:
    """Purge packages; return the error, or ""."""
    packages = list(names)
    _read_output("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "purge", *packages)
    remaining = set(packages) & set(installed_packages())
    return f"packages still installed: {', '.join(sorted(remaining))}" if remaining else ""


def _usage_reason(name: str, added: list[str], before: Baseline) -> str:
    """Return why the host's owner still needs a package, or ""."""
    if unit := _NOT_STARTED.get(name):
        state = systemd.state(unit, "ActiveState", "UnitFileState")
        if state.get("ActiveState") == "active" or state.get("UnitFileState") == "enabled":
            return f"{unit} is in use"
    others = _simulate_purge([name], auto=False) - set(added)
    manual = _read_output("apt-mark", "showmanual", *sorted(others)).split() if others else []
    owned = sorted(others & {*manual, *before.packages})
    return f"needed by {', '.join(owned)}" if owned else ""


def _dependencies(names: Iterable[str]) -> set[str]:
    """Return packages and everything that they depend on, installed or not."""
    ignored = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    options = ["--recurse", *(f"--no-{relation}" for relation in ignored)]
    lines = _read_output("apt-cache", "depends", *options, *names).splitlines()
    return {line.partition(":")[0] for line in lines if not line.startswith(" ")}


def _simulate_purge(names: list[str], *, auto: bool) -> set[str]:
    """Return the packages that apt would purge, including unneeded dependencies if ``auto``."""
    if not names:
        return set()
    options = ["--auto-remove"] if auto else []
    lines = _read_output("apt-get", "-s", "-q", *options, "purge", *names).splitlines()
    purged = (line.split()[1] for line in lines if line.startswith(("Remv ", "Purg ")))
    return {name.partition(":")[0] for name in purged}  # without the architecture


def _size_bytes(name: str) -> int:
    size = _read_output("dpkg-query", "-W", "-f", "${Installed-Size}\n", name).split()
    return int(size[0]) * 1024 if size and size[0].isdigit() else 0


def changed_host_settings(footprint: Footprint, before: Baseline | None) -> Iterator[ManagedItem]:
    """Yield host settings and accounts that differ from the baseline."""
    keep_reason = "" if before else "the earlier state is unknown"
    masked_before = before.masked if before else ()
    for unit in masked_units(footprint.masked):
        if unit not in masked_before:
            yield ManagedItem("mask", unit, 0, keep_reason)
    target = boot_target()
    if before and target == "multi-user.target" and before.boot_target not in ("", target):
        yield ManagedItem("boot target", before.boot_target)
    for user in docker_members():
        if user in footprint.docker_users and not (before and user in before.docker_members):
            yield ManagedItem("docker user", user, 0, keep_reason)
    accounts = {entry.pw_name for entry in pwd.getpwall()}
    for name in (GATEWAY_USER, ENGINE_USER):
        if name in accounts:
            yield ManagedItem("user", name)


def package_leftovers(before: Baseline | None, paths: Paths) -> Iterator[ManagedItem]:
    """Yield folders and groups that removed packages left behind."""
    if before is None:
        return
    present = installed_packages()
    for package, folders in _LEFTOVERS.items():
        if package in present or package in before.packages:
            continue
        for path in map(paths.below, folders):
            if path.is_dir() and str(path) not in before.directories:
                yield ManagedItem("remains", str(path), resources.freed_bytes([path])[path])
    docker_gone = docker.client("version").returncode == 127
    if docker_gone and "docker" in groups() and "docker" not in before.groups:
        yield ManagedItem("group", "docker")


def changed_shared_files(
    footprint: Footprint, before: Baseline | None, docker_reason: str, paths: Paths
) -> list[ManagedItem]:
    """Return shared files that we changed, with the reasons to keep some of them."""
    items = []
    for path in footprint.shared_files:
        current = _read(paths.below(path))
        original = _original_text(path, footprint, before, paths)
        if current is None or current == original:
            continue
        is_original_known = before is not None or original is not None
        reason = "" if is_original_known else _UNKNOWN_ORIGINAL
        if path == footprint.daemon_json:
            if _without_our_keys(current, original, footprint) == _parse(current):
                continue  # only the owner changed it
            reason = reason or docker_reason
        items.append(ManagedItem("settings", path, 0, reason))
    copy = paths.below(backup_path(footprint.daemon_json))
    if copy.exists() and not any(item.kept_because for item in items):
        items.append(ManagedItem("file", str(copy)))
    return items


def restore_shared_file(
    path: str, footprint: Footprint, before: Baseline | None, paths: Paths
) -> None:
    """Restore a file's original content, but keep unrelated changes in daemon.json."""
    target = paths.below(path)
    restored = _original_text(path, footprint, before, paths)
    if path == footprint.daemon_json:
        remaining = _without_our_keys(_read(target) or "", restored, footprint)
        if remaining != _parse(restored or ""):
            restored = json.dumps(remaining, indent=4) + "\n"
    if restored is None:
        files.remove(target)
    else:
        files.write_text(target, restored)
    if path == footprint.daemon_json and docker.is_up():
        systemd.systemctl("reload", "docker")


def _original_text(
    path: str, footprint: Footprint, before: Baseline | None, paths: Paths
) -> str | None:
    if before is not None:
        return before.files.get(path)
    return _read(paths.below(backup_path(path))) if path == footprint.daemon_json else None


def _without_our_keys(current: str, original: str | None, footprint: Footprint) -> dict[str, Any]:
    """Return daemon.json with the original values of our keys and the current values of others."""
    settings, originals = _parse(current), _parse(original or "")
    remaining = {key: value for key, value in settings.items() if key not in footprint.daemon_keys}
    return remaining | {key: originals[key] for key in footprint.daemon_keys if key in originals}


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
