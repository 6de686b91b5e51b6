"""Check exact names, dtypes, shapes and scales of a checkpoint before it is loaded."""

# vLLM does not report missing tensors: they leave uninitialized memory, or drafts that are never
# accepted.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from spark_vllm.checkpoint import names
from spark_vllm.checkpoint.headers import (
    INDEX,
    Headers,
    find_scale_problems,
    load_order,
    read_headers,
)
from spark_vllm.checkpoint.names import FP8_WEIGHT, TEXT_LAYERS
from spark_vllm.checkpoint.settings import Settings

# Layers of the same kind have the same modules, and every layer has every expert, so comparing
# layers finds gaps.
WEIGHTS = ("weight", "qweight", FP8_WEIGHT)
"""Tensor suffixes that identify a module."""

BARE = ("A_log", "dt_bias")
"""Tensors without a module."""

EMBEDDING, NORM = "model.language_model.embed_tokens", "model.language_model.norm"
MIXER = "hyper_connection_mixer"
"""Mixes residual streams before the head; Qwen4Exp has it instead of a norm."""
TABLE_MODULES = "ple."
"""Prefix of the modules of n-gram tables, which only the layers in ``ple_layer_ids`` have."""

KINDS = ("linear_attn", "self_attn")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def find_missing_modules(tensors: Iterable[str], layers: int, experts: int) -> Iterator[str]:
    """Yield the missing modules; for a layer without any tensor, yield the layer's prefix."""
    outside, by_layer = _group_modules(tensors)
    if not by_layer:  # the checkpoint uses another naming scheme
        return
    mixer = f"model.language_model.{MIXER}.hc_norm"
    if EMBEDDING not in outside:
        yield EMBEDDING
    if not {NORM, mixer} & outside:
        yield NORM
    yield from (f"{TEXT_LAYERS}{n}." for n in range(layers) if n not in by_layer)
    modules_of_kind: dict[frozenset[str], set[str]] = {}
    for modules in by_layer.values():
        shared = {name for name in modules if not name.startswith(TABLE_MODULES)}
        modules_of_kind.setdefault(_attention_kinds(modules), set()).update(shared)
    for number, modules in sorted(by_layer.items()):
        needed = modules_of_kind[_attention_kinds(modules)] | _expected_experts(modules, experts)
        yield from (f"{TEXT_LAYERS}{number}.{name}" for name in sorted(needed - modules))


def find_wrong_counts(tensors: Iterable[str], layers: int, experts: int) -> Iterator[str]:
    """Report layers and experts that config.json omits, because the engine would skip them."""
    _, by_layer = _group_modules(tensors)
    last = max(by_layer, default=-1)
    if last >= layers:
        yield f"config.json: num_hidden_layers is {layers}, but the tensors have {last + 1} layers"
    numbers = {
        int(name.split(".")[2])
        for modules in by_layer.values()
        for name in modules
        if name.startswith("mlp.experts.") and name.split(".")[2].isdecimal()
    }
    if max(numbers, default=-1) >= experts:
        yield f"config.json: num_experts is {experts}, but the tensors have {len(numbers)} experts"


def _group_modules(tensors: Iterable[str]) -> tuple[set[str], dict[int, set[str]]]:
    """Return the modules outside the text layers, and the modules of each layer."""
    outside: set[str] = set()
    by_layer: dict[int, set[str]] = {}
    for name in tensors:
        parent, _, part = name.rpartition(".")
        module = parent if part in WEIGHTS else name
        if not name.startswith(TEXT_LAYERS):
            outside.add(module)
            continue
        number, _, rest = module.removeprefix(TEXT_LAYERS).partition(".")
        if number.isdecimal():
            layer = by_layer.setdefault(int(number), set())
            if part in WEIGHTS or part in BARE:
                layer.add(rest)
    return outside, by_layer


def _attention_kinds(modules: set[str]) -> frozenset[str]:
    return frozenset(kind for kind in KINDS if any(name.startswith(kind) for name in modules))


def _expected_experts(modules: set[str], experts: int) -> set[str]:
    """Return the modules of a layer's experts, or none if one tensor stores all experts."""
    if not any(name.startswith("mlp.experts.0.") for name in modules):
        return set()
    return {f"mlp.experts.{n}.{part}" for n in range(experts) for part in PROJECTIONS}


MAX_PROBLEMS = 8
"""Maximum number of problems that an error lists; it counts the rest."""

REGEX_CHARACTERS = set(r"*+?^$()[]{}|\\")
"""INC treats a key of extra_config with such a character as a regular expression."""

