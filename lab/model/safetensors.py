"""Reads and writes safetensors files and their index."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import deserialize

from lab.model.rounding import Tensor

Tensors = dict[str, Tensor]
INDEX = "model.safetensors.index.json"


def file_header(entries: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return a file's bytes before the tensors, from names, types, shapes and sizes in bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size_bytes in entries:
        end = offset + size_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Tensors) -> None:
    with path.open("wb") as out:
        entries = ((name, t.dtype, t.shape, len(t.data)) for name, t in tensors.items())
        out.write(file_header(entries))
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
