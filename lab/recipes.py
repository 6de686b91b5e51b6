"""The images of the lab: their content, built once and pushed to the registry."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.content import cached, content_key
from lab.distribution import Distribution
from lab.errors import LabError
from lab.images import (
    ImageConfig,
    Layer,
    PublishedImage,
    has_manifest,
    layer_from_files,
    layer_from_tree,
    push_image,
    read_published,
    write_published,
)
from lab.paths import HOST_IP, REGISTRY_PORT, LabPaths
from lab.shell import run

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


def publish(paths: LabPaths, recipe: Recipe) -> PublishedImage:
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
        labels={"org.opencontainers.image.title": "stub engine"},
        machine=distribution.machine,
    )

    def compile_engine(target: Path) -> None:
        program = [str(path) for path in sources if path.suffix == ".c"]
        run(["gcc", *_STUB_FLAGS, "-o", target, *program])

    def layers(directory: Path) -> list[Layer]:
        program = cached(paths.cache / f"stub-engine-{key}", compile_engine)
        files = {
            "root/": (b"", 0o700),
            "tmp/": (b"", 0o1777),
            "usr/bin/vllm": (program.read_bytes(), 0o755),
        }
        return [layer_from_files(files, directory / "layer.tar.gz")]

    return Recipe("stub-engine", key, config, layers)


def vllm_cpu(paths: LabPaths) -> Recipe:
    # Imported here, so that the lab's long-lived processes run without the engine's files.
    from lab.engine.build import CONFIG, build_engine, engine_layers

    engine = build_engine(paths.cache)
    return Recipe(
        "vllm-cpu", engine.key, CONFIG, lambda directory: engine_layers(engine, directory)[0]
    )
