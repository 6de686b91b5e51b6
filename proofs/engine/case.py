"""Run an engine on a checkpoint and record answers, logits and modules.

    python3 -m proofs.engine.case CASE.json OUT_DIR

A refusal or crash is a result too. The engine core runs in this process, so that hooks see logits,
modules and kernels.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proofs.engine import loaded_names, quick
from proofs.prompts import prompts_of, random_prompts

ROWS_KEPT = 200
BEGINNING = 1024
"""Tokens at the start of a conversation that are reversed to change the state."""
HOOKED = (
    "gate_up_proj",
    "down_proj",
    "in_proj_qkvz",
    "in_proj_ba",
    "qkv_proj",
    "o_proj",
    "out_proj",
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Hopper would take these two before Marlin; a Spark has neither.
    "VLLM_DISABLED_KERNELS": "CutlassW4A8LinearKernel,MacheteLinearKernel",
}
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "language_model_only": True,
    "enable_prefix_caching": False,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.04,
    "kv_cache_memory_bytes": 1 << 29,
    "disable_log_stats": False,
    "seed": 0,
    "attention_config": {"flash_attn_version": 2},
    "additional_config": {"gdn_prefill_backend": "triton"},
    "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
}


class Recorder:
    def __init__(self) -> None:
        self.on = False
        self.heads: list[tuple[Any, Any]] = []  # (hidden, logits) of each head call
        self.modules: dict[str, tuple[Any, Any]] = {}  # first long call of each module
        self.models: list[Any] = []


def install_hooks(recorder: Recorder) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load, head = BaseModelLoader.load_model, LogitsProcessor._apply_head

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(self, *args, **kwargs)
        recorder.models.append(model)
        return model

    def apply_head(self: Any, lm_head: Any, hidden: Any, bias: Any) -> Any:
        logits = head(self, lm_head, hidden, bias)
        if recorder.on:
            recorder.heads.append((hidden.detach().clone(), logits.detach().clone()))
        return logits

    BaseModelLoader.load_model = load_model
    LogitsProcessor._apply_head = apply_head


def watch_modules(recorder: Recorder) -> None:
    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            x, y = inputs[0], output[0] if isinstance(output, tuple) else output
            if recorder.on and name not in recorder.modules and x.shape[0] >= 64:
                recorder.modules[name] = (x[:ROWS_KEPT].clone(), y[:ROWS_KEPT].clone())

        return hook

    for name, module in recorder.models[0].named_modules():
        if name.endswith(HOOKED) and "visual" not in name:
            module.register_forward_hook(keep(name))
        if name.endswith(".mlp") and "visual" not in name:
            watch_block(recorder, name, module)


def watch_block(recorder: Recorder, name: str, block: Any) -> None:
    """Kernels may overwrite the input of a block."""
    inputs: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        inputs[:] = [(args[0] if args else kwargs["hidden_states"]).clone()]

    def after(module: Any, args: Any, output: Any) -> None:
        x = inputs[0]
        if recorder.on and name not in recorder.modules and x.shape[0] >= 64:
            recorder.modules[name] = (x[:ROWS_KEPT].clone(), output[:ROWS_KEPT].clone())

    block.register_forward_pre_hook(before, with_kwargs=True)
    block.register_forward_hook(after)


def method_chain(method: Any, depth: int = 0) -> list[str]:
    names = [type(method).__name__]
    if depth < 3:
        for value in vars(method).values():
            name = type(value).__name__
            if name.endswith(("Kernel", "Method", "Scheme", "Experts", "LinearOp")):
                names += method_chain(value, depth + 1)
    return names


def describe_modules(model: Any) -> dict[str, Any]:
    described = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            described[name] = {
                "class": type(module).__name__,
                "method": method_chain(method),
                "parameters": {
                    key: str(value.dtype).removeprefix("torch.")
                    for key, value in module.named_parameters(recurse=False)
                },
            }
    return described


def to_request(prompt: Any) -> Any:
    from vllm.inputs import TokensPrompt

    return prompt if isinstance(prompt, dict) else TokensPrompt(prompt_token_ids=prompt)


def generate(llm: Any, prompts: list[Any], tokens: int, ignore_eos: bool) -> list[dict]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, logprobs=2, ignore_eos=ignore_eos, detokenize=False
    )
    answers = llm.generate([to_request(prompt) for prompt in prompts], sampling, use_tqdm=False)
    result = []
    for answer in answers:
        output = answer.outputs[0]
        best = [
            sorted((v.logprob for v in step.values()), reverse=True) for step in output.logprobs
        ]
        chosen = [
            step[token].logprob
            for step, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        result.append(
            {
                "tokens": list(output.token_ids),
                "logprobs": chosen,
                "margins": [pair[0] - pair[1] for pair in best],
            }
        )
    return result


def read_counters(llm: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name or "prefix_cache" in metric.name:
            value = getattr(metric, "value", None)
            values[metric.name] = value if value is not None else list(metric.values)
    return values


def prefill_logits(llm: Any, recorder: Recorder, prompts: list[Any]) -> tuple[Any, Any, list[int]]:
    import torch
    from vllm import SamplingParams

    recorder.on = True
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    rows, seen = [], 0
    for prompt in prompts:
        llm.generate([to_request(prompt)], sampling, use_tqdm=False)
        total = sum(len(hidden) for hidden, _ in recorder.heads)
        rows.append(total - seen)
        seen = total
    recorder.on = False
    # The first call of a prompt with several rows has all positions; order is stable.
    calls = list(recorder.heads)
    recorder.heads.clear()
    hidden = torch.cat([hidden for hidden, _ in calls])
    return hidden, torch.cat([logits for _, logits in calls]), rows


def prompt_logprobs(llm: Any, prompts: list[Any], vocabulary: int) -> Any:
    """Return log-probabilities of all tokens at each place of the prompts, from any ranks."""
    import torch
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=vocabulary, detokenize=False
    )
    steps = [
        step
        for prompt in prompts
        for step in llm.generate([to_request(prompt)], sampling, use_tqdm=False)[0].prompt_logprobs
        if step is not None
    ]
    return torch.tensor([[step[token].logprob for token in range(vocabulary)] for step in steps])


def continue_conversations(
    llm: Any,
    prompts: list[list[int]],
    answers: list[dict[str, Any]],
    count: int,
    tokens: int,
    ignore_eos: bool,
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    results = []
    for turn in range(count):
        more = random_prompts([24 + turn])[0]
        prompts = [p + a["tokens"] + more for p, a in zip(prompts, answers, strict=True)]
        before = read_counters(llm)
        answers = generate(llm, prompts, tokens, ignore_eos)
        results.append({"answers": answers, "counters": read_counters(llm), "before": before})
    return results, prompts


def use_stock_turboquant() -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    load_general_plugins()
    register_backend(
        AttentionBackendEnum.TURBOQUANT,
        "vllm.v1.attention.backends.turboquant_attn.TurboQuantAttentionBackend",
    )


def start_engine(case: dict[str, Any], **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return the engine of a case with options ``more``, and the beginning of its result."""
    import torch
    import vllm

    if case.get("stock_turboquant"):
        use_stock_turboquant()
    options = {**COMMON, "model": case["tree"], **more, **case.get("options", {})}
    options["additional_config"] = {**COMMON["additional_config"], **case.get("additional", {})}
    started = time.monotonic()
    llm = vllm.LLM(**quick.set_flash_attention(options))
    load_s = round(time.monotonic() - started, 1)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return llm, {"load_s": load_s, "versions": versions}


