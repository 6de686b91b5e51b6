import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lab.content import content_key
from lab.paths import LabPaths

if TYPE_CHECKING:
    from lab.model.safetensors import Tensors

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


def _read_tree(directory: Path) -> "Tensors":
    from lab.model.safetensors import read_file

    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in read_file(path).items()
    }
