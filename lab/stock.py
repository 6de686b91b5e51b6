"""Prepares everything for guests: base, packages, images and model repositories."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab import archive, identity, models, network, packages, recipes, rootfs, servers
from lab.content import use_copied_code
from lab.distribution import Distribution, install_programs, this_distribution
from lab.paths import LabPaths
from lab.shell import run

_CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Ground:
    distribution: Distribution
    base: Path
    debs: Path


def prepare(paths: LabPaths, *, engine_trees: bool) -> Ground:
    installed = install_programs()
    if installed:
        print(f"installed on this machine: {' '.join(installed)}", flush=True)
    for directory in (paths.cache, paths.guests, paths.run, paths.hub, paths.registry):
        directory.mkdir(parents=True, exist_ok=True)
    use_copied_code(paths)
    distribution = this_distribution()
    with _engine_built_in_parallel(engine_trees):
        ground = _publish_packages(paths, distribution)
    identity.ensure_ssh_key(paths)
    network.ensure_bridge()
    servers.start_all(paths)
    return ground


@contextmanager
def _engine_built_in_parallel(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    argv = [sys.executable, "-m", "lab.engine", "build"]
    with ThreadPoolExecutor(max_workers=1) as pool:
        built = pool.submit(run, argv, cwd=_CHECKOUT, show=True)
        yield
        built.result()


def _publish_packages(paths: LabPaths, distribution: Distribution) -> Ground:
    tree = rootfs.bootstrap(paths, distribution)
    preinstalled = [packages.build_stub(paths, name) for name in packages.PREINSTALLED_STUBS]
    vendor = [packages.build_stub(paths, name) for name in packages.VENDOR_STUBS]
    base = rootfs.base(paths, tree, preinstalled)
    offered = packages.download(paths, distribution, tree)
    debs = [*rootfs.debs_of(paths, distribution).glob("*.deb"), *offered.glob("*.deb")]
    arch = distribution.deb_arch
    archive.publish(paths, archive.OS_ARCHIVE, [*debs, *preinstalled], arch)
    archive.publish(paths, archive.VENDOR_ARCHIVE, vendor, arch)
    return Ground(distribution, base, offered)


def publish_engine(paths: LabPaths, ground: Ground, engine: str) -> None:
    """``engine`` is none, stub, or cpu (which includes the stub)."""
    images = [recipes.gpu_check(paths, ground.distribution, ground.debs)]
    if engine in ("stub", "cpu") and recipes.STUB_ENGINE_DIR.exists():
        images.append(recipes.stub_engine(paths, ground.distribution))
    if engine == "cpu":
        images.append(recipes.vllm_cpu(paths))
    for recipe in images:
        recipes.publish(paths, recipe)
    if engine != "none" and models.MODEL_DIR.exists():
        models.ensure_models(paths)
