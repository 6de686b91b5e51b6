"""Start the engine of a plan on a full-size checkpoint; record memory, cache and decode steps.

    python3 -m proofs.whole.engine CASE.json OUT_DIR

A step's GPU time is that of its CUDA graphs (all layers) and of the LM head, by CUDA events.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proofs.engine import loaded_names, quick
from proofs.engine.case import (
    Recorder,
    generate,
    install_hooks,
    prefill_logits,
    start_engine,
    to_request,
    write_result,
)
from proofs.prompts import random_prompts
from proofs.whole import waiting

SKIPPED_STEPS, TIMED_STEPS = 20, 100
FINITE_TOKENS = 64
PARTS = {
    "LM head": "lm_head",
    "embedding": "embed_tokens",
    "shared experts": ".shared_expert.",
    "routed experts": ".experts",
}


class GpuTimes:
    """Pairs of CUDA events around the calls of a method."""

    def __init__(self) -> None:
        self.on = False
        self.pairs: dict[str, list[tuple[Any, Any]]] = {}

    def install(self, kind: str, owner: Any, method: str) -> None:
        import torch

        own: Callable[..., Any] = getattr(owner, method)
        pairs = self.pairs.setdefault(kind, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return own(*args, **kwargs)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = own(*args, **kwargs)
            end.record()
            pairs.append((begin, end))
            return result

        setattr(owner, method, timed)

    def per_step(self, steps: int) -> dict[str, float]:
        numbers = {}
        for kind, pairs in self.pairs.items():
            total_ms = sum(begin.elapsed_time(end) for begin, end in pairs)
            numbers[f"{kind}_ms"] = round(total_ms / steps, 4)
            numbers[f"{kind}_calls"] = round(len(pairs) / steps, 2)
        gpu_ms = sum(number for name, number in numbers.items() if name.endswith("_ms"))
        return {**numbers, "gpu_ms": round(gpu_ms, 4)}


def time_steps(llm: Any, times: GpuTimes, context_tokens: int) -> dict[str, Any]:
    """Time decode steps of a single request."""
    import torch
    from vllm import SamplingParams

    own, walls = llm.llm_engine.step, []

    def step() -> Any:
        times.on = len(walls) >= SKIPPED_STEPS
        begin = time.perf_counter()
        outputs = own()
        walls.append((time.perf_counter() - begin) * 1000)
        return outputs

    sampling = SamplingParams(
        temperature=0, max_tokens=SKIPPED_STEPS + TIMED_STEPS, ignore_eos=True, detokenize=False
    )
    llm.llm_engine.step = step
    prompt = to_request(random_prompts([context_tokens])[0])
    llm.generate([prompt], sampling, use_tqdm=False)
    llm.llm_engine.step = own
    times.on = False
    torch.cuda.synchronize()
    timed = walls[SKIPPED_STEPS:]
    deciles = statistics.quantiles(timed, n=10)
    return {
        "steps": len(timed),
        "step_ms": round(statistics.median(timed), 4),
        "step_ms_10th_and_90th_percentile": [round(deciles[0], 4), round(deciles[-1], 4)],
        **times.per_step(len(timed)),
    }


def weight_sizes(models: list[Any]) -> dict[str, int]:
    """Return the bytes of the models' parameters and buffers by part, each storage once."""
    sizes, seen = dict.fromkeys((*PARTS, "other", "drafter"), 0), set()
    for number, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            storage = tensor.untyped_storage()
            if not tensor.is_cuda or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            part = next((part for part, text in PARTS.items() if text in name), "other")
            sizes[part if number == 0 else "drafter"] += storage.nbytes()
    return sizes


def avoid_direct_storage() -> None:
    """Read files through the CPU: the weights may be in memory, where GPUDirect cannot read."""
    from fastsafetensors.parallel_loader import ParallelLoader

    own = ParallelLoader.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        own(self, *args, **{**named, "nogds": True})

    ParallelLoader.__init__ = init


def run(case: dict[str, Any], out: Path) -> dict[str, Any]:
    if quick.is_enabled():
        quick.start_quickly()
    import torch
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    recorder, times = Recorder(), GpuTimes()
    loads: list[dict[str, Any]] = []
    install_hooks(recorder)
    times.install("graphs", torch.cuda.CUDAGraph, "replay")
    times.install("head", LogitsProcessor, "_apply_head")
    if case["count_names"]:
        loaded_names.install(loads)
    avoid_direct_storage()
    llm, result = start_engine(case, skip_tokenizer_init=True)
    _, logits, _ = prefill_logits(llm, recorder, random_prompts([FINITE_TOKENS]))
    cache = llm.llm_engine.vllm_config.cache_config
    result |= {
        "loads": [{"read": load["read"]} for load in loads],
        "finite": bool(torch.isfinite(logits.float()).all()),
        "logit_deviation": round(float(logits.float().std()), 4),
        "weight_bytes": weight_sizes(recorder.models),
        "allocated_bytes": torch.cuda.memory_allocated(),
        "cache": {
            "block_tokens": cache.block_size,
            "blocks": cache.num_gpu_blocks,
            "tokens": cache.kv_cache_size_tokens,
            "full_context_users": cache.kv_cache_max_concurrency,
        },
    }
    del logits
    result["steps"] = time_steps(llm, times, case["context_tokens"])
    if cache.enable_prefix_caching:
        result["waiting"] = waiting.measure(llm)
    generate(llm, random_prompts([case["options"]["max_num_batched_tokens"]]), 1, True)
    free, total = torch.cuda.mem_get_info()
    return {**result, "used_bytes": total - free, "total_bytes": total}


if __name__ == "__main__":
    write_result(run)
