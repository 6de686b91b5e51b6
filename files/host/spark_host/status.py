"""``spark-host status`` and ``evidence``: the host's state, and facts that are safe to publish."""

import json
import mmap
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from spark_contract.paths import Paths
from spark_contract.records import DailyReport, GpuProof, Rollout, Stopped
from spark_contract.release import Release
from spark_contract.status import (
    EngineEvidence,
    Evidence,
    GatewayState,
    HostMemory,
    LiveCheck,
    ReleaseState,
    RunningRollout,
    Service,
    Status,
)
from spark_contract.tool import HostToolError
from spark_contract.units import (
    GATEWAY,
    MAIN_SERVICE,
    SERVE,
    SWITCH,
    find_unit_overrides,
    list_unit_files_command,
)

from spark_host import jobs
from spark_host.check import checks, speed
from spark_host.check.probe import CheckError, Probe
from spark_host.check.runner import read_log
from spark_host.engine import compile_cache, logs, memory
from spark_host.engine.client import GENERATED_TOKENS, Engine, EngineError
from spark_host.gateway import gateway, keys
from spark_host.records import boot, versions
from spark_host.rollout import record
from spark_host.system import cluster, docker, systemd
from spark_host.system.host import Host, read_events, release_names
from spark_host.system.programs import read_output, read_output_with_retry
from spark_host.watch import sensors

_DETAIL_LENGTH = 300
_Units = dict[str, systemd.UnitState]


def main(args: list[str], paths: Paths) -> Status:
    """Return the host's state; ``--live`` also sends a request to each running engine."""
    host = Host(paths)
    releases = [release for name in release_names(paths) if (release := host.release(name))]
    stop_markers = (paths.state / "stopped").glob("*.json")
    services = sorted({release.service for release in releases} | {m.stem for m in stop_markers})
    # One call for all units, because every call is slow.
    patterns = [template.unit("*") for template in (SERVE, SWITCH, GATEWAY)]
    units = systemd.show_loaded(patterns, ["ActiveState", "InvocationID", "NRestarts", "Job"])
    with ThreadPoolExecutor() as pool:  # the engine, docker and the driver may be slow
        running = [release for release in releases if _is_active(release, units)]
        running.sort(key=lambda release: release.service != MAIN_SERVICE)
        live_checks = pool.submit(
            lambda: [check_live(r, paths) for r in running if "--live" in args]
        )
        reading = pool.submit(versions.read)
        digests = jobs.all_digests(paths)
        job_states = jobs.poll(digests, paths) if digests else []
        installed, live, meminfo = reading.result(), live_checks.result(), memory.meminfo()
    return Status(
        releases=tuple(_release_state(release, units, installed, host) for release in releases),
        services={name: _service_state(name, releases, units, host) for name in services},
        jobs=tuple(job_states),
        memory=HostMemory(meminfo["MemTotal"], meminfo["MemAvailable"]),
        versions=installed,
        versions_unknown=tuple(n for n in installed if installed[n] == versions.UNKNOWN),
        reboot_pending=versions.reboot_pending(),
        live=live[0] if live else None,
        more_live=tuple(live[1:]),
        events={name: read_events(name, paths) for name in services},
        daily=host.disk.read(DailyReport, paths.daily),
        unit_overrides=unit_overrides(paths),
    )


def unit_overrides(paths: Paths) -> tuple[str, ...]:
    root = str(paths.root).rstrip("/")
    lines = read_output_with_retry("sh", "-c", list_unit_files_command(root)) or ""
    return find_unit_overrides(lines.splitlines(), root)


def _active_state(unit: str, units: _Units) -> str:
    return units.get(unit, {}).get("ActiveState", "inactive")


def _is_active(release: Release, units: _Units) -> bool:
    return _active_state(release.serve_unit, units) == "active"


