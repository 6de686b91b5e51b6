"""Which libraries the processes of a container hold, by their maps: not what an image promises."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PROC = Path("/proc")
_PACKAGES = re.compile(r"(/\S*/(?:dist|site)-packages)/")
_NCCL = re.compile(r"/libnccl\.so[.\d]*$")
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
# Of packages; the plugin's version is a part of the release.
_WANTED = {
    "vllm": "vllm", "torch": "torch", "triton": "triton", "transformers": "transformers",
    "flashinfer_python": "flashinfer", "flashinfer_jit_cache": "flashinfer_jit_cache",
    "flashinfer_cubin": "flashinfer_cubin",
}  # fmt: skip
_DIST_INFO = re.compile(r"([A-Za-z0-9_.]+)-([0-9][\w.+]*)\.dist-info")


def of_container(container_id: str, proc: Path = PROC) -> dict[str, str]:
    """Return the versions of libraries and packages that a container's processes use."""
    found: dict[str, set[str]] = {}
    packages: set[Path] = set()
    for process in _processes(container_id, proc):
        mapped = _mapped(process)
        root = process / "root"
        for path in mapped:
            if _NCCL.search(path):
                found.setdefault("nccl", set()).update(_nccl_version(root / path.lstrip("/")))
        packages |= {root / one[1].lstrip("/") for path in mapped if (one := _PACKAGES.match(path))}
    for name, version in _installed(packages):
        found.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in found.items() if versions}


def _processes(container_id: str, proc: Path) -> Iterator[Path]:
    for group in proc.glob("[0-9]*/cgroup"):
        try:
            if container_id in group.read_text():
                yield group.parent
        except OSError:  # it has ended
            continue


def _mapped(process: Path) -> set[str]:
    """Return the files that a process has mapped; none of one that has ended."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}


def _nccl_version(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            found = _NCCL_VERSION.search(content)
            version = found[1].decode() if found else ""  # read while it is mapped
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
            if match and match[1].lower() in _WANTED:
                yield _WANTED[match[1].lower()], match[2]
