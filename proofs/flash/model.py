"""A small Qwen4Exp model with known tokens, and its checkpoints.

The next token is a permutation of the last one, and the drafter knows it. Some rows of the n-gram
table are large and change the next token, which the drafter, without a table, cannot know. The
layers are random, so that states, experts and caches affect every logit.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lab.model import rounding
from lab.model.original import Floats
from lab.model.rounding import Tensor
from lab.model.safetensors import Tensors, write_model
from proofs.trees.build import build, names_of, plain_plan

LAYERS = "model.language_model.layers"
CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
"""All experts are active, so no routing flips between kernels; rows of the table have 160 numbers,
as in the true model."""
TEXT: dict[str, Any] = CONFIG["text_config"]
TABLE_LAYER, TABLE_SHARDS = TEXT["ple_layer_ids"][0] - 1, TEXT["split_ngram_parts"]
TABLE = f"{LAYERS}.{TABLE_LAYER}.ple.ple_embedding.ngram_embedding"
LARGE_SHARE, LARGE, SMALL = 0.02, 12.0, 0.05  # of the table's rows
TOP_LOGIT = 14.0
SEED = 35
HIDDEN, STREAMS = TEXT["hidden_size"], TEXT["hidden_size"] * TEXT["hc_count"]
WIDTH = TEXT["ple_embed_dim"] // 16

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _mixer(prefix: str, combines: bool = True) -> Shapes:
    yield f"{prefix}.hc_norm.weight", (STREAMS,)
    yield f"{prefix}.input_mix_weight_down.weight", (TEXT["hc_lowrank"], STREAMS)
    yield f"{prefix}.input_mix_weight_up.weight", (STREAMS, TEXT["hc_lowrank"])
    if combines:
        yield f"{prefix}.block_inject_weight.weight", (TEXT["hc_count"], STREAMS)


def _linear_attention(prefix: str) -> Shapes:
    heads, key = TEXT["linear_num_value_heads"], 2 * 128
    value = heads * 128
    yield f"{prefix}.in_proj_qkv.weight", (2 * key + value, HIDDEN)
    yield f"{prefix}.in_proj_z.weight", (value, HIDDEN)
    yield f"{prefix}.in_proj_a.weight", (heads, HIDDEN)
    yield f"{prefix}.in_proj_b.weight", (heads, HIDDEN)
    yield f"{prefix}.out_proj.weight", (HIDDEN, value)
    yield f"{prefix}.conv1d.weight", (2 * key + value, 1, 4)
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (128,)


def _attention(prefix: str) -> Shapes:
    heads, kv_heads = TEXT["num_attention_heads"] * 256, TEXT["num_key_value_heads"] * 256
    yield f"{prefix}.q_proj.weight", (2 * heads, HIDDEN)
    yield f"{prefix}.k_proj.weight", (kv_heads, HIDDEN)
    yield f"{prefix}.v_proj.weight", (kv_heads, HIDDEN)
    yield f"{prefix}.o_proj.weight", (HIDDEN, heads)
    yield f"{prefix}.q_norm.weight", (256,)
    yield f"{prefix}.k_norm.weight", (256,)
    yield f"{prefix}.indexer.index_qk_proj.weight", (5 * 128, HIDDEN)
    yield f"{prefix}.indexer.q_layernorm.weight", (128,)
    yield f"{prefix}.indexer.k_layernorm.weight", (128,)


def _experts(prefix: str) -> Shapes:
    width = TEXT["moe_intermediate_size"]
    names = [f"experts.{number}" for number in range(TEXT["num_experts"])]
    for name in (*names, "shared_expert"):
        yield f"{prefix}.{name}.gate_proj.weight", (width, HIDDEN)
        yield f"{prefix}.{name}.up_proj.weight", (width, HIDDEN)
        yield f"{prefix}.{name}.down_proj.weight", (HIDDEN, width)
    yield f"{prefix}.gate.weight", (TEXT["num_experts"], HIDDEN)
    yield f"{prefix}.shared_expert_gate.weight", (1, HIDDEN)


def _layer(prefix: str, *, linear: bool, has_table: bool = False) -> Shapes:
    if has_table:
        ple = TEXT["ple_embed_dim"]
        yield f"{prefix}.ple.key_proj.weight", (STREAMS, ple)
        yield f"{prefix}.ple.value_proj.weight", (HIDDEN, ple)
        for norm in ("key", "query", "conv"):
            yield f"{prefix}.ple.norm_{norm}.weight", (STREAMS,)
        yield f"{prefix}.ple.conv1d.weight", (STREAMS, 1, 4)
    kind = _linear_attention(f"{prefix}.linear_attn") if linear else None
    yield from kind or _attention(f"{prefix}.self_attn")
    yield from _experts(f"{prefix}.mlp")
    for block in ("attn", "mlp"):
        yield from _mixer(f"{prefix}.{block}_hyper_connection")


def shapes() -> dict[str, tuple[int, ...]]:
    """Return all names but the table's and the vision tower's, which no proof loads."""
    found: dict[str, tuple[int, ...]] = {}
    for layer, kind in enumerate(TEXT["layer_types"]):
        linear, has_table = kind == "linear_attention", layer == TABLE_LAYER
        found |= _layer(f"{LAYERS}.{layer}", linear=linear, has_table=has_table)
    found |= _mixer("model.language_model.hyper_connection_mixer", combines=False)
    found |= _layer("mtp.layers.0", linear=False)
    found |= _mixer("mtp.hyper_connection_mixer", combines=False)
    found |= {"mtp.fc_embedding.weight": (HIDDEN, HIDDEN), "mtp.fc_hidden.weight": (HIDDEN, HIDDEN)}
    found |= {"mtp.pre_fc_norm_embedding.weight": (HIDDEN,)}
    return found | {"mtp.pre_fc_norm_hidden.weight": (STREAMS,)}


def next_tokens(seed: int = SEED) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the token after each token where no large row interferes: a single cycle."""
    cycle = np.random.default_rng(seed).permutation(TEXT["vocab_size"])
    result = np.empty_like(cycle)
    result[cycle] = np.roll(cycle, -1)
    return result


