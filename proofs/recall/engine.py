"""Run one engine on the recall model and write down what it answered.

    python3 -m proofs.recall.engine CASE.json OUT_DIR

A process of its own per case, as in ``proofs.engine.case``, whose options these are.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from proofs.engine import case as engine_case
from proofs.engine import quick
from proofs.recall import damage, language, talks

KEPT = 40
"""Log-probabilities kept of each step: the best ones, for comparing distributions."""
STEPS_KEPT = 6


def generate(llm: Any, prompts: list[list[int]], counts: list[int]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0, max_tokens=count, logprobs=KEPT, ignore_eos=True, detokenize=False
        )
        for count in counts
    ]
    requests = [engine_case.as_request(prompt) for prompt in prompts]
    found = []
    for answer in llm.generate(requests, sampling, use_tqdm=False):
        output = answer.outputs[0]
        steps = [
            {str(token): round(value.logprob, 5) for token, value in step.items()}
            for step in output.logprobs
        ]
        found.append({"tokens": list(output.token_ids), "steps": steps})
    return found


def judged(answer: dict[str, Any], wanted: list[int]) -> dict[str, Any]:
    right = [
        step.get(str(token), min(step.values()))
        for step, token in zip(answer["steps"], wanted, strict=True)
    ]
    return {
        "right": answer["tokens"] == wanted,
        "tokens": answer["tokens"],
        "logprobs": [round(value, 4) for value in right],
        "steps": answer["steps"][:STEPS_KEPT],
    }


def recall(llm: Any, lengths: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask about contexts of several lengths; every prompt ends exactly at its length."""
    found = []
    for length, wanted in lengths.items():
        source = np.random.default_rng([int(length), 7])
        size = int(length) // 32 * 32
        made = language.context(source, size, near=wanted["near"], asks=False)
        asked = language.questions(made, int(length), wanted["kinds"])
        prompts = [[*made.tokens.tolist(), *one.tokens] for one in asked]
        started = time.monotonic()
        answers = generate(llm, prompts, [len(one.answer) for one in asked])
        seconds = round(time.monotonic() - started, 1)
        for one, answer in zip(asked, answers, strict=True):
            about = {"length": size, "kind": one.kind, "depth": round(one.depth, 4)}
            found.append({**about, "s": seconds, **judged(answer, one.answer)})
    return found


def converse(llm: Any, seed: int, long: bool) -> list[dict[str, Any]]:
    """Hold the conversations of ``talks``; return every answer and the counters per round."""
    found = []
    for number, asked in enumerate(talks.script(seed, long=long)):
        answers = generate(llm, [one.prompt for one in asked], [len(one.answer) for one in asked])
        counters = engine_case.counters(llm)
        hits = sum(v for k, v in counters.items() if k.endswith("prefix_cache_hits"))
        for place, (one, answer) in enumerate(zip(asked, answers, strict=True)):
            row = judged(answer, one.answer)
            row.pop("steps")
            about = {"round": number, "place": place, "client": one.client, "kind": one.kind}
            prompt = hashlib.sha256(np.array(one.prompt).tobytes()).hexdigest()[:12]
            about |= {"length": len(one.prompt), "prompt": prompt, "hits_so_far": hits}
            found.append({**about, **row})
    return found


def run(case: dict[str, Any], out: Path) -> dict[str, Any]:
    quick.start_quickly()
    import torch
    import vllm
    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if case.get("stock_turboquant"):
        engine_case.use_stock_turboquant()
    if case.get("xqa"):
        # Its kernel is compiled here; only the question for downloads stands before it.
        import vllm.utils.flashinfer as way

        way.has_nvidia_artifactory = lambda: True
    if case.get("fa2"):
        # What FlashInfer takes on compute capability 12.x; Hopper has kernels of its own.
        import flashinfer.utils as kinds

        kinds.is_sm90a_supported = lambda *_: False
    damage.inflict(case.get("damage", {}))
    options = {**engine_case.COMMON, "model": case["tree"], "skip_tokenizer_init": True}
    options |= {"max_logprobs": KEPT, **case["options"]}
    options["additional_config"] = {
        **engine_case.COMMON["additional_config"],
        **case.get("additional", {}),
    }
    options = quick.arrange(options)
    started = time.monotonic()
    llm = LLM(**options)
    config = llm.llm_engine.vllm_config
    result: dict[str, Any] = {
        "load_s": round(time.monotonic() - started, 1),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "block_tokens": config.cache_config.block_size,
        "flash_attention": os.environ.get(quick.FLASH, "2"),
    }
    if case.get("recall"):
        result["recall"] = recall(llm, case["recall"])
    if case.get("talks"):
        result["talks"] = converse(llm, case["talks"], bool(case.get("long")))
    result["counters"] = engine_case.counters(llm)
    return result


if __name__ == "__main__":
    engine_case.write_result(run)