def _release_state(
    release: Release, units: _Units, installed: dict[str, str], host: Host
) -> ReleaseState:
    unit, last = units.get(release.serve_unit, {}), boot.read_proof(release.name, host)
    unproven: str | None = "not running"
    if _is_active(release, units):
        unproven = boot.unproven_reason(last, release.digest, unit.get("InvocationID"), installed)
    proven = boot.read_known_good(release.service, host).names
    driver = installed.get("driver", "")
    can_share_cache = release.name in proven and compile_cache.is_complete(release, driver, host)
    return ReleaseState(
        name=release.name,
        model=release.model,
        profile=release.profile,
        names=release.names,
        active=_active_state(release.serve_unit, units),
        restarts=int(unit.get("NRestarts") or 0),
        proof=last,
        unproven=unproven,
        speed=tuple(speed.describe(last.bench)) if last and last.bench else (),
        cache=str(Path(release.cache).parent) if release.cache and can_share_cache else None,
        change_failed=_active_state(SWITCH.unit(release.name), units) == "failed",
    )


def _service_state(name: str, all_releases: list[Release], units: _Units, host: Host) -> Service:
    paths, good = host.paths, boot.read_known_good(name, host).release
    releases = [release for release in all_releases if release.service == name]
    active = next((release.name for release in releases if _is_active(release, units)), None)
    serving = host.release(active or good)
    return Service(
        known_good=good,
        enabled=tuple(boot.enabled_releases(name, host)),
        active=active,
        stopped_by_hand=host.disk.read(Stopped, paths.stopped(name)),
        rolled_back=boot.last_rollback(name, host),
        traffic_open=gateway.is_open(name, paths),
        gateway=GatewayState(
            active=_active_state(GATEWAY.unit(name), units),
            enabled=gateway.starts_at_boot(name, paths),
            key_problem=gateway.key_problem(name, paths) if active else None,
            difference=gateway.find_difference(name, paths),
            usage=keys.read_usage(name, paths).keys or None,
        ),
        head=_head_host(serving, paths) if serving else None,
        rollout=_running_rollout([release.name for release in releases], units, host),
    )


def _running_rollout(names: list[str], units: _Units, host: Host) -> RunningRollout | None:
    states = {name: units.get(SWITCH.unit(name), {}) for name in names}
    rollouts = (record.running_rollout(name, state, host) for name, state in states.items())
    # A rollout with a phase has begun; the rest wait for their turn.
    return min(filter(None, rollouts), key=lambda rollout: not rollout.phase, default=None)


def _head_host(release: Release, paths: Paths) -> str | None:
    with suppress(HostToolError):
        if release.cluster and cluster.is_worker(release, paths):
            return release.cluster.head.host
    return None


def check_live(release: Release, paths: Paths, timeout_s: float = 30) -> LiveCheck:
    """Send a short request to the engine; on a worker, check that all members have joined."""
    start = time.monotonic()
    if cluster.is_worker(release, paths):
        missing = cluster.describe_missing(release, paths)
        detail = "this worker has joined; only the head answers requests"
        if missing:
            detail = f"{missing} has not joined"
        return LiveCheck(not missing, release.name, 0.0, detail)
    probe = Probe(release, Engine.for_release(release, paths), list, deadline_s=start + timeout_s)
    try:
        if probe.plan.task in checks.POOLING_CHECKS:
            detail = checks.POOLING_CHECKS[probe.plan.task](probe)
        else:
            questions = probe.plan.questions
            detail = probe.ask(questions[0].prompt if questions else "Hello", max_tokens=8)
    except CheckError as error:
        detail = str(error)
    seconds = round(time.monotonic() - start, 3)
    return LiveCheck(probe.tokens_seen > 0, release.name, seconds, detail[:_DETAIL_LENGTH])


_DMI = ("sys_vendor", "product_name", "bios_vendor", "bios_version", "bios_date")
_PLAIN = re.compile(r"[\w .,+/()-]{1,80}")
_VERSION = re.compile(r"[\w.+-]{1,40}")


def read_evidence(paths: Paths) -> Evidence:
    host = Host(paths)
    releases = filter(None, map(host.release, release_names(paths)))
    services = sorted({release.service for release in releases})
    active = (boot.active_release(service, host) for service in services)
    running = filter(None, map(host.release, active))
    reading = sensors.read()
    gpu = {"celsius": reading.celsius, "power_w": reading.power_w} if reading else {}
    gpu_proof = host.disk.read(GpuProof, paths.gpu_receipt)
    return Evidence(
        firmware=read_firmware(paths.root),
        gpu={name: value for name, value in gpu.items() if value is not None},
        gpu_container=gpu_proof.docker_arguments if gpu_proof else (),
        kernel_log=logs.count_kernel_faults(),
        engines=tuple(_engine_evidence(release, host) for release in running),
    )


