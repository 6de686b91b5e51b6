"""Writes the two repositories, and publishes file trees as commits of a hub on disk."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.model import original, rounding, vocabulary
from lab.model.original import Floats
from lab.model.safetensors import Tensors, write_file, write_model
from lab.model.shape import Shape, fp8_config, int4_config, model_config

INT4_NAME = "lab/tiny-int4"
FP8_NAME = "lab/tiny-fp8"
MTP_FILE = "model_extra_tensors.safetensors"
SHARD_BYTES = 2_000_000  # small, so that there are several


def _plain(name: str, values: Floats) -> rounding.Tensor:
    if name.endswith(original.FLOAT32):
        return rounding.float32(values)
    return rounding.bf16(values)


def _encode(
    weights: dict[str, Floats],
    is_encoded: Callable[[str], bool],
    encode: Callable[[Floats], Tensors],
) -> Tensors:
    tensors: Tensors = {}
    encoded: dict[int, Tensors] = {}  # several names may share an array
    for name, values in weights.items():
        if not is_encoded(name):
            tensors[name] = _plain(name, values)
            continue
        if id(values) not in encoded:
            encoded[id(values)] = encode(values)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor for part, tensor in encoded[id(values)].items()}
    return tensors


def int4_tensors(weights: dict[str, Floats]) -> Tensors:
    return _encode(weights, original.is_int4, rounding.int4)


def write_int4(
    directory: Path,
    shape: Shape,
    weights: dict[str, Floats],
    tokenizer: Tokenizer,
    about: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    directory.mkdir(parents=True)
    tensors = int4_tensors(weights)
    main = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    write_model(directory, main, {MTP_FILE: mtp}, shard_bytes)
    quantization = int4_config(shape)
    write_common(directory, shape, tokenizer, quantization, f"# {INT4_NAME}\n\n{about}\n")
    _write_json(directory / "quantization_config.json", quantization)


def write_fp8(
    directory: Path, shape: Shape, weights: dict[str, Floats], tokenizer: Tokenizer, about: str
) -> None:
    directory.mkdir(parents=True)
    tensors = _encode(weights, original.is_fp8, rounding.fp8)
    write_model(directory, tensors, {}, SHARD_BYTES)
    kept = [
        name.removesuffix(".weight")
        for name, values in weights.items()
        if name.endswith(".weight") and values.ndim > 1 and not original.is_fp8(name)
    ]
    quantization = fp8_config(kept)
    write_common(directory, shape, tokenizer, quantization, f"# {FP8_NAME}\n\n{about}\n")


def write_plain(
    directory: Path, shape: Shape, weights: dict[str, Floats], tokenizer: Tokenizer
) -> None:
    directory.mkdir(parents=True)
    tensors = {name: _plain(name, values) for name, values in weights.items()}
    write_file(directory / "model.safetensors", tensors)
    write_common(directory, shape, tokenizer, None, "# reference\n")


def write_common(
    directory: Path,
    shape: Shape,
    tokenizer: Tokenizer,
    quantization: dict[str, Any] | None,
    readme: str,
) -> None:
    ids = vocabulary.token_ids(tokenizer)
    config = model_config(shape, ids)
    if quantization is not None:
        config["quantization_config"] = quantization
    _write_json(directory / "config.json", config)
    end_of_text = ids["<|endoftext|>"]
    ends = {"eos_token_id": [ids["<|im_end|>"], end_of_text], "pad_token_id": end_of_text}
    sizes = {
        "merge_size": shape.merge,
        "patch_size": shape.patch,
        "temporal_patch_size": shape.temporal_patch,
    }
    constant = json.loads(Path(__file__).with_name("other_configs.json").read_text())
    for name, fields in constant.items():
        _write_json(directory / name, {**fields, **(sizes if "size" in fields else ends)})
    vocabulary.write(directory, tokenizer, shape.max_positions)
    (directory / "README.md").write_text(readme)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def publish(hub: Path, name: str, trees: list[Path]) -> list[str]:
    """Publish `trees` as commits, oldest first; the last is `main`.

    Equal content gets an equal name.
    """
    commits: list[str] = []
    for tree in trees:
        commits.append(_commit_name(tree, commits[-1] if commits else ""))
        target = hub / name / commits[-1]
        if target.exists():
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        tree.rename(target)
    refs = hub / name / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(commits[-1] + "\n")
    return commits


def _commit_name(tree: Path, parent: str) -> str:
    lines = [f"parent {parent}"]
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines.append(f"{path.relative_to(tree).as_posix()} {digest}")
    return hashlib.sha1("\n".join(lines).encode(), usedforsecurity=False).hexdigest()
