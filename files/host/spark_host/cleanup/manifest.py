"""The manifest: everything we created on this host, in the order of removal."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_contract import files, units
from spark_contract.errors import HostToolError
from spark_contract.fabric import NETPLAN_FILE
from spark_contract.fetching import SHARE_KEY, SHARE_SETTINGS
from spark_contract.paths import (
    API_KEY,
    CONFIG_DIR,
    ENGINE_USER,
    GATEWAY_DIR,
    GATEWAY_USER,
    RELEASES_DIR,
    SYSUSERS,
    Paths,
)
from spark_contract.records import GpuProof
from spark_contract.status import Before, Footprint, Ours, Thing
from spark_contract.tool import CHECK_TOOL, COMMANDS_DIR, TOOL
from spark_contract.units import DIGEST12

from spark_host.cleanup import baseline, resources
from spark_host.system import docker, systemd

# The order in which units stop: gateways before engines, so that running answers finish.
_TEMPLATES = (
    units.HOURS, units.RETURN_TIMER, units.RETURN, units.GATEWAY, units.SHARE, units.WATCH,
    units.SERVE, units.SWITCH, units.PREPARE, units.JOB,
)  # fmt: skip
_SOCKET_MOUNTS = "run-spark-engines-*.mount"
_UNIT = re.compile(
    rf"^(({'|'.join(template.name for template in _TEMPLATES)})@|spark-daily\.(service|timer)$"
    r"|run-spark-engines-.+\.mount$)"
)
_TOOL = re.compile(
    rf"^\.?(site|current|(site-)?{DIGEST12})(\.zip|\.new|\.pruned)?$|^\.new-\w{{6}}$"
)
_CONFIG = (RELEASES_DIR, GATEWAY_DIR, API_KEY, SHARE_SETTINGS, SHARE_KEY)
_RECORDS = frozenset(
    ["jobs", "proofs", "receipts", "switch", "requests", "rollback", "good", "stopped", "events",
     "answers", "caches", "daily.json"]
)  # fmt: skip
NOTE = "note"  # the baseline, which is removed last
_MANAGED = "Managed by dgx-spark-deploy"
_KEEP_MODELS = "models are kept; --data uninstall.models=true removes them"
_KEEP_NETWORK = "other hosts may use it; remove it with `spark-deploy fabric --restore` first"
_UNMANAGED = "not made by us"
_NEEDS_BASELINE = ("package", "tree", "source", "image", "settings")


@dataclass(frozen=True, slots=True)
class Others:
    containers: tuple[str, ...]
    with_gpu: tuple[str, ...]
    images: frozenset[str]  # ids

    def obstacles(self, wanted: Footprint) -> dict[str, str]:
        """Return by package why it must stay for these containers."""
        users = [(wanted.engine_packages, self.containers), (wanted.gpu_packages, self.with_gpu)]
        return {
            package: f"used by containers of others: {', '.join(names)}"
            for packages, names in users
            for package in packages
            if names
        }


def read_manifest(wanted: Footprint, paths: Paths) -> Ours:
    """Return everything we created; changes nothing."""
    before = baseline.read_baseline(paths)
    deployed = paths.state.exists() or paths.tools.exists() or paths.releases.exists()
    others = _other_containers()
    things = [*_running(), *_boot_links(paths), *_data(wanted, paths)]
    things += _images(before, others, paths)
    packages: list[Thing] = []
    if deployed:
        packages = baseline.package_things(wanted, before, others.obstacles(wanted))
    keep_docker = _keep_docker(packages, wanted, others)
    things += [*_units(paths), *_config(paths), *_files(wanted, keep_docker, paths)]
    if deployed:
        things += baseline.shared_file_things(wanted, before, keep_docker, paths)
        things += [*_host_settings(wanted, before), *_users(), *packages]
    things += [*_remains(before, paths), *_tools(paths), *_records(paths)]
    if things:
        reason = "lets this project log in"
        access = (path for path in wanted.access_files if paths.below(path).exists())
        things += [Thing("access", path, 0, reason) for path in access]
    things += _empty_folders(wanted, before, paths) if deployed else []
    if (paths.state / baseline.RECORD).exists():
        needed = any(thing.stays and thing.kind in _NEEDS_BASELINE for thing in things)
        reason = "needed until the kept parts are removed" if needed else ""
        things.append(Thing(NOTE, str(paths.state / baseline.RECORD), 0, reason))
    return Ours(before.at if before else None, tuple(things))


def _other_containers() -> Others:
    if docker.client("version").returncode == 127:
        return Others((), (), frozenset())
    if not docker.is_up():
        fix = "systemctl start docker, then run again"
        raise HostToolError("docker", "does not answer, so the containers are unknown", fix)
    ours = set(docker.engine_containers())
    names, gpu, images = [], [], set()
    for item in docker.query("/containers/json?all=1") or []:
        name = str((item.get("Names") or [item.get("Id")])[0]).lstrip("/")
        if name in ours:
            continue
        names.append(name)
        images.add(str(item.get("ImageID")))
        config = (docker.container(name, 60) or {}).get("HostConfig") or {}
        if config.get("Runtime") == "nvidia" or config.get("DeviceRequests"):
            gpu.append(name)
    return Others(tuple(sorted(names)), tuple(sorted(gpu)), frozenset(images))


def _images(before: Before | None, others: Others, paths: Paths) -> Iterator[Thing]:
    images = resources.images(resources.known_jobs(paths), paths)
    images += _gpu_check_image({image.reference for image in images}, paths)
    sizes = resources.image_bytes(images, [])
    for image in sorted(images, key=lambda image: -len(image.layers)):
        identity = str((docker.image(image.reference) or {}).get("Id"))
        if before is None or identity not in before.images:
            stays = "used by a container of others" if identity in others.images else ""
            yield Thing("image", image.reference, sizes[image.reference], stays)


def _gpu_check_image(known: set[str], paths: Paths) -> Iterator[resources.Image]:
    """Yield the image of the GPU check, unless it has a tag since."""
    try:
        reference = files.load(GpuProof, paths.gpu_receipt, "no container saw the GPU").key["image"]
    except (HostToolError, KeyError):
        return
    if reference and reference not in known:
        image = resources.inspect_image(reference)
        if image and not (docker.image(reference) or {}).get("RepoTags"):
            yield image


def _running() -> Iterator[Thing]:
    patterns = (units.DAILY_TIMER, *(template.of("*") for template in _TEMPLATES), _SOCKET_MOUNTS)
    for pattern in patterns:
        names = systemd.listed(pattern)
        states = systemd.show(names, ["ActiveState"])
        for name in names:
            if states.get(name, {}).get("ActiveState") not in ("inactive", None):
                yield Thing("service", name)
    for name in docker.engine_containers():
        yield Thing("container", name)


def _boot_links(paths: Paths) -> Iterator[Thing]:
    for folder in sorted(paths.units.glob("*.wants")):
        for link in sorted(folder.iterdir()):
            if _UNIT.match(link.name):
                yield Thing("boot link", str(link))


def _data(wanted: Footprint, paths: Paths) -> Iterator[Thing]:
    known = resources.known_jobs(paths)
    made = [
        paths.below(tree)
        for job in known.values()
        if (tree := getattr(job.proof, "tree", None)) is not None
    ]
    sources = paths.below(wanted.sources_dir)
    parents = {("tree", paths.below(wanted.models_dir)), ("source", sources)}
    # Earlier settings may have had other folders: jobs name each checkpoint they made.
    parents |= {("tree", t.parent) for t in made if t.parent.is_dir() and t.parent != sources}
    managed, others = [], []
    for kind, parent in (*sorted(parents), ("cache", paths.below(wanted.cache_dir))):
        ours, rest = resources.folders(kind, parent, made)
        managed += ours
        others += rest
    sizes = resources.freed_bytes(folder.path for folder in managed)
    for folder in managed:
        stays = _KEEP_MODELS if folder.kind != "cache" and not wanted.models else ""
        yield Thing(folder.kind, str(folder.path), sizes[folder.path], stays)
    for path in others:
        yield Thing("other", str(path), 0, _UNMANAGED)


def _units(paths: Paths) -> Iterator[Thing]:
    for path in _entries(paths.units):
        if _UNIT.match(path.name):
            yield Thing("unit", str(path))


def _config(paths: Paths) -> Iterator[Thing]:
    managed = {paths.below(path) for path in _CONFIG}
    for path in _entries(paths.below(CONFIG_DIR)):
        is_managed = path in managed or path.name.startswith(Path(API_KEY).name)
        yield Thing("configuration", str(path), 0, "" if is_managed else _UNMANAGED)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _files(wanted: Footprint, keep_docker: str, paths: Paths) -> Iterator[Thing]:
    commands = (f"{COMMANDS_DIR}/{name}" for name in (CHECK_TOOL, TOOL))
    for path in (*wanted.files, *commands, SYSUSERS, units.DAILY_STAMP):
        if paths.below(path).is_file():
            yield Thing("file", str(paths.below(path)))
    if paths.below(NETPLAN_FILE).is_file():
        yield Thing("network", str(paths.below(NETPLAN_FILE)), 0, _KEEP_NETWORK)
    for source in sorted(paths.below("/etc/apt/sources.list.d").glob("spark-*.sources")):
        text = source.read_text()
        if _MANAGED not in text:
            continue
        yield Thing("apt source", str(source), 0, keep_docker)
        for key in re.findall(r"^Signed-By: (/etc/apt/keyrings/spark-\S+)$", text, re.MULTILINE):
            if paths.below(key).is_file():
                yield Thing("apt source", str(paths.below(key)), 0, keep_docker)


def _keep_docker(packages: list[Thing], wanted: Footprint, others: Others) -> str:
    """Return why Docker's settings and package sources stay; "" if they are removed."""
    if others.with_gpu:
        return f"{', '.join(others.with_gpu)} may need it"
    engine = (*wanted.engine_packages, *wanted.gpu_packages)
    staying = [package.name for package in packages if package.stays and package.name in engine]
    return f"needed by {', '.join(staying)}" if staying else ""