def _engine_evidence(release: Release, host: Host) -> EngineEvidence:
    invocation_id = host.units.read_invocation_id(release.serve_unit) or ""
    messages = list(logs.startup_messages(read_log(release, invocation_id)))
    container = docker.inspect_container(release.container, 5) or {}
    rollout = host.disk.read(Rollout, host.paths.rollout(release.name))
    counts: dict[str, float | None] = {}
    with suppress(EngineError):
        metrics = Engine.for_release(release, host.paths).metrics()
        counts = {
            "drafted_tokens": metrics.drafted,
            "accepted_tokens": metrics.accepted,
            "generated_tokens": metrics.total(GENERATED_TOKENS),
        }
    return EngineEvidence(
        release=release.name,
        lines=logs.kernel_lines(messages),
        times_s=logs.times_s(messages),
        sizes_bytes=logs.sizes_bytes(messages),
        kv_cache_tokens=logs.kv_cache_tokens(messages),
        libraries=read_container_libraries(str(container["Id"])) if container.get("Id") else {},
        rollout_state=rollout.state if rollout else None,
        rollout_times_s=dict(rollout.times_s) if rollout else {},
        **{key: None if value is None else int(value) for key, value in counts.items()},
    )


def read_firmware(root: Path = Path("/")) -> dict[str, str]:
    versions = {}
    for name in _DMI:
        path = root / "sys/class/dmi/id" / name
        text = path.read_text(errors="replace").strip() if path.is_file() else ""
        if _PLAIN.fullmatch(text):
            versions[name] = text
    with suppress(ValueError, AttributeError):  # the program is missing, or the output is not JSON
        text = read_output("fwupdmgr", "get-devices", "--json") or ""
        for device in json.loads(text).get("Devices", ()):
            name, version = str(device.get("Name", "")), str(device.get("Version", ""))
            is_safe = _PLAIN.fullmatch(name) and _VERSION.fullmatch(version)
            if is_safe and device.get("Plugin") == "uefi_capsule":
                versions[name] = version
    return versions


_PACKAGE_FOLDER = re.compile(r"(/\S*/(?:dist|site)-packages)/")
_DIST_INFO = re.compile(r"([A-Za-z0-9_.]+)-([0-9][\w.+]*)\.dist-info")
_NCCL = re.compile(r"/libnccl\.so[.\d]*$")
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_PACKAGES = {
    "vllm": "vllm", "torch": "torch", "triton": "triton", "transformers": "transformers",
    "flashinfer_python": "flashinfer", "flashinfer_jit_cache": "flashinfer_jit_cache",
    "flashinfer_cubin": "flashinfer_cubin",
}  # fmt: skip


def read_container_libraries(container_id: str, proc: Path = Path("/proc")) -> dict[str, str]:
    """Return versions of NCCL and Python packages that a container has loaded."""
    versions: dict[str, set[str]] = {}
    package_folders: set[Path] = set()
    for cgroup in proc.glob("[0-9]*/cgroup"):
        root = cgroup.parent / "root"
        with suppress(OSError):  # the process has exited
            if container_id not in cgroup.read_text():
                continue
            for path in _mapped_files(cgroup.parent / "maps"):
                if _NCCL.search(path):
                    nccl = _nccl_version(root / path.lstrip("/"))
                    versions.setdefault("nccl", set()).update(nccl)
                if match := _PACKAGE_FOLDER.match(path):
                    package_folders.add(root / match[1].lstrip("/"))
    for folder in package_folders:
        with suppress(OSError):
            for entry in folder.iterdir():
                match = _DIST_INFO.fullmatch(entry.name)
                if match and (name := _PACKAGES.get(match[1].lower())):
                    versions.setdefault(name, set()).add(match[2])
    return {name: ", ".join(sorted(values)) for name, values in versions.items() if values}


def _mapped_files(maps: Path) -> set[str]:
    lines = maps.read_text(errors="replace").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}


def _nccl_version(path: Path) -> set[str]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            match = _NCCL_VERSION.search(content)
            return {match[1].decode()} if match else set()  # before the file is unmapped
    except (OSError, ValueError):  # ValueError: an empty file
        return set()
