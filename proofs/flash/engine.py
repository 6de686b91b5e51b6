"""Run an engine on a Qwen4Exp checkpoint; see ``proofs.engine.case``."""

import importlib.util
from pathlib import Path
from typing import Any

from proofs.engine import case as engine_case
from proofs.engine import quick


def run(case: dict[str, Any], out: Path) -> dict[str, Any]:
    use_plain_mixers()
    for name in case.get("damage", ()):
        from proofs.recall.engine import WAYS

        WAYS[name]()
    return sample(case) if "settings" in case else engine_case.run(case, out)


def sample(case: dict[str, Any]) -> dict[str, Any]:
    from proofs.prompts import prompts_of
    from proofs.recall import sampling

    if quick.is_enabled():
        quick.start_quickly()
    llm, result = engine_case.start_engine(case, skip_tokenizer_init=True)
    options = (case["settings"], case["samples"], case["cooler"])
    samples = sampling.draw(llm, prompts_of(case, None), *options)
    return {**result, "samples": samples, "counters": engine_case.read_counters(llm)}


def use_plain_mixers() -> None:
    """Compute mixers of up to 16 tokens like larger ones where CuTe DSL is missing."""
    if importlib.util.find_spec("cutlass"):
        return
    from vllm.models.qwen4_exp.nvidia import hyperconnection, model

    hyperconnection.MAX_FUSED_M = 0
    model.request_hc_down_silu_warmup = lambda *_: None


if __name__ == "__mp_main__":  # a spawned rank of a tensor parallel engine
    use_plain_mixers()
if __name__ == "__main__":
    engine_case.write_result(run)
