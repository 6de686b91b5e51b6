"""``spark-host note``, ``manifest`` and ``uninstall``: lists and removes what we created.

An interrupted uninstall can be repeated.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from spark_contract import files, units
from spark_contract.documents import parse
from spark_contract.fetching import SHARE_KEY, SHARE_SETTINGS
from spark_contract.paths import API_KEY, CONFIG_DIR, GATEWAY_DIR, RELEASES_DIR, SYSUSERS, Paths
from spark_contract.records import GpuProof
from spark_contract.status import NETPLAN_FILE, Baseline, Footprint, ManagedItem, UninstallManifest
from spark_contract.tool import CHECK_TOOL, COMMANDS_DIR, TOOL, HostToolError
from spark_contract.units import DIGEST12

from spark_host.cleanup import baseline, resources
from spark_host.rollout.rollout import all_rollout_locks
from spark_host.system import docker, systemd
from spark_host.system.host import read_document
from spark_host.system.programs import run_program

# Units stop in this order, so that in-flight requests finish.
_TEMPLATES = (
    units.HOURS, units.SCHEDULED_START_TIMER, units.SCHEDULED_START, units.GATEWAY, units.SHARE,
    units.WATCH, units.SERVE, units.SWITCH, units.PREPARE, units.JOB,
)  # fmt: skip
_SOCKET_MOUNTS = "run-spark-engines-*.mount"
_UNIT = re.compile(
    rf"^(({'|'.join(template.name for template in _TEMPLATES)})@|spark-daily\.(service|timer)$"
    r"|spark-on-request\.service$|run-spark-engines-.+\.mount$)"
)
_ARCHIVE = re.compile(rf"^({DIGEST12}|site)\.zip$")
_CONFIG = (RELEASES_DIR, GATEWAY_DIR, API_KEY, SHARE_SETTINGS, SHARE_KEY)
_RECORDS = frozenset(
    ["jobs", "proofs", "receipts", "switch", "requests", "rollback", "good", "stopped", "events",
     "answers", "caches", "daily.json", "usage", "fabric"]
)  # fmt: skip
_BASELINE = "note"  # the kind of the baseline, which is removed last
_MANAGED = "Managed by dgx-spark-deploy"
_KEEP_MODELS = "models are kept; to remove them, add --data uninstall.models=true"
_KEEP_NETWORK = "other hosts may use it; run `spark-deploy fabric --restore` first"
_UNMANAGED = "not created by this project"
_NEEDS_BASELINE = ("package", "tree", "source", "image", "settings")
_STOP_TIMEOUT_S = 900.0
_ROUNDS = 6  # a round can empty folders and leave unneeded packages


class UnmanagedContainers(NamedTuple):
    names: list[str]
    with_gpu: list[str]
    images: set[str]

    def keep_reasons(self, footprint: Footprint) -> dict[str, str]:
        """Map each package that these containers use to the reason to keep it."""
        reasons: dict[str, str] = {}
        for packages, containers in (
            (footprint.engine_packages, self.names), (footprint.gpu_packages, self.with_gpu),
        ):  # fmt: skip
            if containers:
                reason = f"used by unmanaged containers: {', '.join(containers)}"
                reasons |= dict.fromkeys(packages, reason)
        return reasons


def note(text: str, paths: Paths) -> int:
    baseline.record_baseline(parse(Footprint, text), paths)
    return 0


def manifest(text: str, paths: Paths) -> UninstallManifest:
    return read_manifest(parse(Footprint, text), paths)


def uninstall(text: str, paths: Paths) -> UninstallManifest:
    footprint = parse(Footprint, text)
    with all_rollout_locks(paths):
        return remove(footprint, paths)


def read_manifest(footprint: Footprint, paths: Paths) -> UninstallManifest:
    """Return all resources that we created, with reasons to keep some."""
    before = baseline.read_baseline(paths)
    deployed = paths.state.exists() or paths.tools.exists() or paths.releases.exists()
    unmanaged = _unmanaged_containers()
    items = [*_running_and_enabled_items(paths), *_data_items(footprint, paths)]
    items += _image_items(before, unmanaged, paths)
    packages: list[ManagedItem] = []
    if deployed:
        packages = baseline.package_items(footprint, before, unmanaged.keep_reasons(footprint))
    docker_reason = _docker_reason(packages, footprint, unmanaged.with_gpu)
    items += [*_units_and_configuration(paths), *_file_items(footprint, docker_reason, paths)]
    if deployed:
        items += baseline.changed_shared_files(footprint, before, docker_reason, paths)
        items += [*baseline.changed_host_settings(footprint, before), *packages]
    items += [*baseline.package_leftovers(before, paths), *_tools_and_records(paths)]
    if items:
        reason = "spark-deploy needs it to log in"
        access = (path for path in footprint.access_files if paths.below(path).exists())
        items += [ManagedItem("access", path, 0, reason) for path in access]
    items += _empty_folders(footprint, before, paths) if deployed else []
    if (paths.state / baseline.RECORD_NAME).exists():
        needed = any(item.kept_because and item.kind in _NEEDS_BASELINE for item in items)
        reason = "it is needed to uninstall the kept resources later" if needed else ""
        items.append(ManagedItem(_BASELINE, str(paths.state / baseline.RECORD_NAME), 0, reason))
    return UninstallManifest(before.at if before else None, tuple(items))


def _unmanaged_containers() -> UnmanagedContainers:
    if docker.client("version").returncode == 127:  # not installed
        return UnmanagedContainers([], [], set())
    if not docker.is_up():
        fix = "run `systemctl start docker`, then run the command again"
        raise HostToolError("docker", "does not respond, so its containers are unknown", fix)
    engines = set(docker.engine_containers())
    names, with_gpu, images = [], [], set()
    for item in docker.query("/containers/json?all=1") or []:
        name = str((item.get("Names") or [item.get("Id")])[0]).lstrip("/")
        if name in engines:
            continue
        names.append(name)
        images.add(str(item.get("ImageID")))
        config = (docker.inspect_container(name, 60) or {}).get("HostConfig") or {}
        if config.get("Runtime") == "nvidia" or config.get("DeviceRequests"):
            with_gpu.append(name)
    return UnmanagedContainers(sorted(names), sorted(with_gpu), images)


def _image_items(
    before: Baseline | None, unmanaged: UnmanagedContainers, paths: Paths
) -> Iterator[ManagedItem]:
    images = resources.managed_images(resources.known_jobs(paths), paths)
    gpu_proof = read_document(GpuProof, paths.gpu_receipt)
    reference = gpu_proof.key.get("image") if gpu_proof else None
    if reference and reference not in {image.reference for image in images}:
        # The GPU check used this image. If it has a tag, someone else needs it.
        image = resources.inspect_image(reference)
        if image and not (docker.inspect_image(reference) or {}).get("RepoTags"):
            images.append(image)
    sizes = resources.image_bytes(images, [])
    for image in sorted(images, key=lambda image: -len(image.layers)):
        identity = str((docker.inspect_image(image.reference) or {}).get("Id"))
        if before is None or identity not in before.images:
            reason = "used by an unmanaged container" if identity in unmanaged.images else ""
            yield ManagedItem("image", image.reference, sizes[image.reference], reason)


def _running_and_enabled_items(paths: Paths) -> Iterator[ManagedItem]:
    instances = (template.unit("*") for template in _TEMPLATES)
    for pattern in (units.DAILY_TIMER, units.ON_REQUEST_UNIT, *instances, _SOCKET_MOUNTS):
        names = systemd.list_units(pattern)
        states = systemd.show(names, ["ActiveState"])
        for name in names:
            if states.get(name, {}).get("ActiveState") not in ("inactive", None):
                yield ManagedItem("service", name)
    for name in docker.engine_containers():
        yield ManagedItem("container", name)
    for link in sorted(paths.units.glob("*.wants/*")):
        if _UNIT.match(link.name):
            yield ManagedItem("unit symlink", str(link))


def _data_items(footprint: Footprint, paths: Paths) -> Iterator[ManagedItem]:
    jobs = resources.known_jobs(paths)
    sources, caches = paths.below(footprint.sources_dir), paths.below(footprint.cache_dir)
    parents = {("tree", paths.below(footprint.models_dir)), ("source", sources)}
    # With earlier settings, jobs may have put checkpoints into other folders.
    for job in jobs.values():
        folder = resources.result_folder(job, paths)
        if folder and folder.parent.is_dir() and folder.parent != sources:
            parents.add(("tree", folder.parent))
    managed, others = resources.managed_folders([*sorted(parents), ("cache", caches)], jobs, paths)
    sizes = resources.freed_bytes(item.path for item in managed)
    for item in managed:
        reason = _KEEP_MODELS if item.kind != "cache" and not footprint.models else ""
        yield ManagedItem(item.kind, str(item.path), sizes[item.path], reason)
    for path in others:
        yield ManagedItem("other", str(path), 0, _UNMANAGED)


def _units_and_configuration(paths: Paths) -> Iterator[ManagedItem]:
    for path in _entries(paths.units):
        if _UNIT.match(path.name):
            yield ManagedItem("unit", str(path))
    managed = {paths.below(path) for path in _CONFIG}
    for path in _entries(paths.below(CONFIG_DIR)):
        is_managed = path in managed or path.name.startswith(Path(API_KEY).name)
        yield ManagedItem("configuration", str(path), 0, "" if is_managed else _UNMANAGED)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _file_items(footprint: Footprint, docker_reason: str, paths: Paths) -> Iterator[ManagedItem]:
    commands = (f"{COMMANDS_DIR}/{name}" for name in (CHECK_TOOL, TOOL))
    for path in (*footprint.files, *commands, SYSUSERS, units.DAILY_STAMP):
        if paths.below(path).is_file():
            yield ManagedItem("file", str(paths.below(path)))
    if paths.below(NETPLAN_FILE).is_file():
        yield ManagedItem("network", str(paths.below(NETPLAN_FILE)), 0, _KEEP_NETWORK)
    for source in sorted(paths.below("/etc/apt/sources.list.d").glob("spark-*.sources")):
        text = source.read_text()
        if _MANAGED not in text:
            continue
        yield ManagedItem("apt source", str(source), 0, docker_reason)
        for key in re.findall(r"^Signed-By: (/etc/apt/keyrings/spark-\S+)$", text, re.MULTILINE):
            if paths.below(key).is_file():
                yield ManagedItem("apt source", str(paths.below(key)), 0, docker_reason)


def _docker_reason(packages: list[ManagedItem], footprint: Footprint, with_gpu: list[str]) -> str:
    """Return why to keep Docker's settings and package sources, or ""."""
    if with_gpu:
        return f"{', '.join(with_gpu)} may need it"
    engine_and_gpu = (*footprint.engine_packages, *footprint.gpu_packages)
    all_kept = (package.name for package in packages if package.kept_because)
    kept = [name for name in all_kept if name in engine_and_gpu]
    return f"needed by {', '.join(kept)}" if kept else ""


