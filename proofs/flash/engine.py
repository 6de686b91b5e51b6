"""Run an engine on a Qwen4Exp checkpoint; see ``proofs.engine.case``."""

import importlib.util
from pathlib import Path
from typing import Any

from proofs.engine import case as engine_case
from proofs.engine import quick


def run(case: dict[str, Any], out: Path) -> dict[str, Any]:
    use_plain_mixers()
    if case.get("damage"):
        lose_states_at_hits()
    if "settings" in case:
        return sample(case)
    requested, read = count_rows() if case.get("count_rows") else (set(), set())
    result = engine_case.run(case, out)
    return {**result, "rows_requested": len(requested), "requested_and_read": len(requested & read)}


def lose_states_at_hits() -> None:
    """Let a request that hits the prefix cache start without the states of the hit.

    ``add_request`` stores the column of the block that holds them. Before the first step, the
    runner copies from there what GDN and PLE layers keep (states and convolution windows) to the
    block that the request writes; -1 stands for a new request, without a copy. Only hits come with
    computed tokens. Without the copy itself, first turns would change too: their prompts and
    answers cross blocks. QSA layers read the keys of a hit in place and stay right.
    """
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    own = MambaHybridModelState.add_request

    def add_request(self: Any, index: int, request: Any) -> None:
        own(self, index, request)
        if request.num_computed_tokens:
            self._mamba_state_idx_gpu[index].fill_(-1)

    MambaHybridModelState.add_request = add_request


def count_rows() -> tuple[set[int], set[int]]:
    """Return sets to which the plugin adds numbers of rows that it requests ahead, and reads."""
    from spark_vllm.ngram_table import Table

    counted: dict[str, set[int]] = {"request": set(), "lookup": set()}
    for name, rows in counted.items():
        own = getattr(Table, name)

        def count(self: Any, ids: Any, *more: Any, rows: Any = rows, own: Any = own) -> None:
            rows.update(ids.ravel().tolist())
            own(self, ids, *more)

        setattr(Table, name, count)
    return counted["request"], counted["lookup"]


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