def run(case: dict[str, Any], out: Path) -> dict[str, Any]:
    if quick.is_enabled():
        quick.start_quickly()
    import torch

    recorder = Recorder()
    install_hooks(recorder)
    loads: list[dict[str, Any]] = []
    if case.get("count_names"):
        loaded_names.install(loads)
    bare = case["prompts"] in ("ids", "contexts")
    llm, result = start_engine(case, skip_tokenizer_init=bare)
    result |= {
        # Over several devices the model lives in other processes.
        "modules": describe_modules(recorder.models[0]) if recorder.models else {},
        "drafter_modules": describe_modules(recorder.models[1]) if len(recorder.models) > 1 else {},
        "loads": loads,
    }
    if case.get("hook_modules"):
        watch_modules(recorder)
    prompts = prompts_of(case, None if bare else llm.get_tokenizer())
    if case.get("capture", True):
        hidden, logits, rows = prefill_logits(llm, recorder, prompts)
        torch.save(
            {
                "hidden": hidden.cpu(),
                "logits": logits.cpu(),
                "rows": rows,
                "modules": {k: (x.cpu(), y.cpu()) for k, (x, y) in recorder.modules.items()},
            },
            out / f"{case['name']}.pt",
        )
        result["finite"] = bool(torch.isfinite(logits.float()).all())
    if "vocabulary" in case:
        logits = prompt_logprobs(llm, prompts, case["vocabulary"])
        torch.save({"logits": logits}, out / f"{case['name']}.pt")
    tokens, ignore_eos = case.get("tokens", 48), case.get("ignore_eos", case["prompts"] == "ids")
    result["answers"] = generate(llm, prompts, tokens, ignore_eos)
    result["counters"] = read_counters(llm)
    if case.get("turns"):
        result["turns"], last_prompts = continue_conversations(
            llm, prompts, result["answers"], case["turns"], tokens, ignore_eos
        )
        if case.get("other_beginning"):
            last = [prompt[:BEGINNING][::-1] + prompt[BEGINNING:] for prompt in last_prompts]
            result["other_beginning"] = generate(llm, last, tokens, ignore_eos)
    return result


def write_result(run: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_PLUGINS"] = case.get("plugins", "spark")
    os.environ.update(case.get("environment", {}))
    started = time.monotonic()
    try:
        result = {"state": "ran", **run(case, out)}
    except BaseException as error:  # a refusal is a result; judges read the text
        texts: list[str] = []
        seen: BaseException | None = error
        while seen is not None:
            texts.append(f"{type(seen).__name__}: {seen}"[:4000])
            seen = seen.__cause__ or seen.__context__
        result = {"state": "refused", "error": texts, "trace": traceback.format_exc()[-3000:]}
    result["seconds"] = round(time.monotonic() - started, 1)
    part = out / f"{case['name']}.part"
    part.write_text(json.dumps({"case": case, **result}))
    part.rename(out / f"{case['name']}.json")
    sys.stdout.flush()
    os._exit(0)  # an engine in this process may hang at exit; everything is written


if __name__ == "__main__":
    write_result(run)
