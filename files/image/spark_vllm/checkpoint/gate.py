"""Check exact names, dtypes, shapes and scales of a checkpoint before it is loaded."""

# vLLM reports none of this: a missing block scale or shard of a fused module leaves uninitialised
# memory, and a missing drafter tensor gives drafts that are never accepted.

from __future__ import annotations

import math
import re
import statistics
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from spark_vllm.checkpoint import names
from spark_vllm.checkpoint.headers import INDEX, Tensor, Tree, read_tree
from spark_vllm.checkpoint.names import FP8_WEIGHT, TEXT_LAYERS
from spark_vllm.checkpoint.settings import Settings

# vLLM does not check that every parameter of a quantised model is filled. Layers of one kind have
# the same modules and every layer has every expert, so comparing layers finds gaps.


WEIGHTS = ("weight", "qweight", FP8_WEIGHT)
"""Tensor suffixes that identify a module."""

BARE = ("A_log", "dt_bias")
"""Tensors without a module."""

OUTSIDE_LAYERS = ("model.language_model.embed_tokens", "model.language_model.norm")
KINDS = ("linear_attn", "self_attn")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def missing_modules(tensors: Iterable[str], layers: int, experts: int) -> Iterator[str]:
    """Yield missing modules; for a layer without any tensor, the layer prefix.

    Args:
        tensors: names as stored in the checkpoint.
        layers: layers of the text model.
        experts: routed experts of each layer.
    """
    outside, inner = _modules(tensors)
    if not inner:  # another naming scheme: cannot be compared
        return
    yield from (name for name in OUTSIDE_LAYERS if name not in outside)
    yield from (f"{TEXT_LAYERS}{n}." for n in range(layers) if n not in inner)
    modules_of_kind: dict[frozenset[str], set[str]] = {}
    for modules in inner.values():
        modules_of_kind.setdefault(_kind(modules), set()).update(modules)
    for number, modules in sorted(inner.items()):
        needed = modules_of_kind[_kind(modules)] | _experts(modules, experts)
        yield from (f"{TEXT_LAYERS}{number}.{name}" for name in sorted(needed - modules))


def _modules(tensors: Iterable[str]) -> tuple[set[str], dict[int, set[str]]]:
    """Return the modules outside the text layers, and those of each layer."""
    outside: set[str] = set()
    inner: dict[int, set[str]] = {}
    for name in tensors:
        parent, _, part = name.rpartition(".")
        module = parent if part in WEIGHTS else name
        if not name.startswith(TEXT_LAYERS):
            outside.add(module)
            continue
        number, _, rest = module.removeprefix(TEXT_LAYERS).partition(".")
        if number.isdecimal():
            layer = inner.setdefault(int(number), set())
            if part in WEIGHTS or part in BARE:
                layer.add(rest)
    return outside, inner


def _kind(modules: set[str]) -> frozenset[str]:
    return frozenset(kind for kind in KINDS if any(name.startswith(kind) for name in modules))


def _experts(modules: set[str], experts: int) -> set[str]:
    """Return the experts that a layer needs; empty if a single tensor stores them all."""
    if not any(name.startswith("mlp.experts.0.") for name in modules):
        return set()
    return {f"mlp.experts.{n}.{part}" for n in range(experts) for part in PROJECTIONS}


# A negative FP8 scale inverts a block, a far too large scale drowns all other weights; both are
# finite.
# INT4 scales are excluded: symmetric AutoRound writes negative scales for half of the groups.


OUTSIDE = 1000
"""Largest accepted ratio of a block scale to the median of the module."""

_FORMATS = {"F16": "e", "F32": "f"}


def scale_problems(directory: Path, tree: Tree, settings: Settings) -> Iterator[str]:
    """Yield FP8 modules with invalid or outlier scales."""
    weight_part = names.FP8_WEIGHT if settings.overlay else "weight"
    scale_part = names.FP8_SCALE if settings.overlay else "weight_scale_inv"
    for module in settings.fp8_modules:
        scale = tree.tensors.get(f"{module}.{scale_part}")
        weight = tree.tensors.get(f"{module}.{weight_part}")
        if scale and weight and len(scale.shape) == len(weight.shape) == 2:
            problem = _problem(directory, weight, scale, settings.block_shape)
            if problem:
                yield f"{scale.file}: {module}.{scale_part}: {problem}"