FLOATS = ("BF16", "F16", "F32")
MTP_LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
MTP_LAYER_PLAIN = ("mlp.gate", "mlp.shared_expert_gate")
MTP_LAYER_LINEAR = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.shared_expert.{part}" for part in PROJECTIONS),
)
MTP_PLAIN = ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
_MIXER_PARTS = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")
MTP_LAYER_STREAMS = (
    "self_attn.q_norm",
    "self_attn.k_norm",
    *(f"self_attn.indexer.{part}" for part in ("index_qk_proj", "q_layernorm", "k_layernorm")),
    *(
        f"{block}_hyper_connection.{part}"
        for block in ("attn", "mlp")
        for part in (*_MIXER_PARTS, "block_inject_weight")
    ),
)
MTP_STREAMS = (
    *("mtp.fc_embedding", "mtp.fc_hidden", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    *(f"mtp.{MIXER}.{part}" for part in _MIXER_PARTS),
)
"""The drafter of Qwen4Exp."""


def check_checkpoint(
    directory: str, settings: Settings, *, layers: int, mtp_layers: int, experts: int
) -> None:
    """Reject a checkpoint that differs from its ``config.json``; ``experts`` is per layer."""
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(
            f"{directory}: not a directory; hybrid checkpoints cannot be loaded from the hub; "
            "fix: pass the directory of a built checkpoint"
        )
    headers = read_headers(path)
    problems = list(_find_header_problems(headers, settings, mtp_layers, experts))
    problems += find_scale_problems(path, headers, settings)
    problems += find_wrong_counts(headers.index, layers, experts)
    problems += [
        f"{INDEX}: lacks {'all tensors below ' if name.endswith('.') else ''}{name}"
        for name in find_missing_modules(headers.index, layers, experts)
    ]
    if problems:
        more = f" (and {len(problems) - MAX_PROBLEMS} more)" if len(problems) > MAX_PROBLEMS else ""
        raise ValueError(
            f"{directory}: the checkpoint does not match config.json: "
            f"{'; '.join(problems[:MAX_PROBLEMS])}{more}; fix: build the checkpoint again"
        )


def _find_header_problems(
    headers: Headers, settings: Settings, mtp_layers: int, experts: int
) -> Iterator[str]:
    yield from headers.problems
    yield from _check_unlisted(headers, settings)
    for module in settings.fp8_modules:
        yield from _check_fp8(headers, settings, module)
    yield from _check_packed(headers, settings)
    yield from _check_head(headers, settings)
    if mtp_layers:
        yield from _check_mtp(headers, settings, mtp_layers, experts)


def _check_unlisted(headers: Headers, settings: Settings) -> Iterator[str]:
    for name, tensor in headers.unlisted.items():
        if name in headers.index:
            if load_order(tensor.file) < load_order(headers.index[name]):
                continue  # The listed tensor replaces it during the load.
            yield f"{tensor.file}: duplicate {name}, which the index lists in {headers.index[name]}"
        # An overlay's files may contain tensors that its rules drop.
        elif names.rename(name, settings.rules) is not None or not settings.overlay:
            yield f"{tensor.file}: {name} is not in {INDEX}"


def _check_fp8(headers: Headers, settings: Settings, module: str) -> Iterator[str]:
    overlay = settings.overlay
    weight = f"{module}.{names.FP8_WEIGHT if overlay else 'weight'}"
    scale = f"{module}.{names.FP8_SCALE if overlay else 'weight_scale_inv'}"
    if overlay:
        for plain in (f"{module}.weight", f"{module}.weight_scale_inv"):
            if plain in headers.index:
                yield f"{INDEX}: lists {plain} in addition to the FP8 weight"
    yield from _check_dtype(headers, weight, ("F8_E4M3",))
    yield from _check_dtype(headers, scale, FLOATS)
    if weight in headers.tensors and scale in headers.tensors:
        shape = headers.tensors[weight].shape
        needed = tuple(
            -(-size // block) for size, block in zip(shape, settings.block_shape, strict=False)
        )
        if len(shape) != 2 or headers.tensors[scale].shape != needed:
            yield (
                f"{scale}: has shape {list(headers.tensors[scale].shape)}, "
                f"but a weight of shape {list(shape)} needs {list(needed)}"
            )


def _check_packed(headers: Headers, settings: Settings) -> Iterator[str]:
    """Check INT4 and INT8 modules, and that INC treats each of them as quantized."""
    for name in headers.tensors:
        module, _, part = name.rpartition(".")
        suffix = names.HEAD_SUFFIX if settings.overlay and module == names.HEAD else ""
        packed = f"{module}.qweight{suffix}"
        if part in (f"scales{suffix}", f"qzeros{suffix}") and packed not in headers.tensors:
            yield f"{module}: has {part}, but lacks qweight"
        if name != packed:
            continue
        bits = _inc_bits(settings, module)
        if bits is None:
            yield (
                f"{module}: is packed, "
                "but is 16-bit according to config.json (block_name_to_quantize)"
            )
            continue
        yield from _check_dtype(headers, name, ("I32",))
        yield from _check_dtype(headers, f"{module}.scales{suffix}", FLOATS)
        yield from _check_dtype(headers, f"{module}.qzeros{suffix}", ("I32",))
        yield from _check_packed_shapes(headers, settings, module, suffix, bits)


def _check_packed_shapes(
    headers: Headers, settings: Settings, module: str, suffix: str, bits: int
) -> Iterator[str]:
    stored = (f"{module}.{part}{suffix}" for part in names.HEAD_PARTS)
    shapes = [headers.tensors[name].shape for name in stored if name in headers.tensors]
    if [len(shape) for shape in shapes] != [2, 2, 2]:
        return
    qweight, scales, qzeros = shapes
    in_features, out_features = scales[0] * settings.group_size, scales[1]
    if qweight != (in_features * bits // 32, out_features):
        mismatch = f"qweight {list(qweight)} does not match {bits}-bit weights with scales"
        yield f"{module}: {mismatch} {list(scales)}"
    if qzeros != (scales[0], out_features * bits // 32):
        yield f"{module}: qzeros {list(qzeros)} does not match scales {list(scales)}"


def _inc_bits(settings: Settings, module: str) -> int | None:
    """Return the bit width that INC uses for ``module``, or ``None`` for 16 bits.

    INC's config parser tries the exact name, then regular expressions, then blocks to quantize.
    """
    entry = settings.extra.get(module)
    if entry is None:
        patterns = (key for key in settings.extra if REGEX_CHARACTERS & set(key))
        pattern = next((key for key in patterns if re.search(key, module)), None)
        entry = settings.extra[pattern] if pattern is not None else None
    is_in_block = any(module.startswith(block) for block in settings.block_names)
    default = settings.bits if is_in_block or module in settings.extra else 16
    bits = int((entry or {}).get("bits", default))
    return None if bits >= 16 else bits


def _check_head(headers: Headers, settings: Settings) -> Iterator[str]:
    if not settings.head_int8:
        yield from _check_dtype(headers, f"{names.HEAD}.weight", FLOATS)
        return
    entry = settings.extra.get(names.HEAD, {})
    if (entry.get("bits"), entry.get("group_size"), entry.get("sym")) != (8, 128, True):
        yield (
            f"config.json: extra_config.lm_head is {dict(entry)}, "
            "but an INT8 head needs bits 8, group_size 128, sym true"
        )
    if f"{names.HEAD}.weight" in headers.index:
        yield f"{INDEX}: lists lm_head.weight in addition to the INT8 head"
    suffix = names.HEAD_SUFFIX if settings.overlay else ""
    yield from _check_dtype(headers, f"{names.HEAD}.qweight{suffix}", ("I32",))


def _check_mtp(
    headers: Headers, settings: Settings, mtp_layers: int, experts: int
) -> Iterator[str]:
    """Check that each drafter module is 16-bit or packed, as config.json requires."""
    has_streams = any(name.startswith(f"mtp.{MIXER}.") for name in headers.index)
    for module in list_mtp_modules(mtp_layers, experts, has_streams):
        packed = f"{module}.qweight" in headers.tensors
        if not packed:
            yield from _check_dtype(headers, f"{module}.weight", FLOATS)
        if not packed and _is_linear(module) and _inc_bits(settings, module) is not None:
            yield f"{module}: is 16-bit, but packed according to block_name_to_quantize"


def _is_linear(module: str) -> bool:
    """Return whether INC quantizes ``module``."""
    return module == "mtp.fc" or module.rpartition(".")[2].endswith("_proj")


@lru_cache(maxsize=4)
def list_mtp_modules(mtp_layers: int, experts: int, has_streams: bool) -> tuple[str, ...]:
    """Return the drafter's modules: ``17 + 3 * experts`` for one layer, with streams 12 more."""
    modules = list(MTP_STREAMS if has_streams else MTP_PLAIN)
    for layer in range(mtp_layers):
        inner: Iterable[str] = (
            *(MTP_LAYER_STREAMS if has_streams else MTP_LAYER_NORMS),
            *MTP_LAYER_PLAIN,
            *MTP_LAYER_LINEAR,
            *(f"mlp.experts.{n}.{part}" for n in range(experts) for part in PROJECTIONS),
        )
        modules += [f"mtp.layers.{layer}.{name}" for name in inner]
    return tuple(modules)


def _check_dtype(headers: Headers, name: str, dtypes: tuple[str, ...]) -> Iterator[str]:
    tensor = headers.tensors.get(name)
    if tensor is None:
        if name not in headers.index:
            yield f"{INDEX}: lacks {name}"
    elif tensor.dtype not in dtypes:
        yield f"{tensor.file}: {name} is {tensor.dtype}, expected {' or '.join(dtypes)}"
