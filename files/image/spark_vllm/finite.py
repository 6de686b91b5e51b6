"""Reject a loaded model with NaN, infinity or outlier scales, before it serves requests."""

# With a NaN scale the engine reports no error and repeats a token; a scale that is far too large
# is finite and drowns all other weights. Negative scales and zeros are valid: symmetric AutoRound
# writes negative scales, and the engine pads with zeros. A single small scale is also valid,
# because some rows of trained weights are almost zero.

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

# Below "vllm.", because vLLM gives handlers only to its own logger.
logger = init_logger("vllm.spark_vllm.finite")

_CHUNK_NUMBERS = 1 << 25
_FP8_NAN = 0x7F  # of e4m3fn, without the sign; it has no infinity
_MAX_NAMES = 5
_INTEGER_SCALES = frozenset({"scales", "w13_scales", "w2_scales"})
_SAMPLE_NUMBERS = 1 << 18
MAX_SCALE_RATIO = 256
"""Limit on a scale divided by the median in its tensor, without groups of zeros."""
MAX_MEDIAN_RATIO = 16
"""Limit on a tensor's median divided by the median in all layers, and on the inverse."""
MAX_LOGIT = 64.0
"""Limit on the root mean square of the logits for inputs of 1 and -1, and on the inverse."""
_ZERO_GROUP = 1.1e-5  # AutoRound writes 1e-5 for a group of zeros
_BUILDER_ZERO_GROUP = 1.0
_FIX = (
    "fix: run `spark_checkpoint verify --full` on the checkpoint; "
    "if the verification passes, build the checkpoint again"
)


def install() -> None:
    """Patch vLLM to check every hybrid model after loading; idempotent."""
    load = BaseModelLoader.load_model
    if getattr(load, "spark_finite", False):
        return

    def load_model(
        self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        model: torch.nn.Module = load(self, vllm_config, model_config, *args, **kwargs)
        if getattr(vllm_config.quant_config, "requires_finite", False):
            is_drafter = model_config.runner_type == "draft"
            check_model(model, modules_shared_with_target(model) if is_drafter else ())
        return model

    load_model.spark_finite = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_model


def modules_shared_with_target(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the drafter modules that the engine later replaces with modules of the target."""
    flags = (("has_own_lm_head", "lm_head"), ("has_own_embed_tokens", "embed_tokens"))
    return tuple(name for flag, name in flags if getattr(model, flag, None) is False)


def check_model(model: torch.nn.Module, skipped: tuple[str, ...] = ()) -> None:
    """Check all numbers, scales and the head's logits, except in ``skipped`` modules."""
    count = check_finite_tensors(model, skipped)
    check_scale_sizes(model)
    heads = [] if "lm_head" in skipped else list(_compute_logits(model))
    wrong = [name for name, logits in heads if not is_finite(logits)]
    if wrong:
        raise ValueError(_not_finite_message(model, "logits", wrong))
    for name, logits in heads:
        size = float(logits.float().square().mean().sqrt())
        if not 1 / MAX_LOGIT <= size <= MAX_LOGIT:
            raise ValueError(
                f"{type(model).__name__}: {name}: "
                f"logits of magnitude {size:g} for inputs of magnitude 1, "
                f"expected 1/{MAX_LOGIT:g} to {MAX_LOGIT:g}; the head's scales are wrong; {_FIX}"
            )
    logger.info(
        "spark: all numbers of %d tensors and the logits of %d heads of %s are finite",
        count,
        len(heads),
        type(model).__name__,
    )


def check_finite_tensors(model: torch.nn.Module, skipped: tuple[str, ...] = ()) -> int:
    """Check the tensors outside ``skipped`` modules; return their number."""
    loaded = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: t for name, t in loaded.items() if not {*skipped} & {*name.split(".")}}
    wrong = [name for name, tensor in tensors.items() if not is_finite(tensor.detach())]
    if wrong:
        raise ValueError(_not_finite_message(model, f"{len(wrong)} tensors", wrong))
    return len(tensors)


def check_scale_sizes(model: torch.nn.Module) -> None:
    """Raise ValueError for scales that differ too much within a tensor or between layers."""
    wrong = []
    medians_by_kind: dict[str, dict[str, float]] = defaultdict(dict)
    for name, tensor in model.named_parameters():
        is_scale = name.rpartition(".")[2] in _INTEGER_SCALES
        if not is_scale or tensor.is_meta or not tensor.numel():
            continue
        largest, median = measure_scales(tensor.detach())
        if median:
            medians_by_kind[re.sub(r"\.\d+\.", ".N.", name)][name] = median
        if largest > MAX_SCALE_RATIO * median:
            wrong.append(name)
    for medians in medians_by_kind.values():
        typical = statistics.median(medians.values())
        low, high = typical / MAX_MEDIAN_RATIO, typical * MAX_MEDIAN_RATIO
        wrong += [name for name, median in medians.items() if not low <= median <= high]
    if wrong:
        raise ValueError(
            f"{type(model).__name__}: scales are implausible: {_list_names(wrong)}; "
            f"a scale exceeds {MAX_SCALE_RATIO} times the median of its tensor, "
            f"or the medians of layers differ by more than a factor of {MAX_MEDIAN_RATIO}; "
            f"the answers would be wrong; {_FIX}"
        )


def measure_scales(scales: torch.Tensor) -> tuple[float, float]:
    """Return the largest and the median magnitude, ignoring groups of zeros."""
    largest, samples = 0.0, []
    values = scales.flatten()
    step = 1 + len(values) // _SAMPLE_NUMBERS
    for chunk in _chunks(values):
        sizes = chunk.float().abs()
        used = sizes[(sizes > _ZERO_GROUP) & (sizes != _BUILDER_ZERO_GROUP)]
        if used.numel():
            largest = max(largest, float(used.max()))
            samples.append(used[::step])
    return largest, float(torch.cat(samples).median()) if samples else 0.0


def is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not (tensor.is_floating_point() and tensor.numel()):
        return True
    is_fp8 = tensor.dtype == torch.float8_e4m3fn
    if not is_fp8 and tensor.element_size() == 1:
        return True  # hybrid checkpoints use no other FP8 format
    numbers = tensor.view(torch.uint8) if is_fp8 else tensor
    for chunk in _chunks(numbers):
        finite = (chunk & _FP8_NAN) != _FP8_NAN if is_fp8 else torch.isfinite(chunk)
        if not bool(finite.all()):
            return False
    return True


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.dim() == 0:
        yield tensor
        return
    rows = max(1, _CHUNK_NUMBERS * tensor.shape[0] // tensor.numel())
    yield from tensor.split(rows)


def _compute_logits(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each head, and the logits for a fixed input."""
    for name, module in model.named_modules():
        if not isinstance(module, ParallelLMHead):
            continue
        weight = next(p for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16))
        row = torch.ones(1, module.embedding_dim, dtype=weight.dtype, device=weight.device)
        row[:, 1::2] = -1
        with torch.inference_mode():
            yield name, module.quant_method.apply(module, row)


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def _not_finite_message(model: torch.nn.Module, subject: str, names: list[str]) -> str:
    return (
        f"{type(model).__name__}: {subject} with NaN or infinity after loading: "
        f"{_list_names(names)}; the model would repeat a single token; {_FIX}"
    )
