"""Damaged copies of checkpoints with correct names, types and shapes.

``make_visible`` damages numbers and counts, so the engine must reject them. ``make_plausible``
makes damage that no distribution reveals, for the questions of the start check.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from proofs.trees.build import damaged, edit_json, names_of, rewrite, stored_bytes

LAYER = "model.language_model.layers.{}."
UP = LAYER.format(1) + "mlp.shared_expert.up_proj.weight"
OUT = LAYER.format(0) + "linear_attn.out_proj.scales"
"""FP16; the other scales are BF16."""
HEAD_SCALES = "lm_head.scales_int8"
TRAINED = {
    "intact": "nothing changed",
    "scale-4": "the scales of an FP8 module times 4",
    "scale-4-everywhere": "the scales of all FP8 modules times 4",
    "swapped": "gate and up of a shared expert swapped",
    "swapped-everywhere": "gate and up of all experts swapped",
    "inverted": "the INT4 words of an expert inverted",
    "inverted-layer": "the INT4 words of all experts of a layer inverted",
    "inverted-everywhere": "the INT4 words of all experts inverted",
    "one-expert-a-token": "num_experts_per_tok 1 instead of 2",
}
"""Damages of the trained model, each a tree ``tiny-full-head8-NAME``."""


def make_visible(full: Path, overlay_head8: Path) -> Iterator[Path]:
    starts = {
        "nan-fp8-weight": (UP, b"\x7f"),
        "nan-fp8-scale": (f"{UP}_scale_inv", b"\xc0\x7f"),
        "negative-fp8-scale": (f"{UP}_scale_inv", b"\x3a\xc6"),
        "nan-int4-scale": (OUT, b"\x00\x7e"),
    }
    for name, (tensor, start) in starts.items():
        yield _change(full, name, [tensor], lambda data, start=start: start + data[len(start) :])
    powers = {
        "fp8-block-512": (f"{UP}_scale_inv", 9, 1),
        "fp8-block-tiny": (f"{UP}_scale_inv", -20, 1),
        "fp8-module-512": (f"{UP}_scale_inv", 9, None),
        "fp8-module-tiny": (f"{UP}_scale_inv", -20, None),
        "int4-group-512": (OUT, 9, 1),
        "int4-module-512": (OUT, 9, None),
        "int4-module-tiny": (OUT, -5, None),
    }
    for name, (tensor, power, count) in powers.items():
        yield _change(full, name, [tensor], _shift(power, count, half=tensor == OUT))
    start = b"\xc0\x7f"
    yield _change(overlay_head8, "nan-head-scale", [HEAD_SCALES], lambda data: start + data[2:])
    yield _change(overlay_head8, "head-group-512", [HEAD_SCALES], _shift(9, 1))
    yield _change(overlay_head8, "head-512", [HEAD_SCALES], _shift(9))
    yield _configure(full, "fewer-layers", num_hidden_layers=3)
    yield _configure(full, "fewer-experts", num_experts=4)


def make_plausible(tiny: Path) -> Iterator[Path]:
    names = names_of(tiny)
    fp8 = sorted(name for name in names if name.endswith("proj.weight_scale_inv"))
    words = sorted(name for name in names if ".mlp.experts." in name and name.endswith(".qweight"))
    words = [name for name in words if not name.startswith("mtp.")]
    layer = [name for name in words if name.startswith(LAYER.format(1))]
    gates = sorted(name for name in names if ".gate_proj." in name and not name.startswith("mtp."))
    shared = [name for name in gates if name.startswith(LAYER.format(1) + "mlp.shared_expert.")]
    yield _change(tiny, "intact", [], bytes)
    yield _change(tiny, "scale-4", fp8[:1], _shift(2))
    yield _change(tiny, "scale-4-everywhere", fp8, _shift(2))
    yield _swap(tiny, "swapped", shared)
    yield _swap(tiny, "swapped-everywhere", gates)
    expert = [name for name in layer if ".experts.0." in name]
    yield _change(tiny, "inverted", expert, _invert)
    yield _change(tiny, "inverted-layer", layer, _invert)
    yield _change(tiny, "inverted-everywhere", words, _invert)
    yield _configure(tiny, "one-expert-a-token", num_experts_per_tok=1)


def _change(
    good: Path, name: str, tensors: Iterable[str], change: Callable[[bytes], bytes]
) -> Path:
    tree = damaged(good, name)
    for tensor in tensors:
        rewrite(tree, tensor, change(stored_bytes(tree, tensor)))
    return tree


def _shift(power: int, count: int | None = None, *, half: bool = False) -> Any:
    """Return a change that multiplies the first ``count`` numbers by two to the ``power``."""

    def shift(data: bytes) -> bytes:
        bits = np.frombuffer(data, "<u2").astype(np.int32)
        bits[:count] += power << (10 if half else 7)  # the exponent of FP16 or BF16
        return bits.astype("<u2").tobytes()

    return shift


def _invert(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data)


def _swap(good: Path, name: str, gates: list[str]) -> Path:
    tree = damaged(good, name)
    for gate in gates:
        up = gate.replace(".gate_proj.", ".up_proj.")
        first, second = stored_bytes(tree, gate), stored_bytes(tree, up)
        rewrite(tree, gate, second)
        rewrite(tree, up, first)
    return tree


def _configure(good: Path, name: str, **numbers: int) -> Path:
    tree = damaged(good, name)
    edit_json(tree / "config.json", lambda config: _set(config["text_config"], numbers))
    return tree


def _set(text: dict[str, Any], numbers: dict[str, int]) -> None:
    if not numbers.keys() <= text.keys():
        raise ValueError(f"text_config lacks {sorted(numbers)}")
    text.update(numbers)
    text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