def _tools_and_records(paths: Paths) -> Iterator[ManagedItem]:
    for path in _entries(paths.tools):
        is_old = resources.OLD_TOOLS.match(path.name) or _ARCHIVE.match(path.name)
        is_managed = is_old or path.name in resources.LINKED_TOOLS
        is_folder = path.is_dir() and not path.is_symlink()
        size = resources.freed_bytes([path])[path] if is_managed and is_folder else 0
        yield ManagedItem("tools", str(path), size, "" if is_managed else _UNMANAGED)
    keep_network = _KEEP_NETWORK if paths.below(NETPLAN_FILE).is_file() else ""
    for path in _entries(paths.state):
        if path.name != baseline.RECORD_NAME:
            reason = "" if path.name in _RECORDS else _UNMANAGED
            if path.name == "fabric":
                reason = keep_network  # `fabric --restore` needs this record
            yield ManagedItem("record", str(path), 0, reason)
    for path in (paths.run, *map(paths.below, ("/run/spark-gateway", "/var/cache/spark-gateway"))):
        if path.exists():
            yield ManagedItem("run", str(path))


def _empty_folders(
    footprint: Footprint, before: Baseline | None, paths: Paths
) -> Iterator[ManagedItem]:
    """Yield folders that we may have created and that are empty, apart from folders to remove."""
    data_dirs = (footprint.models_dir, footprint.sources_dir, footprint.cache_dir)
    data = set(map(paths.below, data_dirs))
    candidates = {paths.below(CONFIG_DIR), paths.state, paths.tools, *data}
    if before is not None:
        our_paths = (*map(str, candidates), *footprint.files, *footprint.shared_files)
        parents = {parent for path in our_paths for parent in paths.below(path).parents}
        parents |= {paths.below("/etc/apt/keyrings"), paths.below(SYSUSERS).parent}
        roots = (paths.below("/etc"), *data)
        candidates |= {
            path for path in parents
            if any(root in path.parents or path in root.parents for root in roots)
        }  # fmt: skip
        candidates -= {Path(path) for path in before.directories}
    removed: set[Path] = set()
    for path in sorted(candidates, reverse=True):
        if path.is_dir() and not path.is_symlink() and set(path.iterdir()) <= removed:
            removed.add(path)
            yield ManagedItem("directory", str(path))


