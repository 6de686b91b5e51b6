"""Judge a block of experts against dequantised weights, routing included.

With 8 of 256 experts, near ties flip with any rounding, so logits do not measure the kernels. Each
block is judged with the recorded input, at positions with a clear choice.
"""

import json
from pathlib import Path
from typing import Any

import torch
from spark_vllm.checkpoint.reader import ModuleReader
from spark_vllm.checkpoint.settings import read_settings

from proofs.judges.answers import Row, row
from proofs.judges.engine import relative, rounded_activations

LIMIT = 0.02
"""BF16 rounding inside an expert; a single wrong expert of eight gives 0.4."""
CLEAR = 0.02
"""Least distance of router logits between the last chosen and the first other expert."""

Weights = dict[str, torch.Tensor]


def judge(name: str, capture: Path, tree: Path) -> Row:
    modules = torch.load(capture)["modules"]
    blocks = {key: value for key, value in modules.items() if key.endswith(".mlp")}
    config = json.loads((tree / "config.json").read_text())
    chosen = int(config["text_config"]["num_experts_per_tok"])
    reader = ModuleReader(tree, read_settings(config["quantization_config"]))
    results = {}
    for module, (x, y) in blocks.items():
        prefix = module.replace("language_model.model.", "model.language_model.") + "."
        weights = {
            key.removeprefix(prefix): value.double()
            for key, value in reader.read_weights(lambda key, p=prefix: key.startswith(p))  # type: ignore[misc]
        }
        expected, gap, used = block(x.double(), weights, chosen)
        clear = gap > CLEAR
        results[module] = {
            "error": round(relative(y[clear], expected[clear]), 5),
            "positions": int(clear.sum()),
            "unclear": int((~clear).sum()),
            "experts_used": used,
        }
    return row(
        f"{name}: every block of experts equals the dequantised experts where the choice is clear",
        bool(results) and all(v["error"] < LIMIT and v["positions"] > 20 for v in results.values()),
        [name],
        blocks=results,
        limit=LIMIT,
    )


def block(x: torch.Tensor, weights: Weights, chosen: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the block's output, how clear each position's choice is, and the experts used."""
    router = x @ weights["gate.weight"].t()
    best = router.topk(min(chosen + 1, router.shape[1]), dim=1)
    gap = best.values[:, chosen - 1] - best.values[:, -1]
    if router.shape[1] == chosen:
        gap = torch.full_like(gap, torch.inf)
    experts, share = best.indices[:, :chosen], best.values[:, :chosen].softmax(1)
    result = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        value = _swiglu(x[rows], weights, f"experts.{expert}.")
        result.index_add_(0, rows, share[rows, places, None] * value)
    gate = (x @ weights["shared_expert_gate.weight"].t()).sigmoid()
    result += gate * _swiglu(x, weights, "shared_expert.", rounded=True)
    return result, gap, len(experts.unique())


def _swiglu(x: torch.Tensor, weights: Weights, prefix: str, *, rounded: bool = False) -> Any:
    """Return an expert's output; ``rounded``: with activations rounded as in the FP8 kernel."""
    rounding = (lambda v: rounded_activations(v).double()) if rounded else (lambda v: v)
    x = rounding(x)
    up = x @ weights[f"{prefix}up_proj.weight"].t()
    inner = torch.nn.functional.silu(x @ weights[f"{prefix}gate_proj.weight"].t()) * up
    return rounding(inner) @ weights[f"{prefix}down_proj.weight"].t()
