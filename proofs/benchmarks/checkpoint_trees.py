"""Synthetic sources with the names, dtypes and file layout of the real repositories.

Only shared experts, their FP8 form and the LM head have meaningful values. All other tensors are
filler, or holes when ``sparse``, so that a checkpoint of the real size fits on any disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COMMIT = "b" * 40
DONOR_COMMIT = "d" * 40
BLOCK = 128
PARTS = ("gate_proj", "up_proj", "down_proj")
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}

Entry = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """Sizes of a Qwen3.5-MoE model; the defaults are those of 122B-A10B."""

    layers: int = 48
    experts: int = 256
    hidden: int = 3072
    width: int = 1024
    vocabulary: int = 248320
    attention_rows: int = 16384
    kv_rows: int = 512
    gdn_rows: int = 12288
    gdn_values: int = 8192
    gdn_heads: int = 64
    vision_hidden: int = 1152
    vision_blocks: int = 27
    shards: int = 14
    donor_shards: int = 39

    def mlp(self, part: str) -> tuple[int, int]:
        down = part == "down_proj"
        return (self.hidden, self.width) if down else (self.width, self.hidden)


def int4(module: str, outputs: int, inputs: int) -> list[Entry]:
    """Return the tensors of an INT4 linear, AutoRound in GPTQ packing, group 128."""
    groups = max(1, inputs // BLOCK)
    return [
        (f"{module}.qweight", "I32", (inputs // 8, outputs)),
        (f"{module}.qzeros", "I32", (groups, max(1, outputs // 8))),
        (f"{module}.scales", "F16", (groups, outputs)),
    ]


def fp8(module: str, outputs: int, inputs: int) -> list[Entry]:
    """Return weight and block scales of an FP8 linear."""
    grid = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    return [
        (f"{module}.weight", "F8_E4M3", (outputs, inputs)),
        (f"{module}.weight_scale_inv", "BF16", grid),
    ]


def linears(a: Architecture, layer: int) -> list[tuple[str, int, int]]:
    prefix = f"model.language_model.layers.{layer}"
    if layer % 4 == 3:
        rows = {"q_proj": a.attention_rows, "k_proj": a.kv_rows, "v_proj": a.kv_rows}
        projections = [(f"{prefix}.self_attn.{n}", r, a.hidden) for n, r in rows.items()]
        return [*projections, (f"{prefix}.self_attn.o_proj", a.hidden, a.attention_rows // 2)]
    rows = {"in_proj_qkv": a.gdn_rows, "in_proj_z": a.gdn_values}
    rows |= {"in_proj_a": a.gdn_heads, "in_proj_b": a.gdn_heads}
    projections = [(f"{prefix}.linear_attn.{n}", r, a.hidden) for n, r in rows.items()]
    return [*projections, (f"{prefix}.linear_attn.out_proj", a.hidden, a.gdn_values)]


def small(a: Architecture, layer: int) -> list[Entry]:
    """Return the 16-bit tensors of a layer that no recipe touches."""
    prefix = f"model.language_model.layers.{layer}"
    names: list[Entry] = [
        (f"{prefix}.input_layernorm.weight", "BF16", (a.hidden,)),
        (f"{prefix}.post_attention_layernorm.weight", "BF16", (a.hidden,)),
        (f"{prefix}.mlp.gate.weight", "BF16", (a.experts, a.hidden)),
        (f"{prefix}.mlp.shared_expert_gate.weight", "BF16", (1, a.hidden)),
    ]
    if layer % 4 == 3:
        return names + [(f"{prefix}.self_attn.{n}_norm.weight", "BF16", (256,)) for n in "qk"]
    return [
        *names,
        (f"{prefix}.linear_attn.A_log", "F32", (a.gdn_heads,)),
        (f"{prefix}.linear_attn.dt_bias", "F32", (a.gdn_heads,)),
        (f"{prefix}.linear_attn.conv1d.weight", "BF16", (a.gdn_rows, 1, 4)),
        (f"{prefix}.linear_attn.norm.weight", "BF16", (128,)),
    ]


def outside(a: Architecture) -> list[Entry]:
    width = a.vision_hidden
    vision: list[Entry] = [
        ("model.visual.patch_embed.proj.weight", "BF16", (width, 3, 2, 16, 16)),
        ("model.visual.patch_embed.proj.bias", "BF16", (width,)),
        ("model.visual.pos_embed.weight", "BF16", (2304, width)),
    ]
    for block in range(a.vision_blocks):
        for part in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            shape = (width,) if "norm" in part else (width, width)
            vision.append((f"model.visual.blocks.{block}.{part}.weight", "BF16", shape))
            vision.append((f"model.visual.blocks.{block}.{part}.bias", "BF16", (width,)))
    for part in ("norm", "linear_fc1", "linear_fc2"):
        vision.append((f"model.visual.merger.{part}.weight", "BF16", (width,)))
        vision.append((f"model.visual.merger.{part}.bias", "BF16", (width,)))
    return [
        *vision,
        ("model.language_model.embed_tokens.weight", "BF16", (a.vocabulary, a.hidden)),
        ("model.language_model.norm.weight", "BF16", (a.hidden,)),
        ("lm_head.weight", "BF16", (a.vocabulary, a.hidden)),
    ]


def mtp(a: Architecture) -> list[Entry]:
    """Return the 785 BF16 tensors (for 256 experts) of the MTP head."""
    names: list[Entry] = [("mtp.fc.weight", "BF16", (a.hidden, 2 * a.hidden))]
    names += [
        (f"mtp.{n}.weight", "BF16", (a.hidden,))
        for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    ]
    prefix = "mtp.layers.0"
    names += [
        (f"{prefix}.{n}.weight", "BF16", (a.hidden,))
        for n in ("input_layernorm", "post_attention_layernorm")
    ]
    names.append((f"{prefix}.mlp.gate.weight", "BF16", (a.experts, a.hidden)))
    names.append((f"{prefix}.mlp.shared_expert_gate.weight", "BF16", (1, a.hidden)))
    names += [(f"{prefix}.mlp.shared_expert.{p}.weight", "BF16", a.mlp(p)) for p in PARTS]
    rows = {"q_proj": a.attention_rows, "k_proj": a.kv_rows, "v_proj": a.kv_rows}
    names += [(f"{prefix}.self_attn.{n}.weight", "BF16", (r, a.hidden)) for n, r in rows.items()]
    o_shape = (a.hidden, a.attention_rows // 2)
    names.append((f"{prefix}.self_attn.o_proj.weight", "BF16", o_shape))
    names += [(f"{prefix}.self_attn.{n}_norm.weight", "BF16", (256,)) for n in "qk"]
    for expert in range(a.experts):
        names += [(f"{prefix}.mlp.experts.{expert}.{p}.weight", "BF16", a.mlp(p)) for p in PARTS]
    return names


def base_entries(a: Architecture) -> list[Entry]:
    """Return every tensor of the INT4 base outside mtp.*, layer by layer."""
    entries: list[Entry] = []
    for layer in range(a.layers):
        mlp = f"model.language_model.layers.{layer}.mlp"
        entries += small(a, layer)
        for name, outputs, inputs in linears(a, layer):
            entries += int4(name, outputs, inputs)
        entries += [(f"{mlp}.shared_expert.{p}.weight", "BF16", a.mlp(p)) for p in PARTS]
        for expert in range(a.experts):
            for part in PARTS:
                entries += int4(f"{mlp}.experts.{expert}.{part}", *a.mlp(part))
    return entries + outside(a)


def donor_entries(a: Architecture) -> list[Entry]:
    """Return every tensor of the FP8 donor."""
    entries: list[Entry] = []
    for layer in range(a.layers):
        mlp = f"model.language_model.layers.{layer}.mlp"
        entries += small(a, layer)
        for name, outputs, inputs in linears(a, layer):
            plain = name.endswith(("in_proj_a", "in_proj_b"))
            entry: Entry = (f"{name}.weight", "BF16", (outputs, inputs))
            entries += [entry] if plain else fp8(name, outputs, inputs)
        for part in PARTS:
            entries += fp8(f"{mlp}.shared_expert.{part}", *a.mlp(part))
            for expert in range(a.experts):
                entries += fp8(f"{mlp}.experts.{expert}.{part}", *a.mlp(part))
    for name, dtype, shape in mtp(a):
        linear = name.endswith("_proj.weight")
        entries += fp8(name.removesuffix(".weight"), *shape) if linear else [(name, dtype, shape)]
    return entries + outside(a)


def size_of(entry: Entry) -> int:
    return int(np.prod(entry[2])) * ITEM_BYTES[entry[1]]


def shared_expert_values(module: str, shape: tuple[int, int]) -> Any:
    """Return BF16 bits of a shared expert's weight, the same on every call."""
    seed = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


class Filler:
    """Cheap bytes without long runs, for tensors that no recipe reads."""

    def __init__(self) -> None:
        self._pool = np.random.default_rng(7).bytes(32 << 20)

    def chunks(self, size_bytes: int) -> Iterator[bytes]:
        while size_bytes > 0:
            piece = self._pool[: min(size_bytes, len(self._pool))]
            yield piece
            size_bytes -= len(piece)


def write_shard(
    path: Path, entries: list[Entry], values: Mapping[str, bytes], filler: Filler | None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        end = position + size_of(entry)
        header[entry[0]] = {
            "dtype": entry[1],
            "shape": list(entry[2]),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for entry in entries:
            data = values.get(entry[0])
            if data is not None:
                file.write(data)
            elif filler is not None:
                for piece in filler.chunks(size_of(entry)):
                    file.write(piece)
            else:
                file.seek(size_of(entry), 1)
        file.truncate(8 + len(raw) + position)


def split(entries: list[Entry], shards: int) -> list[list[Entry]]:
    limit = sum(map(size_of, entries)) / shards
    result: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if filled >= limit * len(result) and len(result) < shards:
            result.append([])
        result[-1].append(entry)
        filled += size_of(entry)
    return result
