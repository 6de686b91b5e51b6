"""Reads and writes safetensors files and their index."""

import json
from pathlib import Path

from safetensors import deserialize

from lab.model.rounding import Tensor

Tensors = dict[str, Tensor]
INDEX = "model.safetensors.index.json"


def write_file(path: Path, tensors: Tensors) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.data)


def read_file(path: Path) -> Tensors:
    return {
        name: Tensor(stored["dtype"], tuple(stored["shape"]), bytes(stored["data"]))
        for name, stored in deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


def split(tensors: Tensors, shard_bytes: int) -> list[Tensors]:
    shards: list[Tensors] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + len(tensor.data) > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += len(tensor.data)
    return shards


def write_model(
    directory: Path, tensors: Tensors, extra: dict[str, Tensors], shard_bytes: int
) -> None:
    shards = split(tensors, shard_bytes)
    files = {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }
    files.update(extra)
    for name, content in files.items():
        write_file(directory / name, content)
    everything = [tensor for content in files.values() for tensor in content.values()]
    index = {
        "metadata": {"total_size": sum(len(tensor.data) for tensor in everything)},
        "weight_map": {
            tensor: name for name, content in files.items() for tensor in sorted(content)
        },
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
