"""Synthetic sources with the names, dtypes and file layout of the real repositories.

Only shared experts, their FP8 form and the LM head have meaningful values. Other tensors are
holes, so that the disk holds the largest model.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from spark_checkpoint.number_formats import from_bf16_bits, quantize_blocks
from spark_checkpoint.storage import PIECE_BYTES, Piece, hash_with_pieces

from lab.model.original import is_fp8, main_shapes, mtp_shapes
from lab.model.rounding import bf16_bits
from lab.model.shape import BLOCK, Shape
from proofs.trees.build import plain_plan
from proofs.whole.trees import Entry, header_of, size_of, stored

COMMIT = "b" * 40
DONOR_COMMIT = "d" * 40
SHARDS, DONOR_SHARDS = 40, 94


def fp8(module: str, outputs: int, inputs: int) -> list[Entry]:
    grid = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    return [
        (f"{module}.weight", "F8_E4M3", (outputs, inputs)),
        (f"{module}.weight_scale_inv", "BF16", grid),
    ]


def base_entries(a: Shape) -> list[Entry]:
    return [entry for item in main_shapes(a).items() for entry in stored(*item, int4_mtp=False)]


def mtp(a: Shape) -> list[Entry]:
    return [entry for item in mtp_shapes(a).items() for entry in stored(*item, int4_mtp=False)]


def donor_entries(a: Shape) -> list[Entry]:
    entries: list[Entry] = []
    for name, size in {**main_shapes(a), **mtp_shapes(a)}.items():
        module = name.removesuffix(".weight")
        entries += fp8(module, *size) if is_fp8(name) else stored(name, size, int4_mtp=False)
    return entries


def shared_expert_values(module: str, shape: tuple[int, int]) -> Any:
    seed = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)
    return bf16_bits(values).astype("<u2")


def write_shard(path: Path, entries: list[Entry], values: Mapping[str, bytes]) -> None:
    with path.open("wb") as file:
        file.write(header_of(entries))
        for entry in entries:
            data = values.get(entry[0])
            if data is not None:
                file.write(data)
            else:
                file.seek(size_of([entry]), 1)
        file.truncate()


def split(entries: list[Entry], shards: int) -> list[list[Entry]]:
    limit = size_of(entries) / shards
    result: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if filled >= limit * len(result) and len(result) < shards:
            result.append([])
        result[-1].append(entry)
        filled += size_of([entry])
    return result


def write_base(directory: Path, a: Shape) -> None:
    directory.mkdir(parents=True)
    shards = split(base_entries(a), SHARDS)
    names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    files = dict(zip(names, shards, strict=True)) | {"model_extra_tensors.safetensors": mtp(a)}
    index: dict[str, str] = {}
    for name, entries in files.items():
        values = {
            entry[0]: shared_expert_values(entry[0], (entry[2][0], entry[2][1])).tobytes()
            for entry in entries
            if entry[0].startswith("model.") and ".shared_expert." in entry[0]
        }
        write_shard(directory / name, entries, values)
        index.update(dict.fromkeys((entry[0] for entry in entries), name))
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    _write_json(directory / "config.json", _config(a))
    _write_json(directory / "tokenizer.json", {"version": "1.0"})
    write_receipt(directory)


def write_donor(directory: Path, a: Shape) -> None:
    """Write the FP8 donor, holes everywhere but in the shared experts."""
    directory.mkdir(parents=True)
    shards = split(donor_entries(a), DONOR_SHARDS)
    index: dict[str, str] = {}
    for number, entries in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        write_shard(directory / name, entries, _donor_values(entries))
        index.update(dict.fromkeys((entry[0] for entry in entries), name))
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def write_receipt(directory: Path) -> None:
    """Write the receipt; hashes of whole shards are zeros, those of their pieces are real."""
    files = []
    for path in sorted(directory.iterdir()):
        if path.name == "receipt.json":
            continue
        big = path.suffix == ".safetensors"
        status = path.stat()
        entry = {
            "path": path.name,
            "size_bytes": status.st_size,
            "sha256": "0" * 64,
            "modified_ns": status.st_mtime_ns,
            "inode": status.st_ino,
        }
        if big:
            entry["pieces"] = [str(piece) for piece in sparse_pieces(path)]
        else:
            proof = hash_with_pieces(path, lambda count: None)
            entry |= {"sha256": proof.sha256, "pieces": [str(piece) for piece in proof.pieces]}
        files.append(entry)
    document = {"schema_version": 1, "kind": "source", "digest": "5" * 64, "name": "bench/base"}
    document |= {"commit": COMMIT, "files": files, "tool_version": "0", "written_at": ""}
    _write_json(directory / "receipt.json", document)


def sparse_pieces(path: Path) -> Iterator[Piece]:
    empty = hashlib.sha256(bytes(PIECE_BYTES)).hexdigest()
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        for begin in range(0, size_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, size_bytes - begin)
            if length == PIECE_BYTES and _is_hole(file.fileno(), begin, length):
                yield Piece(length, empty)
            else:
                file.seek(begin)
                yield Piece(length, hashlib.sha256(file.read(length)).hexdigest())


def _is_hole(fd: int, begin: int, length: int) -> bool:
    try:
        return os.lseek(fd, begin, os.SEEK_DATA) >= begin + length
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return True


def plan(base: Path, out: Path, a: Shape, **changes: Any) -> dict[str, Any]:
    last = a.layers - 1
    layers = f"model.language_model.layers.{{0..{last}}}"
    swap = f"{layers}.mlp.shared_expert.{{gate,up,down}}_proj"
    experts = f"{layers}.mlp.experts.{{0..{a.experts - 1}}}.{{gate,up,down}}_proj"
    routed = f"{experts}.{{qweight,qzeros,scales}}"
    base_names = {entry[0] for entry in base_entries(a)}
    unmatched = [
        entry[0]
        for entry in donor_entries(a)
        if ".mlp.experts." not in entry[0]
        and entry[0] not in base_names
        and not (".shared_expert." in entry[0] and entry[0].startswith("model."))
    ]
    chosen = {
        "swap": [swap],
        "base_tensors": [routed, *sorted(n for n in base_names if ".mlp.experts." not in n)],
        "donor_unmatched": unmatched,
        "shared_experts": "fp8-donor",
        "layout": "overlay",
    }
    document = plain_plan(base, out, **{**chosen, **changes})
    return document | {"base": {"dir": str(base), "revision": COMMIT}}


def _donor_values(entries: list[Entry]) -> dict[str, bytes]:
    """A weight and its scales may be in different shards."""
    values = {}
    tensors: dict[str, tuple[Any, Any]] = {}
    for name, dtype, shape in entries:
        if not name.startswith("model.") or ".shared_expert." not in name:
            continue
        weight = name.replace(".weight_scale_inv", ".weight")
        rows, columns = shape
        if weight != name:
            # Every shape of the real models is a multiple of the block.
            rows, columns = rows * BLOCK, columns * BLOCK
        if weight not in tensors:
            bits = shared_expert_values(weight, (rows, columns))
            floats = from_bf16_bits(bits).reshape(rows, columns)
            tensors[weight] = quantize_blocks(floats, (BLOCK, BLOCK))
        codes, scales = tensors[weight]
        values[name] = codes.tobytes() if dtype == "F8_E4M3" else scales.tobytes()
    return values


def _config(a: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {"num_hidden_layers": a.layers, "tie_word_embeddings": False},
        "quantization_config": {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.language_model.layers",
            "extra_config": {},
        },
    }


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))
