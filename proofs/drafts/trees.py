"""Draft checkpoints: shapes and configuration; trained, random, and with a NaN."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from lab.model import rounding
from lab.model.original import Floats, Shapes
from lab.model.safetensors import write_file
from lab.model.shape import TINY
from proofs.recall import weights

DRAFTS = ("dflash", "eagle3")
TOKENS = 3
"""Drafted at a time."""
SEEN_LAYERS = (0, 2, 3)
"""Of the target, whose outputs a draft sees; the engine counts from the embedding: one more."""
LAYERS = {"dflash": 2, "eagle3": 1}
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 64, 256
THETA, EPSILON = 10000.0, 1e-6
MASK_TOKEN = TINY.vocabulary - 1


def shapes(kind: str) -> Shapes:
    """Return every tensor of a draft; embedding and head are those of its target."""
    hidden = TINY.hidden
    found: Shapes = {"fc.weight": (hidden, len(SEEN_LAYERS) * hidden), "norm.weight": (hidden,)}
    read = hidden if kind == "dflash" else 2 * hidden  # EAGLE-3 has the token beside the state
    for layer in range(LAYERS[kind]):
        prefix = f"layers.{layer}."
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{prefix}self_attn.{part}_proj.weight"] = (heads * HEAD_DIM, read)
        found[f"{prefix}self_attn.o_proj.weight"] = (hidden, HEADS * HEAD_DIM)
        for part in ("gate_proj", "up_proj"):
            found[f"{prefix}mlp.{part}.weight"] = (WIDTH, hidden)
        found[f"{prefix}mlp.down_proj.weight"] = (hidden, WIDTH)
        for part in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{part}.weight"] = (hidden,)
        if kind == "dflash":
            for part in ("q_norm", "k_norm"):
                found[f"{prefix}self_attn.{part}.weight"] = (HEAD_DIM,)
    found["hidden_norm.weight" if kind == "dflash" else "layers.0.hidden_norm.weight"] = (hidden,)
    return found


def config(kind: str) -> dict[str, Any]:
    common = {
        "dtype": "bfloat16",
        "hidden_size": TINY.hidden,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS[kind],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "max_position_embeddings": TINY.max_positions,
        "rope_theta": THETA,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": TINY.vocabulary,
    }
    if kind == "dflash":
        own = {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(SEEN_LAYERS)}
        return common | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_target_layers": TINY.layers,
            "block_size": TOKENS + 1,
            "dflash_config": own,
        }
    seen = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in SEEN_LAYERS]}
    return common | {
        **seen,  # one of the engine's two runners looks here, the other one below
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": TINY.vocabulary,
        "mlp_bias": False,
        "eagle_config": {**seen, "use_aux_hidden_state": True},
    }


HERE = Path(__file__).parent
RANDOM_SEED = 7
SPOILT_TENSOR = "norm.weight"
"""A norm: matrices are packed away by the engine's CPU build before the plugin can look at them."""


def make_drafts(out: Path, target: Path) -> None:
    for kind in DRAFTS:
        found = trained(kind)
        write(out / f"tiny-{kind}", kind, target, found)
        write(out / f"tiny-{kind}-random", kind, target, untrained(kind))
        spoilt = found | {SPOILT_TENSOR: found[SPOILT_TENSOR].copy()}
        spoilt[SPOILT_TENSOR][3] = np.nan
        write(out / f"tiny-{kind}-nan", kind, target, spoilt)


def trained(kind: str, directory: Path = HERE) -> dict[str, Floats]:
    """Return the weights that lie below this directory.

    Raises:
        ValueError: They are those of another draft than the one described.
    """
    found = weights.read(directory / kind)
    sizes = {name: values.shape for name, values in found.items()}
    if sizes != shapes(kind):
        other = sorted(set(sizes.items()) ^ set(shapes(kind).items()))[:3]
        raise ValueError(f"the stored {kind} draft is another: {other}")
    return found


def untrained(kind: str) -> dict[str, Floats]:
    """Return random weights of the same shapes."""
    source = np.random.default_rng(RANDOM_SEED)
    return {
        name: np.ones(size, np.float32)
        if "norm" in name
        else source.normal(0, 0.02, size).astype(np.float32)
        for name, size in shapes(kind).items()
    }


def write(out: Path, kind: str, target: Path, tensors: dict[str, Floats]) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config(kind), indent=1))
    write_file(
        out / "model.safetensors", {name: rounding.bf16(part) for name, part in tensors.items()}
    )
    for path in target.glob("*token*"):
        shutil.copy(path, out)
