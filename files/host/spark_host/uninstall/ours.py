"""Everything of ours on this host, in the order in which it can go; looking changes nothing."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from spark_contract import units
from spark_contract.fabric import NETPLAN_FILE
from spark_contract.keep import Before, Footprint, Ours, Thing
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
from spark_contract.sharing import SHARE_KEY, SHARE_SETTINGS
from spark_contract.tool import CHECK_TOOL, COMMANDS_DIR, TOOL
from spark_contract.units import DIGEST12

from spark_host.prune import holdings
from spark_host.system import docker, systemd
from spark_host.uninstall import baseline, containers, packages

TEMPLATES = (
    units.HOURS, units.RETURN_TIMER, units.RETURN, units.GATEWAY, units.SHARE, units.WATCH,
    units.SERVE,
    units.SWITCH, units.PREPARE, units.JOB,
)  # fmt: skip
_SOCKET_MOUNTS = "run-spark-engines-*.mount"
_OUR_UNIT = re.compile(
    rf"^(({'|'.join(template.name for template in TEMPLATES)})@|spark-daily\.(service|timer)$"
    r"|run-spark-engines-.+\.mount$)"
)
_OUR_TOOL = re.compile(
    rf"^\.?(site|current|(site-)?{DIGEST12})(\.zip|\.new|\.pruned)?$|^\.new-\w{{6}}$"
)
USERS = (GATEWAY_USER, ENGINE_USER)
_CONFIG = (RELEASES_DIR, GATEWAY_DIR, API_KEY, SHARE_SETTINGS, SHARE_KEY)
_RECORDS = frozenset(
    ["jobs", "proofs", "receipts", "switch", "requests", "rollback", "good", "stopped", "events",
     "answers", "caches", "daily.json"]
)  # fmt: skip
NOTE = "note"  # of what the host was before: goes when nothing is left that it tells about
_MANAGED = "Managed by dgx-spark-deploy"
_MODELS_STAY = "models are kept; --data uninstall.models=true removes them"
_NETWORK_STAYS = (
    "other hosts are reached by it; `spark-deploy fabric --restore` takes it back, before"
)
_NOT_OURS = "not made by us"
_KEEPS_RECORD = ("package", "tree", "source", "image", "settings")


def look(wanted: Footprint, paths: Paths) -> Ours:
    """List what is ours."""
    before = baseline.noted(paths)
    deployed = paths.state.exists() or paths.tools.exists() or paths.releases.exists()
    others = containers.of_others()
    things = [*_running(), *_boot_links(paths), *_data(wanted, paths), *containers.images(
        before, others, paths)]  # fmt: skip
    engine = packages.package_things(wanted, before, others.in_the_way(wanted)) if deployed else []
    stays = _engine_stays(engine, wanted, others)
    things += [*_units(paths), *_config(paths), *_files(wanted, stays, paths)]
    if deployed:
        things += [
            *packages.shared_things(wanted, before, stays, paths),
            *_host_care(wanted, before),
        ]
        things += [*_users(), *engine]
    things += [*_remains(before, paths), *_tools(paths), *_records(paths)]
    things += _access(wanted, paths) if things else []
    things += _empty(wanted, before, paths) if deployed else []
    if (paths.state / baseline.RECORD).exists():
        why = "says what of the rest is ours" if _left(things) else ""
        things.append(Thing(NOTE, str(paths.state / baseline.RECORD), 0, why))
    return Ours(before.at if before else None, tuple(things))


def _left(things: Iterable[Thing]) -> bool:
    return any(thing.stays and thing.kind in _KEEPS_RECORD for thing in things)


def _running() -> Iterator[Thing]:
    patterns = (units.DAILY_TIMER, *(template.of("*") for template in TEMPLATES), _SOCKET_MOUNTS)
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
            if _OUR_UNIT.match(link.name):
                yield Thing("boot link", str(link))


def _data(wanted: Footprint, paths: Paths) -> Iterator[Thing]:
    known = holdings.known_jobs(paths)
    made = [
        paths.below(tree)
        for job in known.values()
        if (tree := getattr(job.proof, "tree", None)) is not None
    ]
    parents = {
        ("tree", paths.below(wanted.models_dir)),
        ("source", paths.below(wanted.sources_dir)),
    }
    # Where earlier settings had their data: jobs name each tree they made.
    parents |= {("tree", tree.parent) for tree in made if tree.parent.is_dir()
                and tree.parent != paths.below(wanted.sources_dir)}  # fmt: skip
    found, strange = [], []
    for kind, parent in (*sorted(parents), ("cache", paths.below(wanted.cache_dir))):
        ours, others = holdings.folders(kind, parent, made)
        found += ours
        strange += others
    sizes = holdings.freed_bytes(folder.path for folder in found)
    for folder in found:
        stays = _MODELS_STAY if folder.kind != "cache" and not wanted.models else ""
        yield Thing(folder.kind, str(folder.path), sizes[folder.path], stays)
    for path in strange:
        yield Thing("other", str(path), 0, _NOT_OURS)


def _units(paths: Paths) -> Iterator[Thing]:
    for path in sorted(paths.units.iterdir()) if paths.units.is_dir() else ():
        if _OUR_UNIT.match(path.name):
            yield Thing("unit", str(path))


def _config(paths: Paths) -> Iterator[Thing]:
    home = paths.below(CONFIG_DIR)
    ours = {paths.below(path) for path in _CONFIG}
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        mine = path in ours or path.name.startswith(Path(API_KEY).name)
        yield Thing("configuration", str(path), 0, "" if mine else _NOT_OURS)


def _files(wanted: Footprint, engine_stays: str, paths: Paths) -> Iterator[Thing]:
    commands = (f"{COMMANDS_DIR}/{name}" for name in (CHECK_TOOL, TOOL))
    for path in (*wanted.files, *commands, SYSUSERS, units.DAILY_STAMP):
        if paths.below(path).is_file():
            yield Thing("file", str(paths.below(path)))
    if paths.below(NETPLAN_FILE).is_file():
        yield Thing("network", str(paths.below(NETPLAN_FILE)), 0, _NETWORK_STAYS)
    for source in sorted(paths.below("/etc/apt/sources.list.d").glob("spark-*.sources")):
        text = source.read_text()
        if _MANAGED not in text:
            continue
        yield Thing("apt source", str(source), 0, engine_stays)
        for key in re.findall(r"^Signed-By: (/etc/apt/keyrings/spark-\S+)$", text, re.MULTILINE):
            if paths.below(key).is_file():
                yield Thing("apt source", str(paths.below(key)), 0, engine_stays)


def _engine_stays(engine: list[Thing], wanted: Footprint, others: containers.Others) -> str:
    if others.with_gpu:
        return f"{', '.join(others.with_gpu)} may need it"
    needing = (*wanted.engine_packages, *wanted.gpu_packages)
    staying = [one.name for one in engine if one.stays and one.name in needing]
    return f"belongs to {', '.join(staying)}" if staying else ""


def _host_care(wanted: Footprint, before: Before | None) -> Iterator[Thing]:
    unknown = "" if before else "nobody noted whether it was so before"
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
    for name in USERS:
        if name in known:
            yield Thing("user", name)


def _tools(paths: Paths) -> Iterator[Thing]:
    for path in sorted(paths.tools.iterdir()) if paths.tools.is_dir() else ():
        mine = _OUR_TOOL.match(path.name)
        is_folder = path.is_dir() and not path.is_symlink()
        size = holdings.freed_bytes([path])[path] if mine and is_folder else 0
        yield Thing("tools", str(path), size, "" if mine else _NOT_OURS)


def _records(paths: Paths) -> Iterator[Thing]:
    for path in sorted(paths.state.iterdir()) if paths.state.is_dir() else ():
        if path.name != baseline.RECORD:
            mine = path.name in _RECORDS
            yield Thing("record", str(path), 0, "" if mine else _NOT_OURS)
    for path in (paths.run, paths.below("/run/spark-gateway")):
        if path.exists():
            yield Thing("run", str(path))


def _access(wanted: Footprint, paths: Paths) -> list[Thing]:
    why = "lets this project log in"
    return [Thing("access", path, 0, why) for path in wanted.access_files
            if paths.below(path).exists()]  # fmt: skip


def _empty(wanted: Footprint, before: Before | None, paths: Paths) -> Iterator[Thing]:
    """List the folders that we made and that hold nothing any more."""
    own = {paths.below(CONFIG_DIR), paths.state, paths.tools}
    own |= {paths.below(path) for path in _large(wanted)}
    if before is not None:
        around = {
            parent
            for path in (*(str(path) for path in own), *wanted.files, *wanted.shared_files)
            for parent in paths.below(path).parents
        } | {paths.below("/etc/apt/keyrings"), paths.below(SYSUSERS).parent}
        # Of others only those that were noted, or looked for and not there.
        noted = (paths.below("/etc"), *(paths.below(path) for path in _large(wanted)))
        own |= {path for path in around if any(_leads(path, place) for place in noted)}
        own -= {Path(path) for path in before.directories}
    going: set[Path] = set()
    for path in sorted(own, reverse=True):
        if path.is_dir() and not path.is_symlink() and set(path.iterdir()) <= going:
            going.add(path)
            yield Thing("directory", str(path))


def _large(wanted: Footprint) -> tuple[str, ...]:
    return (wanted.models_dir, wanted.sources_dir, wanted.cache_dir)


def _leads(path: Path, place: Path) -> bool:
    """Whether ``path`` lies in ``place``, or on the way to it."""
    return place in path.parents or path in place.parents


def _remains(before: Before | None, paths: Paths) -> Iterator[Thing]:
    """List what packages of ours left behind when they were purged."""
    if before is None:
        return
    here = baseline.installed()
    for package, places in baseline.REMAINS.items():
        if package in here or package in before.packages:
            continue
        for path in (paths.below(place) for place in places):
            if path.is_dir() and str(path) not in before.directories:
                yield Thing("remains", str(path), holdings.freed_bytes([path])[path])
    docker_gone = docker.client("version").returncode == 127
    if docker_gone and "docker" in baseline.groups() and "docker" not in before.groups:
        yield Thing("group", "docker")
