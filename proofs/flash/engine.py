"""Run an engine on a Qwen4Exp checkpoint; see ``proofs.engine.case``."""

import importlib.util
from pathlib import Path
from typing import Any

from proofs.engine import case as engine_case


def run(case: dict[str, Any], out: Path) -> dict[str, Any]:
    use_plain_mixers()
    return engine_case.run(case, out)


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