def remove(footprint: Footprint, paths: Paths) -> UninstallManifest:
    """Remove resources in rounds, because a removal can reveal more to remove."""
    removed: dict[tuple[str, str], ManagedItem] = {}
    problems: list[str] = []
    for _ in range(_ROUNDS):
        current = read_manifest(footprint, paths)
        removable = [item for item in current.items if not item.kept_because]
        # Remove the baseline only when nothing else is left.
        removable = [item for item in removable if item.kind != _BASELINE] or removable
        if not removable:
            break
        problems = _remove_round(removable, footprint, paths)
        removed = {(item.kind, item.name): item for item in removable} | removed
        if problems:
            break
    return replace(current, items=tuple(removed.values()), problems=tuple(problems))


def _remove_round(items: list[ManagedItem], footprint: Footprint, paths: Paths) -> list[str]:
    """Remove items in the order of the manifest; stop at the first failure."""
    before = baseline.read_baseline(paths)
    remove_all: dict[str, Callable[[list[str]], str]] = {
        "service": _stop_units,
        "image": lambda names: next(filter(None, map(docker.remove_image, names)), ""),
        "package": baseline.remove_packages,
    }
    remove_folder = lambda name: resources.remove_folder(Path(name))  # noqa: E731
    remove_one: dict[str, Callable[[str], None]] = {
        **dict.fromkeys(("tree", "source", "cache"), remove_folder),
        "container": docker.remove_container,
        "settings": lambda name: baseline.restore_shared_file(name, footprint, before, paths),
        "mask": lambda name: _run("systemctl", "--no-pager", "unmask", name),
        "boot target": lambda name: _run("systemctl", "--no-pager", "set-default", name),
        "docker user": lambda name: _run("gpasswd", "-d", name, "docker"),
        "user": lambda name: _run("userdel", name),
        "group": lambda name: _run("groupdel", name),
        "directory": _remove_empty_folder,
        _BASELINE: _remove_baseline,
    }
    for kind in dict.fromkeys(item.kind for item in items):
        names = [item.name for item in items if item.kind == kind]
        if kind in remove_all:
            if problem := remove_all[kind](names):
                return [problem]
            continue
        for name in names:
            remove_one.get(kind, _delete)(name)
        if kind in ("unit", "unit symlink", "file"):
            systemd.reload()
    return []


def _stop_units(names: list[str]) -> str:
    result = systemd.systemctl("stop", *names, timeout_s=_STOP_TIMEOUT_S)
    for name in names:
        systemd.reset_failed(name)
    return "" if result.returncode == 0 else f"systemctl stop: {result.stderr.strip()}"


def _remove_empty_folder(name: str) -> None:
    with suppress(FileNotFoundError):  # purging a package removes empty unit folders
        Path(name).rmdir()


def _delete(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        files.remove(path)


def _remove_baseline(name: str) -> None:
    files.remove(Path(name))
    if not any(Path(name).parent.iterdir()):
        Path(name).parent.rmdir()


def _run(*argv: str) -> None:
    result = run_program(argv, 60)
    if result.returncode != 0:
        raise HostToolError(" ".join(argv), result.stderr.strip(), "fix the cause, then retry")
