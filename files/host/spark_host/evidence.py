"""``spark-host evidence``: facts about running engines and the host, safe to publish."""

from __future__ import annotations

import json
import mmap
import re
from contextlib import suppress
from pathlib import Path

from spark_contract.paths import Paths
from spark_contract.records import Rollout
from spark_contract.release import Release
from spark_contract.status import EngineEvidence, Evidence
from spark_contract.tool import HostToolError

from spark_host.check.runner import read_log
from spark_host.engine import logs
from spark_host.engine.client import Engine, EngineError
from spark_host.records import boot
from spark_host.system import docker, programs
from spark_host.system.host import Host, release_names
from spark_host.watch import sensors

_DMI = ("sys_vendor", "product_name", "bios_vendor", "bios_version", "bios_date")
_PLAIN = re.compile(r"[\w .,+/()-]{1,80}")
_VERSION = re.compile(r"[\w.+-]{1,40}")


def read_evidence(paths: Paths) -> Evidence:
    host = Host(paths)
    releases = filter(None, map(host.release, release_names(paths)))
    services = sorted({release.service for release in releases})
    running = filter(
        None, (host.release(boot.active_release(service, host)) for service in services)
    )
    reading = sensors.read()
    gpu = {"celsius": reading.celsius, "power_w": reading.power_w} if reading else {}
    container_arguments: tuple[str, ...] = ()
    with suppress(HostToolError):  # no GPU check has passed
        container_arguments = docker.gpu_arguments(paths)
    return Evidence(
        firmware=read_firmware(paths.root),
        gpu={name: value for name, value in gpu.items() if value is not None},
        gpu_container=container_arguments,
        kernel_log=logs.count_kernel_faults(),
        engines=tuple(_engine_evidence(release, host) for release in running),
    )


def _engine_evidence(release: Release, host: Host) -> EngineEvidence:
    invocation_id = host.units.read_invocation_id(release.serve_unit) or ""
    messages = list(logs.start_messages(read_log(release, invocation_id)))
    container = docker.inspect_container(release.container, 5) or {}
    rollout = host.disk.read(Rollout, host.paths.rollout(release.name))
    counts: dict[str, float | None] = {}
    with suppress(EngineError):
        metrics = Engine.for_release(release, host.paths).metrics()
        counts = {
            "drafted_tokens": metrics.drafted,
            "accepted_tokens": metrics.accepted,
            "generated_tokens": metrics.total(metrics.dialect.generated),
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
    with suppress(ValueError, AttributeError):  # the program is missing, or its output is not JSON
        text = programs.read_output("fwupdmgr", "get-devices", "--json") or ""
        for device in json.loads(text).get("Devices", ()):
            name, version = str(device.get("Name", "")), str(device.get("Version", ""))
            plain = _PLAIN.fullmatch(name) and _VERSION.fullmatch(version)
            if plain and device.get("Plugin") == "uefi_capsule":
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
            return {match[1].decode()} if match else set()  # read while it is mapped
    except (OSError, ValueError):  # ValueError: an empty file
        return set()
