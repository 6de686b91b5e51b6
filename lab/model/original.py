"""Names and shapes of the unquantized model, and the weights that both repositories round."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lab.model.shape import Shape

LAYERS = "model.language_model.layers"
FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")  # other unquantized tensors are BF16

Floats = npt.NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]


def _mlp(shape: Shape, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate.weight", (shape.experts, shape.hidden)
    for expert in range(shape.experts):
        for part in ("gate_proj", "up_proj"):
            yield f"{prefix}.experts.{expert}.{part}.weight", (shape.expert_width, shape.hidden)
        yield f"{prefix}.experts.{expert}.down_proj.weight", (shape.hidden, shape.expert_width)
    for part in ("gate_proj", "up_proj"):
        yield f"{prefix}.shared_expert.{part}.weight", (shape.shared_width, shape.hidden)
    yield f"{prefix}.shared_expert.down_proj.weight", (shape.hidden, shape.shared_width)
    yield f"{prefix}.shared_expert_gate.weight", (1, shape.hidden)


def _attention(shape: Shape, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    yield f"{prefix}.q_proj.weight", (2 * width, shape.hidden)  # queries and their gates
    yield f"{prefix}.k_proj.weight", (kv_width, shape.hidden)
    yield f"{prefix}.v_proj.weight", (kv_width, shape.hidden)
    yield f"{prefix}.o_proj.weight", (shape.hidden, width)
    yield f"{prefix}.q_norm.weight", (shape.head_dim,)
    yield f"{prefix}.k_norm.weight", (shape.head_dim,)


def _linear_attention(shape: Shape, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    mixed = 2 * shape.key_dim + shape.value_dim
    yield f"{prefix}.in_proj_qkv.weight", (mixed, shape.hidden)
    yield f"{prefix}.in_proj_z.weight", (shape.value_dim, shape.hidden)
    yield f"{prefix}.in_proj_a.weight", (shape.linear_value_heads, shape.hidden)
    yield f"{prefix}.in_proj_b.weight", (shape.linear_value_heads, shape.hidden)
    yield f"{prefix}.out_proj.weight", (shape.hidden, shape.value_dim)
    yield f"{prefix}.A_log", (shape.linear_value_heads,)
    yield f"{prefix}.dt_bias", (shape.linear_value_heads,)
    yield f"{prefix}.conv1d.weight", (mixed, 1, shape.conv_kernel)
    yield f"{prefix}.norm.weight", (shape.linear_head_dim,)


def _norms(shape: Shape, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)


def _affine(name: str, *size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", size
    yield f"{name}.bias", size[:1]


def _vision(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = shape.vision_hidden, shape.vision_width
    patch = (hidden, 3, shape.temporal_patch, shape.patch, shape.patch)
    yield from _affine("model.visual.patch_embed.proj", *patch)
    yield "model.visual.pos_embed.weight", (shape.vision_positions, hidden)
    for block in range(shape.vision_depth):
        prefix = f"model.visual.blocks.{block}"
        yield from _affine(f"{prefix}.norm1", hidden)
        yield from _affine(f"{prefix}.norm2", hidden)
        yield from _affine(f"{prefix}.attn.qkv", 3 * hidden, hidden)
        yield from _affine(f"{prefix}.attn.proj", hidden, hidden)
        yield from _affine(f"{prefix}.mlp.linear_fc1", width, hidden)
        yield from _affine(f"{prefix}.mlp.linear_fc2", hidden, width)
    merged = hidden * shape.merge**2
    yield from _affine("model.visual.merger.norm", hidden)
    yield from _affine("model.visual.merger.linear_fc1", merged, merged)
    yield from _affine("model.visual.merger.linear_fc2", shape.hidden, merged)


def main_shapes(shape: Shape) -> Shapes:
    shapes: Shapes = {"model.language_model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"{LAYERS}.{layer}"
        if shape.is_attention(layer):
            shapes.update(_attention(shape, f"{prefix}.self_attn"))
        else:
            shapes.update(_linear_attention(shape, f"{prefix}.linear_attn"))
        shapes.update(_mlp(shape, f"{prefix}.mlp"))
        shapes.update(_norms(shape, prefix))
    shapes["model.language_model.norm.weight"] = (shape.hidden,)
    shapes.update(_vision(shape))
    shapes["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return shapes


def mtp_shapes(shape: Shape) -> Shapes:
    shapes: Shapes = {"mtp.fc.weight": (shape.hidden, 2 * shape.hidden)}
    shapes.update(_attention(shape, "mtp.layers.0.self_attn"))
    shapes.update(_mlp(shape, "mtp.layers.0.mlp"))
    shapes.update(_norms(shape, "mtp.layers.0"))
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{norm}.weight"] = (shape.hidden,)
    return shapes


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight") or ".linear_attn.in_proj_" in name


def is_int4(name: str) -> bool:
    """The INT4 base quantizes every projection except the shared experts'."""
    return name.startswith(LAYERS) and is_projection(name) and ".shared_expert." not in name


def is_fp8(name: str) -> bool:
    """The FP8 donor quantizes every projection except two narrow projections."""
    if not name.startswith((LAYERS, "mtp.layers.")):
        return False
    return is_projection(name) and not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))


def random_weights(shape: Shape, seed: int) -> dict[str, Floats]:
    source = np.random.default_rng(seed)
    weights: dict[str, Floats] = {}
    for name, size in {**main_shapes(shape), **mtp_shapes(shape)}.items():
        weights[name] = initial(source, name, size)
    return weights


def initial(source: np.random.Generator, name: str, size: tuple[int, ...]) -> Floats:
    if name.endswith("A_log"):
        values = np.log(source.uniform(1.0, 16.0, size))
    elif name.endswith(("dt_bias", "linear_attn.norm.weight")):
        values = np.ones(size)
    elif name.startswith("model.visual.") and len(size) == 1:
        values = np.ones(size) if ".norm" in name and "weight" in name else np.zeros(size)
    elif len(size) == 1:
        values = np.zeros(size)  # other norms of this architecture are stored minus one
    else:
        values = source.normal(0.0, 0.02, size)
    return values.astype(np.float32)