def _host_settings(wanted: Footprint, before: Before | None) -> Iterator[Thing]:
    unknown = "" if before else "unknown whether this was so before"
    was_masked = before.masked if before else ()
    for unit in baseline.masked(wanted.masked):
        if unit not in was_masked:
            yield Thing("mask", unit, 0, unknown)
    target = baseline.boot_target()
    if before and target == "multi-user.target" and before.boot_target not in ("", target):
        yield Thing("boot target", before.boot_target)
    for user in baseline.docker_members():
        if user in wanted.docker_users and not (before and user in before.docker_members):
            yield Thing("docker user", user, 0, unknown)


def _users() -> Iterator[Thing]:
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in (GATEWAY_USER, ENGINE_USER):
        if name in known:
            yield Thing("user", name)


def _tools(paths: Paths) -> Iterator[Thing]:
    for path in _entries(paths.tools):
        is_managed = _TOOL.match(path.name)
        is_folder = path.is_dir() and not path.is_symlink()
        size = resources.freed_bytes([path])[path] if is_managed and is_folder else 0
        yield Thing("tools", str(path), size, "" if is_managed else _UNMANAGED)


def _records(paths: Paths) -> Iterator[Thing]:
    for path in _entries(paths.state):
        if path.name != baseline.RECORD:
            yield Thing("record", str(path), 0, "" if path.name in _RECORDS else _UNMANAGED)
    for path in (paths.run, paths.below("/run/spark-gateway")):
        if path.exists():
            yield Thing("run", str(path))


