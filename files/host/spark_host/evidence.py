"""``spark-host evidence``: facts about running engines and the host, safe to publish."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.records import Rollout
from spark_contract.release import Release
from spark_contract.status import EngineEvidence, Evidence

from spark_host.check.readiness import read_log
from spark_host.engine import logs
from spark_host.engine.client import Engine, EngineError
from spark_host.records import boot
from spark_host.system import docker, programs
from spark_host.system.host import Host, release_names
from spark_host.system.programs import print_json
from spark_host.watch import sensors

_DMI = ("sys_vendor", "product_name", "bios_vendor", "bios_version", "bios_date")
_PLAIN = re.compile(r"[\w .,+/()-]{1,80}")
_VERSION = re.compile(r"[\w.+-]{1,40}")


def evidence(host: Host) -> Evidence:
    known = filter(None, map(host.release, release_names(host.paths)))
    services = sorted({release.service for release in known})
    running = filter(None, (host.release(boot.active(service, host)) for service in services))
    reading = sensors.read()
    gpu = {"celsius": reading.celsius, "power_w": reading.power_w} if reading else {}
    return Evidence(
        firmware=firmware(host.paths.root),
        gpu={name: value for name, value in gpu.items() if value is not None},
        gpu_container=_gpu_container(host.paths),
        kernel_log=logs.count_kernel_faults(),
        engines=tuple(_engine(release, host) for release in running),
    )


def _gpu_container(paths: Paths) -> tuple[str, ...]:
    try:
        return docker.gpu_arguments(paths)
    except HostToolError:
        return ()


def _engine(release: Release, host: Host) -> EngineEvidence:
    invocation_id = host.units.invocation(release.serve_unit) or ""
    messages = list(logs.start_messages(read_log(release, invocation_id)))
    container = docker.container(release.container, 5) or {}
    rollout = host.disk.read(Rollout, host.paths.rollout(release.name))
    return EngineEvidence(
        release=release.name,
        lines=logs.kernel_lines(messages),
        times_s=logs.times_s(messages),
        sizes_bytes=logs.sizes_bytes(messages),
        kv_cache_tokens=logs.kv_cache_tokens(messages),
        libraries=container_libraries(str(container["Id"])) if container.get("Id") else {},
        rollout_state=rollout.state if rollout else None,
        rollout_times_s=dict(rollout.times_s) if rollout else {},
        **_token_counts(release, host.paths),
    )


def _token_counts(release: Release, paths: Paths) -> dict[str, Any]:
    try:
        metrics = Engine.of(release, paths).metrics()
    except EngineError:
        return {}
    totals = {
        "drafted_tokens": metrics.drafted,
        "accepted_tokens": metrics.accepted,
        "generated_tokens": metrics.total(metrics.dialect.generated),
    }
    return {key: None if value is None else int(value) for key, value in totals.items()}


def firmware(root: Path = Path("/")) -> dict[str, str]:
    """Return product and firmware versions, but no serial number."""
    versions = {}
    for name in _DMI:
        path = root / "sys/class/dmi/id" / name
        text = path.read_text(errors="replace").strip() if path.is_file() else ""
        if _PLAIN.fullmatch(text):
            versions[name] = text
    return {**versions, **_capsules(programs.output_of("fwupdmgr", "get-devices", "--json") or "")}


def _capsules(text: str) -> dict[str, str]:
    try:
        devices = json.loads(text).get("Devices", ())
    except (ValueError, AttributeError):
        return {}
    pairs = (
        (str(device.get("Name", "")), str(device.get("Version", "")))
        for device in devices
        if isinstance(device, dict) and device.get("Plugin") == "uefi_capsule"
    )
    return {
        name: version
        for name, version in pairs
        if _PLAIN.fullmatch(name) and _VERSION.fullmatch(version)
    }


_PACKAGE_FOLDER = re.compile(r"(/\S*/(?:dist|site)-packages)/")
_DIST_INFO = re.compile(r"([A-Za-z0-9_.]+)-([0-9][\w.+]*)\.dist-info")
_NCCL = re.compile(r"/libnccl\.so[.\d]*$")
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
# The version of our plugin is part of the release.
_PACKAGES = {
    "vllm": "vllm", "torch": "torch", "triton": "triton", "transformers": "transformers",
    "flashinfer_python": "flashinfer", "flashinfer_jit_cache": "flashinfer_jit_cache",
    "flashinfer_cubin": "flashinfer_cubin",
}  # fmt: skip


def container_libraries(container_id: str, proc: Path = Path("/proc")) -> dict[str, str]:
    versions: dict[str, set[str]] = {}
    package_folders: set[Path] = set()
    for process in _processes(container_id, proc):
        root = process / "root"
        for path in _mapped_files(process):
            if _NCCL.search(path):
                versions.setdefault("nccl", set()).update(_nccl_version(root / path.lstrip("/")))
            if match := _PACKAGE_FOLDER.match(path):
                package_folders.add(root / match[1].lstrip("/"))
    for name, version in _installed(package_folders):
        versions.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(several)) for name, several in versions.items() if several}


def _processes(container_id: str, proc: Path) -> Iterator[Path]:
    for cgroup in proc.glob("[0-9]*/cgroup"):
        try:
            if container_id in cgroup.read_text():
                yield cgroup.parent
        except OSError:  # it has exited
            continue


def _mapped_files(process: Path) -> set[str]:
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:  # it has exited
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}


def _nccl_version(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            match = _NCCL_VERSION.search(content)
            version = match[1].decode() if match else ""  # read while it is mapped
    except (OSError, ValueError):  # gone, or empty
        return
    if version:
        yield version


def _installed(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError:
            continue
        for name in names:
            match = _DIST_INFO.fullmatch(name)
            if match and match[1].lower() in _PACKAGES:
                yield _PACKAGES[match[1].lower()], match[2]


def main(words: list[str], paths: Paths) -> int:
    print_json(evidence(Host(paths)))
    return 0
