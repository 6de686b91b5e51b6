"""Disk space and memory of the demo, measured with ``du`` on Debian 12 x86_64 unless noted."""

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.paths import LabPaths

BASES_BYTES = 900_000_000  # the hosts' trees, bootstrapped and configured, and packages
MODELS_BYTES = 100_000_000
ENVIRONMENT_BYTES = 420_000_000
ENGINE_TREES_BYTES = 2_100_000_000
ENGINE_IMAGE_BYTES = 2_000_000_000
# A host with the stub engine, after a deploy.
HOST_BYTES = 600_000_000
HOST_ENGINE_BYTES = ENGINE_TREES_BYTES
# Docker keeps the downloaded file while it unpacks a layer.
HOST_PULL_BYTES = ENGINE_IMAGE_BYTES
ENGINE_MEMORY_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    size_bytes: int
    existing_bytes: int = 0
    temporary: bool = False  # deleted before the demo ends

    @property
    def missing_bytes(self) -> int:
        return max(0, self.size_bytes - self.existing_bytes)


def list_parts(paths: LabPaths, checkout: Path, hosts: Sequence[str], engine: str) -> list[Part]:
    cache, real = paths.cache, engine == "cpu"
    kept = [path for kind in ("bootstrap", "base", "debs", "debootstrap-debs")
            for path in cache.glob(f"{kind}*")]  # fmt: skip
    host_bytes = HOST_BYTES + real * HOST_ENGINE_BYTES
    guests = used_bytes(paths.guests / name for name in hosts)
    parts = [
        Part("packages and base systems", BASES_BYTES, used_bytes(kept)),
        Part("models", MODELS_BYTES, used_bytes([paths.hub])),
        *(_engine_parts(paths) if real else ()),
        Part(f"{len(hosts)} hosts", len(hosts) * host_bytes, guests),
        Part("Python environment", ENVIRONMENT_BYTES, used_bytes([checkout / ".venv"])),
    ]
    if real:
        pulled = len(hosts) * HOST_PULL_BYTES
        parts.append(Part("temporary, while hosts unpack it", pulled, temporary=True))
    return parts


def _engine_parts(paths: LabPaths) -> list[Part]:
    # Imported here, so that the lab's long-lived processes run without the engine's files.
    from lab.engine.build import engine_in
    from lab.images import read_published

    engine = engine_in(paths.cache)
    unpacked = ENGINE_TREES_BYTES if engine.venv.exists() and engine.rootfs.exists() else 0
    image = read_published(paths).get("vllm-cpu")
    pushed = ENGINE_IMAGE_BYTES if image is not None and image.tag == engine.key else 0
    return [
        Part("vLLM, unpacked", ENGINE_TREES_BYTES, unpacked),
        Part("vLLM, as an image", ENGINE_IMAGE_BYTES, pushed),
    ]


def used_bytes(paths: Iterable[Path]) -> int:
    existing = [str(path) for path in paths if path.exists()]
    if not existing:
        return 0
    # du prints the total even if a file disappears meanwhile.
    argv = ["du", "--one-file-system", "--block-size=1", "--summarize", "--total", *existing]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return int(done.stdout.splitlines()[-1].split()[0])