def _empty_folders(wanted: Footprint, before: Before | None, paths: Paths) -> Iterator[Thing]:
    data = {paths.below(p) for p in (wanted.models_dir, wanted.sources_dir, wanted.cache_dir)}
    candidates = {paths.below(CONFIG_DIR), paths.state, paths.tools, *data}
    if before is not None:
        inside = (*map(str, candidates), *wanted.files, *wanted.shared_files)
        parents = {parent for path in inside for parent in paths.below(path).parents}
        parents |= {paths.below("/etc/apt/keyrings"), paths.below(SYSUSERS).parent}
        # The baseline covers only folders in these places, or above them.
        places = (paths.below("/etc"), *data)
        candidates |= {
            path for path in parents
            if any(place in path.parents or path in place.parents for place in places)
        }  # fmt: skip
        candidates -= {Path(path) for path in before.directories}
    removed: set[Path] = set()
    for path in sorted(candidates, reverse=True):
        if path.is_dir() and not path.is_symlink() and set(path.iterdir()) <= removed:
            removed.add(path)
            yield Thing("directory", str(path))


def _remains(before: Before | None, paths: Paths) -> Iterator[Thing]:
    if before is None:
        return
    present = baseline.installed_packages()
    for package, folders in baseline.REMAINS.items():
        if package in present or package in before.packages:
            continue
        for path in (paths.below(folder) for folder in folders):
            if path.is_dir() and str(path) not in before.directories:
                yield Thing("remains", str(path), resources.freed_bytes([path])[path])
    docker_gone = docker.client("version").returncode == 127
    if docker_gone and "docker" in baseline.groups() and "docker" not in before.groups:
        yield Thing("group", "docker")