def random_weights(seed: int = SEED) -> dict[str, Floats]:
    source = np.random.default_rng(seed + 1)
    weights: dict[str, Floats] = {}
    for name, shape in shapes().items():
        weights[name] = _initial(source, name, shape).astype(np.float32)
    embedding = source.normal(0, 1, (TEXT["vocab_size"], HIDDEN)).astype(np.float32)
    head = np.empty_like(embedding)
    # The mixer halves the normed streams.
    head[next_tokens(seed)] = embedding * 2 * TOP_LOGIT / HIDDEN
    weights["model.language_model.embed_tokens.weight"] = embedding
    weights["lm_head.weight"] = head
    weights["mtp.fc_embedding.weight"] = np.eye(HIDDEN, dtype=np.float32)
    return weights


def _initial(source: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    if name.endswith("A_log"):
        return np.log(source.uniform(1.0, 16.0, shape))
    if name.endswith(("dt_bias", "linear_attn.norm.weight")):
        return np.ones(shape)
    if len(shape) == 1:  # norms of this architecture are stored minus 1
        return np.zeros(shape)
    values = source.normal(0, 1, shape)
    if "ple.value_proj" in name:
        return values / WIDTH**0.5
    if "conv1d" in name:
        return values * (0.1 if ".ple." in name else 0.5)
    quiet = ("hyper_connection", "shared_expert_gate", "mtp.fc_hidden")
    return values / shape[-1] ** 0.5 * (0.1 if any(part in name for part in quiet) else 1.0)


def table_rows(seed: int = SEED) -> Floats:
    source = np.random.default_rng(seed + 2)
    count = _table_size()
    sizes = np.where(source.random(count) < LARGE_SHARE, LARGE, SMALL).astype(np.float32)
    return source.normal(0, 1, (count, WIDTH)).astype(np.float32) * sizes[:, None]


def _table_size() -> int:
    """Return the rows of 16 heads, whose sizes are the primes from the base on."""
    primes: list[int] = []
    number = TEXT["ngram_vocab_size_base"]
    while len(primes) < 16:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            primes.append(number)
        number += 1
    return -(-sum(primes) // 128) * 128


def table_tensors(rows: Floats, kind: str) -> Tensors:
    """Return the table as published: 16-bit rows, FP8 with one scale, or NVFP4."""
    size = -(-len(rows) // TABLE_SHARDS)
    tensors: Tensors = {}
    if kind == "fp8":
        scale = float(np.abs(rows).max()) / 448
        tensors[f"{TABLE}.weight_scale"] = rounding.bf16(np.array([scale], np.float32))
        scale = float(rounding.bf16_round(np.array([scale], np.float32))[0])
    for number in range(TABLE_SHARDS):
        part = rows[number * size : (number + 1) * size]
        name = f"{TABLE}.shard_{number}.weight"
        if kind == "bf16":
            tensors[name] = rounding.bf16(part)
        elif kind == "fp8":
            codes = rounding.e4m3_codes(part / np.float32(scale))
            tensors[name] = Tensor("F8_E4M3", part.shape, codes.tobytes())
        else:
            packed, scales, table_scale = _nvfp4(part, float(np.abs(rows).max()) / (6 * 448))
            tensors[name] = packed
            tensors[f"{name}_scale"] = scales
            tensors[f"{TABLE}.weight_scale_2"] = rounding.float32(np.array(table_scale))
    return tensors


def _nvfp4(rows: Floats, table_scale: float) -> tuple[Tensor, Tensor, float]:
    groups = rows.reshape(len(rows), -1, 16)
    wanted = (np.abs(groups).max(axis=2) / 6 / table_scale).astype(np.float32)
    codes = rounding.e4m3_codes(wanted)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scaled = np.abs(groups) / (np.maximum(wanted, 1e-3) * table_scale)[..., None]
    numbers = np.abs(scaled[..., None] - levels).argmin(axis=-1).astype(np.uint8)
    numbers = (numbers | (groups < 0).astype(np.uint8) << 3).reshape(len(rows), -1, 2)
    packed = numbers[..., 0] | numbers[..., 1] << 4
    return (
        Tensor("U8", packed.shape, packed.tobytes()),
        Tensor("F8_E4M3", codes.shape, codes.tobytes()),
        table_scale,
    )


def _is_expert(name: str) -> bool:
    return name.startswith(LAYERS) and ".mlp.experts." in name


def write_tree(directory: Path, weights: dict[str, Floats], table: str, *, int4: bool) -> None:
    tensors: Tensors = {}
    for name, values in weights.items():
        if int4 and _is_expert(name):
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{k}": part for k, part in rounding.int4(values).items()}
        elif name.endswith(("A_log", "linear_attn.norm.weight")):
            tensors[name] = rounding.float32(values)
        else:
            tensors[name] = rounding.bf16(values)
    directory.mkdir(parents=True)
    main = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    own = {"model-ple.safetensors": table_tensors(table_rows(), table), "mtp.safetensors": mtp}
    write_model(directory, main, own, 8_000_000)
    text = dict(TEXT)
    formats = {"fp8": "float8_e4m3fn", "nvfp4": "nvfp4"}
    if table in formats:
        text["ple_embedding_dtype"] = formats[table]
    config = {**CONFIG, "text_config": text}
    if int4:
        config["quantization_config"] = _int4_config(weights)
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _int4_config(weights: dict[str, Floats]) -> dict[str, Any]:
    kept = [
        name.removesuffix(".weight")
        for name, values in weights.items()
        if name.startswith(LAYERS) and values.ndim == 2 and not _is_expert(name)
    ]
    return {
        "bits": 4,
        "block_name_to_quantize": LAYERS,
        "data_type": "int",
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in kept},
        "group_size": 128,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": True,
    }


BUILT: dict[str, dict[str, str]] = {
    "flash-file": {"base": "nvfp4", "ngram_table": "e2m1"},
    "flash-file-fp8": {"base": "fp8", "ngram_table": "e4m3"},
    "flash-requantised": {"base": "fp8", "ngram_table": "e2m1"},
    "flash": {"base": "nvfp4", "ngram_table": "e2m1", "shared_experts": "fp8-self"},
    "flash-head8": {"base": "nvfp4", "ngram_table": "e2m1", "head": "int8-g128"},
    "flash-planned": {
        "base": "nvfp4", "ngram_table": "e2m1", "shared_experts": "fp8-self", "layout": "overlay",
    },
    "flash-overlay": {
        "base": "nvfp4", "ngram_table": "e2m1", "head": "int8-g128",
        "shared_experts": "fp8-self", "layout": "overlay",
    },
}  # fmt: skip


def make(out: Path, expert_width: int = 256) -> None:
    """Make all trees; the plugin needs more than one scale group of 128 on each GPU."""
    TEXT["moe_intermediate_size"] = expert_width
    weights = random_weights()
    for kind in ("nvfp4", "fp8"):
        write_tree(out / f"flash-{kind}", weights, kind, int4=True)
    write_tree(out / "flash-bf16", weights, "bf16", int4=False)
    work = out / "work"
    work.mkdir()
    for name, choices in BUILT.items():
        base = out / f"flash-{choices['base']}"
        shared = [
            tensor.removesuffix(".weight")
            for tensor in sorted(names_of(base))
            if tensor.startswith(LAYERS) and ".shared_expert." in tensor
        ]
        chosen = {key: value for key, value in choices.items() if key != "base"}
        swap = shared if "shared_experts" in choices else []
        build(plain_plan(base, out / name, swap=swap, **chosen), work)
