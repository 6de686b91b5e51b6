"""What the demo takes of the disk, part by part, how much of each is there already; its memory.

The sizes are constants, to be corrected by who measures: they were taken with ``du`` on Debian 12
and x86_64, except where it says otherwise.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.paths import LabPaths

BASES_BYTES = 900_000_000  # the tree of a host as it is bootstrapped, configured, and packages
MODELS_BYTES = 100_000_000  # generated repositories of the lab's model
ENVIRONMENT_BYTES = 420_000_000
ENGINE_TREES_BYTES = 2_100_000_000  # vLLM for the CPU and the Debian below it, unpacked
ENGINE_IMAGE_BYTES = 2_000_000_000  # the same as layers, which are not packed
# A host after its deploy with the stub engine: Docker and nginx, tools, checkpoints, journal.
HOST_BYTES = 600_000_000
# With the real engine: its layers as Docker unpacked them. Computed from the trees, not measured.
HOST_ENGINE_BYTES = ENGINE_TREES_BYTES
# While Docker unpacks a layer it keeps the file that it downloaded; both hosts do it at once.
HOST_PULL_BYTES = ENGINE_IMAGE_BYTES

ENGINE_MEMORY_BYTES = 3 << 30  # of the memory, for each real engine; what its plan asks for


@dataclass(frozen=True, slots=True)
class Part:
    """Something of the demo that takes room."""

    what: str
    size_bytes: int
    folder: Path  # on whose disk it lies
    there_bytes: int = 0  # of it, already
    passing: bool = False  # given back before the demo ends

    @property
    def to_come_bytes(self) -> int:
        return max(0, self.size_bytes - self.there_bytes)


def parts(paths: LabPaths, checkout: Path, hosts: Sequence[str], engine: str) -> list[Part]:
    """Return what a demo with this engine takes; hosts are made anew, and give theirs back."""
    state, cache, real = paths.state, paths.cache, engine == "cpu"
    kept = [path for kind in ("bootstrap", "base", "debs", "debootstrap-debs")
            for path in cache.glob(f"{kind}*")]  # fmt: skip
    host_bytes = HOST_BYTES + real * HOST_ENGINE_BYTES
    found = [
        Part("packages, and what hosts stand on", BASES_BYTES, state, held_bytes(kept)),
        Part("models", MODELS_BYTES, state, held_bytes([paths.hub])),
        *(_engine(paths) if real else ()),
        Part(f"{len(hosts)} hosts", len(hosts) * host_bytes, state,
             held_bytes(paths.guests / name for name in hosts)),
        Part("Python environment", ENVIRONMENT_BYTES, checkout, held_bytes([checkout / ".venv"])),
    ]  # fmt: skip
    if real:
        pulled = len(hosts) * HOST_PULL_BYTES
        found.append(Part("on the way, while hosts unpack it", pulled, state, passing=True))
    return found


def _engine(paths: LabPaths) -> list[Part]:
    """Return the real engine: unpacked, and as an image in the registry; each is whole or absent.

    Imported here, not above: the lab's long-lived processes run without the engine's files.
    """
    from lab.engine.build import engine_in
    from lab.images import read_published

    engine = engine_in(paths.cache)
    there = ENGINE_TREES_BYTES if engine.venv.exists() and engine.rootfs.exists() else 0
    known = read_published(paths).get("vllm-cpu")
    pushed = ENGINE_IMAGE_BYTES if known is not None and known.tag == engine.key else 0
    return [
        Part("vLLM, unpacked", ENGINE_TREES_BYTES, paths.state, there),
        Part("vLLM, as an image", ENGINE_IMAGE_BYTES, paths.state, pushed),
    ]


def held_bytes(places: Iterable[Path]) -> int:
    """Return what files take of the disk: each inode once, without what is mounted below."""
    there = [str(place) for place in places if place.exists()]
    if not there:
        return 0
    # A file that goes while it looks is no error: the sum of the others is printed all the same.
    argv = ["du", "--one-file-system", "--block-size=1", "--summarize", "--total", *there]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return int(done.stdout.splitlines()[-1].split()[0])


def nearest(folder: Path) -> Path:
    """Return the folder, or the closest one above it that exists: whose disk it will lie on."""
    return next(one for one in (folder, *folder.parents) if one.exists())
