"""Draft models for the lab's trained model, engine runs with them, and their judge.

The weights in this folder were trained by ``proofs/drafts/training.py``, last contained in commit
59da1928. After `make lab-model`, restore it from there and train them again.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from lab.model import rounding
from lab.model.original import Floats, Shapes
from lab.model.safetensors import write_file
from lab.model.shape import TINY
from proofs.engine.cases import case, graphs
from proofs.judges.answers import Row, attempt, judge_same_answers, row
from proofs.recall.trees import load

DRAFTS = ("dflash", "eagle3")
TOKENS = 3
SEEN_LAYERS = (0, 2, 3)
"""Layers of the target that a draft reads; the engine numbers them from the embedding (+1)."""
LAYERS = {"dflash": 2, "eagle3": 1}
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 64, 256
THETA, EPSILON = 10000.0, 1e-6
MASK_TOKEN = TINY.vocabulary - 1


def shapes(kind: str) -> Shapes:
    hidden = TINY.hidden
    tensors: Shapes = {"fc.weight": (hidden, len(SEEN_LAYERS) * hidden), "norm.weight": (hidden,)}
    read = hidden if kind == "dflash" else 2 * hidden
    for layer in range(LAYERS[kind]):
        prefix = f"layers.{layer}."
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = (heads * HEAD_DIM, read)
        tensors[f"{prefix}self_attn.o_proj.weight"] = (hidden, HEADS * HEAD_DIM)
        for part in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{part}.weight"] = (WIDTH, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = (hidden, WIDTH)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{part}.weight"] = (hidden,)
        if kind == "dflash":
            for part in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{part}.weight"] = (HEAD_DIM,)
    tensors["hidden_norm.weight" if kind == "dflash" else "layers.0.hidden_norm.weight"] = (hidden,)
    return tensors


def config_of(kind: str) -> dict[str, Any]:
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
        **seen,  # read by one of the engine's two runners; the other reads eagle_config
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": TINY.vocabulary,
        "mlp_bias": False,
        "eagle_config": {**seen, "use_aux_hidden_state": True},
    }


HERE = Path(__file__).parent
RANDOM_SEED = 7
SPOILT_TENSOR = "norm.weight"
"""A norm: the engine's CPU build packs matrices before the plugin can check them."""


def make_drafts(out: Path, target: Path) -> None:
    for kind in DRAFTS:
        tensors = trained(kind)
        write_tree(out / f"tiny-{kind}", kind, target, tensors)
        write_tree(out / f"tiny-{kind}-random", kind, target, untrained(kind))
        spoilt = tensors | {SPOILT_TENSOR: tensors[SPOILT_TENSOR].copy()}
        spoilt[SPOILT_TENSOR][3] = np.nan
        write_tree(out / f"tiny-{kind}-nan", kind, target, spoilt)


def trained(kind: str) -> dict[str, Floats]:
    """Return stored weights; raises ValueError if shapes differ from the described draft."""
    tensors = load(HERE / kind)
    sizes = {name: values.shape for name, values in tensors.items()}
    if sizes != shapes(kind):
        other = sorted(set(sizes.items()) ^ set(shapes(kind).items()))[:3]
        raise ValueError(f"the stored {kind} draft is another: {other}")
    return tensors


def untrained(kind: str) -> dict[str, Floats]:
    source = np.random.default_rng(RANDOM_SEED)
    return {
        name: np.ones(size, np.float32)
        if "norm" in name
        else source.normal(0, 0.02, size).astype(np.float32)
        for name, size in shapes(kind).items()
    }


def write_tree(out: Path, kind: str, target: Path, tensors: dict[str, Floats]) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config_of(kind), indent=1))
    write_file(
        out / "model.safetensors", {name: rounding.bf16(part) for name, part in tensors.items()}
    )
    for path in target.glob("*token*"):
        shutil.copy(path, out)


TREE = "tiny-overlay-head8"
PLAIN = "tiny-head8"
QUIET = {"capture": False}
RANDOM, SPOILT = "-random-eager", "-nan-eager"
Cases = list[dict[str, Any]]


def gpu_cases() -> Cases:
    cases = []
    for kind in DRAFTS:
        cases += [
            _case(f"{kind}-eager", kind, f"tiny-{kind}"),
            _case(f"{kind}-full", kind, f"tiny-{kind}", **graphs("FULL_AND_PIECEWISE")),
        ]
    return [*cases, _random("dflash")]


def cpu_cases(portable: dict[str, Any]) -> Cases:
    more = {**portable, "draft_load_config": {"load_format": "safetensors"}}
    cases = [case(PLAIN, TREE, options=portable, **QUIET)]
    for kind in DRAFTS:
        cases += [_case(f"{kind}-eager", kind, f"tiny-{kind}", **more), _random(kind, **more)]
    return [*cases, _case(f"dflash{SPOILT}", "dflash", "tiny-dflash-nan", **more)]


def _random(kind: str, **more: Any) -> dict[str, Any]:
    return _case(f"{kind}{RANDOM}", kind, f"tiny-{kind}-random", **more)


def _case(name: str, kind: str, draft: str, **options: Any) -> dict[str, Any]:
    speculation = {"method": kind, "model": draft, "num_speculative_tokens": TOKENS}
    if "draft_load_config" in options:
        speculation["draft_load_config"] = options.pop("draft_load_config")
    return case(name, TREE, options={"speculative_config": speculation, **options}, **QUIET)


LEAST = 0.5
"""Least acceptance of a trained draft; the last drafts of an answer exceed the end."""
MAX_BY_CHANCE = 0.05


def judge_drafts(results: dict[str, Row], cases: Cases) -> list[Row]:
    names = [case["name"] for case in cases if case["name"] != PLAIN]
    return [attempt(name, judge_run, results, name) for name in names]


def judge_run(results: dict[str, Row], name: str) -> Row:
    if name.endswith(SPOILT):
        return _refused(results[name], name)
    claim = f"more than {LEAST} of the drafts are accepted"
    if name.endswith(RANDOM):
        claim = f"at most {MAX_BY_CHANCE} of the drafts are accepted"

    def accepts(share: float | None) -> bool:
        if share is None:
            return False
        return share < MAX_BY_CHANCE if name.endswith(RANDOM) else share > LEAST

    claim = f"greedy answers equal {PLAIN} outside ties, {claim}"
    return judge_same_answers(results, name, PLAIN, claim, accepts=accepts)


def _refused(result: Row, name: str) -> Row:
    error = str(result.get("error", [""])[0])
    return row(
        f"{name}: a draft with a NaN is refused by the tensor's name",
        result["state"] == "refused" and "NaN" in error and f"model.{SPOILT_TENSOR};" in error,
        [name],
        state=result["state"],
        error=error[:300],
    )