def _problem(directory: Path, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> str | None:
    values = _floats(directory, scale)
    bad = [value for value in values if not (math.isfinite(value) and value > 0)]
    if bad:
        return f"{len(bad)} of {len(values)} block scales are not above zero, such as {bad[0]:g}"
    most = OUTSIDE * statistics.median(values)
    columns = scale.shape[1]
    for place, value in enumerate(values):
        # A block of zeros may have any scale.
        if value > most and _has_weights(directory, weight, divmod(place, columns), block):
            return f"scale {value:g} is over {OUTSIDE} times the median of the module"
    return None


def _floats(directory: Path, tensor: Tensor) -> list[float]:
    data = _read(directory, tensor, 0, tensor.size_bytes)
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    code = _FORMATS.get(tensor.dtype, "f")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _has_weights(
    directory: Path, weight: Tensor, at: tuple[int, int], block: tuple[int, int]
) -> bool:
    rows, columns = weight.shape
    first, left = at[0] * block[0], at[1] * block[1]
    width = min(block[1], columns - left)
    lines = (
        _read(directory, weight, row * columns + left, width)
        for row in range(first, min(first + block[0], rows))
    )
    return any(code & 0x7F for line in lines for code in line)


def _read(directory: Path, tensor: Tensor, start: int, length: int) -> bytes:
    with (directory / tensor.file).open("rb") as stream:
        stream.seek(tensor.start_bytes + start)
        return stream.read(length)


SHOWN = 8
"""Problems listed in an error; the rest is counted."""

REGEX_CHARACTERS = set(r"*+?^$()[]{}|\\")
"""INC treats keys of extra_config with such a character as regular expressions."""

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
    *(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
)
MTP_PLAIN = ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")


def check_checkpoint(
    directory: str, settings: Settings, *, layers: int, mtp_layers: int, experts: int
) -> None:
    """Refuse a checkpoint that differs from its ``config.json``.

    Args:
        directory: the checkpoint, a directory of this host.
        settings: formats from ``config.json``.
        layers: layers of the text model.
        mtp_layers: drafter layers the model has; 0 when it has none.
        experts: routed experts per layer.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(
            f"{directory}: not a directory; fix: give the directory of a built checkpoint, "
            "hybrid checkpoints are not loaded from the hub"
        )
    tree = read_tree(path)
    problems = list(_tree_problems(tree, settings, mtp_layers, experts))
    problems += scale_problems(path, tree, settings)
    problems += [
        f"{INDEX}: no {'tensor below ' if name.endswith('.') else ''}{name}"
        for name in missing_modules(tree.index, layers, experts)
    ]
    if problems:
        more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
        raise ValueError(
            f"{directory}: the checkpoint does not match config.json: "
            f"{'; '.join(problems[:SHOWN])}{more}; fix: build the checkpoint again"
        )


def _tree_problems(tree: Tree, settings: Settings, mtp_layers: int, experts: int) -> Iterator[str]:
    yield from tree.problems
    yield from _stray_problems(tree, settings)
    for module in settings.fp8_modules:
        yield from _fp8_problems(tree, settings, module)
    yield from _packed_problems(tree, settings)
    yield from _head_problems(tree, settings)
    if mtp_layers:
        yield from _mtp_problems(tree, settings, mtp_layers, experts)


def _stray_problems(tree: Tree, settings: Settings) -> Iterator[str]:
    for name, tensor in tree.unlisted.items():
        if name in tree.index:
            yield f"{tensor.file}: duplicate {name}, the index lists {tree.index[name]}"
        elif names.rename(name, settings.rules) is not None or not settings.overlay:
            yield f"{tensor.file}: {name} is not in {INDEX}"


def _fp8_problems(tree: Tree, settings: Settings, module: str) -> Iterator[str]:
    overlay = settings.overlay
    weight = f"{module}.{names.FP8_WEIGHT if overlay else 'weight'}"
    scale = f"{module}.{names.FP8_SCALE if overlay else 'weight_scale_inv'}"
    if overlay:
        for plain in (f"{module}.weight", f"{module}.weight_scale_inv"):
            if plain in tree.index:
                yield f"{INDEX}: lists {plain} in addition to the FP8 form"
    yield from _expect(tree, weight, ("F8_E4M3",))
    yield from _expect(tree, scale, FLOATS)
    if weight in tree.tensors and scale in tree.tensors:
        shape = tree.tensors[weight].shape
        needed = tuple(
            -(-size // block) for size, block in zip(shape, settings.block_shape, strict=False)
        )
        if len(shape) != 2 or tree.tensors[scale].shape != needed:
            yield (
                f"{scale}: shape {list(tree.tensors[scale].shape)}, "
                f"the weight {list(shape)} needs {list(needed)}"
            )


def _packed_problems(tree: Tree, settings: Settings) -> Iterator[str]:
    """INT4 and INT8 modules: all three tensors, fitting shapes, and known to INC as quantised."""
    suffix = names.HEAD_SUFFIX if settings.overlay else ""
    for name in tree.tensors:
        module, _, part = name.rpartition(".")
        end = suffix if module == names.HEAD else ""
        packed = f"{module}.qweight{end}"
        if part in (f"scales{end}", f"qzeros{end}") and packed not in tree.tensors:
            yield f"{module}: {part} without qweight"
        if name != packed:
            continue
        bits = _bits(settings, module)
        if bits is None:
            yield f"{module}: packed, but 16-bit according to config.json (block_name_to_quantize)"
            continue
        yield from _expect(tree, name, ("I32",))
        yield from _expect(tree, f"{module}.scales{end}", FLOATS)
        yield from _expect(tree, f"{module}.qzeros{end}", ("I32",))
        yield from _packed_shapes(tree, settings, module, end, bits)


def _packed_shapes(
    tree: Tree, settings: Settings, module: str, end: str, bits: int
) -> Iterator[str]:
    stored = (f"{module}.{part}{end}" for part in names.HEAD_PARTS)
    shapes = [tree.tensors[name].shape for name in stored if name in tree.tensors]
    if [len(shape) for shape in shapes] != [2, 2, 2]:
        return
    qweight, scales, qzeros = shapes
    in_features, out_features = scales[0] * settings.group_size, scales[1]
    if qweight != (in_features * bits // 32, out_features):
        yield f"{module}: qweight {list(qweight)} is no {bits}-bit weight of scales {list(scales)}"
    if qzeros != (scales[0], out_features * bits // 32):
        yield f"{module}: qzeros {list(qzeros)} does not fit scales {list(scales)}"


def _bits(settings: Settings, module: str) -> int | None:
    """Return the width INC will use for ``module``; ``None`` when it stays at 16 bits.

    As INC's config parser does it: the exact name, then a key that is a regular expression, then
    the blocks to quantise.
    """
    entry = settings.extra.get(module)
    if entry is None:
        patterns = (key for key in settings.extra if REGEX_CHARACTERS & set(key))
        pattern = next((key for key in patterns if re.search(key, module)), None)
        entry = settings.extra[pattern] if pattern is not None else None
    below = any(module.startswith(block) for block in settings.block_names)
    default = settings.bits if below or module in settings.extra else 16
    bits = int((entry or {}).get("bits", default))
    return None if bits >= 16 else bits


def _head_problems(tree: Tree, settings: Settings) -> Iterator[str]:
    if not settings.head_int8:
        yield from _expect(tree, f"{names.HEAD}.weight", FLOATS)
        return
    entry = settings.extra.get(names.HEAD, {})
    if (entry.get("bits"), entry.get("group_size"), entry.get("sym")) != (8, 128, True):
        yield (
            f"config.json: extra_config.lm_head is {dict(entry)}, "
            "an INT8 head needs bits 8, group_size 128, sym true"
        )
    if f"{names.HEAD}.weight" in tree.index:
        yield f"{INDEX}: lists lm_head.weight in addition to the INT8 head"
    end = names.HEAD_SUFFIX if settings.overlay else ""
    yield from _expect(tree, f"{names.HEAD}.qweight{end}", ("I32",))


def _mtp_problems(tree: Tree, settings: Settings, mtp_layers: int, experts: int) -> Iterator[str]:
    """Every drafter tensor, in the form config.json gives it: 16-bit or packed."""
    for module in mtp_modules(mtp_layers, experts):
        packed = f"{module}.qweight" in tree.tensors
        if not packed:
            yield from _expect(tree, f"{module}.weight", FLOATS)
        if not packed and _is_linear(module) and _bits(settings, module) is not None:
            yield f"{module}: 16-bit, but block_name_to_quantize makes the engine expect it packed"


def _is_linear(module: str) -> bool:
    """Return whether INC quantises ``module``; router, gates and norms stay 16-bit."""
    return module == "mtp.fc" or module.rpartition(".")[2].endswith("_proj")


@lru_cache(maxsize=4)
def mtp_modules(mtp_layers: int, experts: int) -> tuple[str, ...]:
    """Return the checkpoint modules of the drafter: ``17 + 3 * experts`` per layer."""
    modules = list(MTP_PLAIN)
    for layer in range(mtp_layers):
        inner: Iterable[str] = (
            *MTP_LAYER_NORMS,
            *MTP_LAYER_PLAIN,
            *MTP_LAYER_LINEAR,
            *(f"mlp.experts.{n}.{p}_proj" for n in range(experts) for p in ("gate", "up", "down")),
        )
        modules += [f"mtp.layers.{layer}.{name}" for name in inner]
    return tuple(modules)


def _expect(tree: Tree, name: str, dtypes: tuple[str, ...]) -> Iterator[str]:
    tensor = tree.tensors.get(name)
    if tensor is None:
        if name not in tree.index:
            yield f"{INDEX}: no {name}"
    elif tensor.dtype not in dtypes:
        yield f"{tensor.file}: {name} is {tensor.dtype}, not {' or '.join(dtypes)}"
