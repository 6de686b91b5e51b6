"""How far each way of serving is from the same model in 16 bits: two trained models, every way."""

from __future__ import annotations

from typing import Any

from proofs.engine.cases import ONLINE_FP8, TRITON, case

MODELS = {"tiny": "text", "recall": "contexts"}
PLAIN = "16bit"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("plain", {"plugins": ""}),
    "base": ("base", {"plugins": ""}),
    "hybrid": ("overlay", {}),
    "hybrid-head8": ("overlay-head8", {}),
    "hybrid-triton": ("overlay", {"additional": TRITON}),
    "native": ("native", {"plugins": ""}),
    "online-fp8": ("base-head8", {"plugins": "", "options": {"quantization_config": ONLINE_FP8}}),
    "wrong-scale": ("full-wrong-scale", {}),
}
"""Tree and further options of each; the last is damaged, and has to be seen."""
ROOM = {"max_model_len": 4096, "max_num_batched_tokens": 4096}


def quality_cases() -> list[dict[str, Any]]:
    """Logits of every position of the same prompts; nothing is drafted, all of it eager."""
    found = []
    for model, prompts in MODELS.items():
        for way, (tree, more) in WAYS.items():
            options = {**ROOM, **more.get("options", {})}
            one = case(f"{model}-{way}", f"{model}-{tree}", **{**more, "options": options})
            found.append({**one, "prompts": prompts, "tokens": 1})
    return found
