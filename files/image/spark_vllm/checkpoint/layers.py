"""Which modules of the text layers a checkpoint lacks: pure functions over tensor names.

The engine asks nobody whether every parameter of a quantised model was filled: a norm or an expert
that is in no file stays random memory. Layers of one kind hold the same modules, and every layer
holds every expert, so a gap shows by comparing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spark_vllm.checkpoint.names import FP8_WEIGHT, TEXT_LAYERS

WEIGHTS = ("weight", "qweight", FP8_WEIGHT)
"""Last part of the name that says a module is there."""

BARE = ("A_log", "dt_bias")
"""Tensors that belong to no module of their own."""

OUTSIDE_LAYERS = ("model.language_model.embed_tokens", "model.language_model.norm")
KINDS = ("linear_attn", "self_attn")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def missing_modules(tensors: Iterable[str], layers: int, experts: int) -> Iterator[str]:
    """Yield the modules that are missing, a layer without any tensor as its prefix.

    Args:
        tensors: names in the checkpoint, in its own spelling.
        layers: layers of the text model.
        experts: routed experts of each layer.
    """
    outside, inner = _modules(tensors)
    if not inner:  # another family of names: nothing is known of it
        return
    yield from (name for name in OUTSIDE_LAYERS if name not in outside)
    yield from (f"{TEXT_LAYERS}{n}." for n in range(layers) if n not in inner)
    wanted: dict[frozenset[str], set[str]] = {}
    for modules in inner.values():
        wanted.setdefault(_kind(modules), set()).update(modules)
    for number, modules in sorted(inner.items()):
        needed = wanted[_kind(modules)] | _experts(modules, experts)
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
            found = inner.setdefault(int(number), set())
            if part in WEIGHTS or part in BARE:
                found.add(rest)
    return outside, inner


def _kind(modules: set[str]) -> frozenset[str]:
    """Return what tells apart layers that hold different modules."""
    return frozenset(kind for kind in KINDS if any(name.startswith(kind) for name in modules))


def _experts(modules: set[str], experts: int) -> set[str]:
    """Return the experts a layer needs; none where they lie in one tensor."""
    if not any(name.startswith("mlp.experts.0.") for name in modules):
        return set()
    return {f"mlp.experts.{n}.{part}" for n in range(experts) for part in PROJECTIONS}
