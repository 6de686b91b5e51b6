"""Opt-in INT8 LM head: quantized at load time, computed by the fastest kernel."""

# Select it with ``--additional-config '{"spark": {"lm_head": "int8-triton"}}'`` for a 16-bit head.
# ``lm_head_times`` is the path of a file for measured times; without it, Marlin is used.
# ``draft_vocabulary`` is the number of tokens that the drafter chooses from:
# ``draft_vocabulary_file`` lists them, otherwise they have the lowest ids.

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP
from vllm.model_executor.utils import set_weight_attrs

from spark_vllm.head.choice import (
    FALLBACK,
    IMAGE_VARIABLE,
    KERNELS,
    HeadSetup,
    frequent_token_ids,
    list_head_batches,
    read_choice,
    read_token_ids,
    save_fastest,
)
from spark_vllm.head.compute import (
    Head,
    make_head,
    measure_kernels,
    quantize_rows,
)

# Below "vllm.", because vLLM gives handlers only to its own logger.
logger = init_logger("vllm.spark_vllm.lm_head")

OPTION = "lm_head"
CHOICES = ("int8-triton",)


@dataclass(frozen=True)
class HeadOptions:
    kernel: str | None  # "own", "marlin" or "bf16"; None means the fastest
    times_path: Path | None  # file with measured times; None means Marlin
    batches: tuple[int, ...]
    draft_vocabulary: int | None
    draft_vocabulary_file: Path | None
    tokenizer: Path

    def draft_token_ids(self, vocabulary: int) -> list[int]:
        """Return the ids of the tokens that the drafter chooses from; empty for all tokens."""
        if self.draft_vocabulary is None:
            return []
        if self.draft_vocabulary_file is None:
            return frequent_token_ids(self.tokenizer, self.draft_vocabulary, vocabulary)
        return read_token_ids(self.draft_vocabulary_file, self.draft_vocabulary, vocabulary)


def read_head_options() -> HeadOptions | None:
    """Return the head options of ``--additional-config``, or None to keep the checkpoint's head."""
    config = get_current_vllm_config()
    additional = config.additional_config
    spark = additional.get("spark", {}) if isinstance(additional, Mapping) else {}
    choice, kernel = spark.get(OPTION), spark.get("lm_head_kernel")
    if choice is None:
        return None
    _check_choice(OPTION, choice, CHOICES)
    if kernel is not None:
        _check_choice("lm_head_kernel", kernel, KERNELS)
    times, draft_vocabulary = spark.get("lm_head_times"), spark.get("draft_vocabulary")
    token_ids = spark.get("draft_vocabulary_file")
    if token_ids is not None and draft_vocabulary is None:
        raise ValueError(
            "--additional-config: spark.draft_vocabulary_file: requires spark.draft_vocabulary; "
            "fix: set spark.draft_vocabulary to the number of ids in the file"
        )
    if draft_vocabulary is not None and config.parallel_config.tensor_parallel_size > 1:
        raise ValueError(
            "--additional-config: spark.draft_vocabulary: does not work with multiple GPUs; "
            "fix: remove the option, or use one GPU"
        )
    speculation = config.speculative_config
    return HeadOptions(
        kernel=kernel,
        times_path=Path(times) if times else None,
        batches=list_head_batches(
            config.scheduler_config.max_num_seqs,
            speculation.num_speculative_tokens if speculation else 0,
        ),
        draft_vocabulary=draft_vocabulary,
        draft_vocabulary_file=Path(token_ids) if token_ids else None,
        tokenizer=Path(config.model_config.tokenizer),
    )


def _check_choice(option: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(
            f"--additional-config: spark.{option}: {value!r}, expected {' or '.join(accepted)}; "
            "fix: use an accepted value, or remove the option"
        )


def read_driver_version() -> str:
    from vllm.third_party.pynvml import nvmlInit, nvmlShutdown, nvmlSystemGetDriverVersion

    nvmlInit()
    try:
        return str(nvmlSystemGetDriverVersion())
    finally:
        nvmlShutdown()


class DraftHead:
    """Rows of a head, by token id; all other logits are -inf."""

    def __init__(self, head: Head, token_ids: torch.Tensor) -> None:
        self.head, self.token_ids = head, token_ids

    def __call__(self, x: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return logits ``[tokens, vocabulary]`` for hidden states ``[tokens, inputs]``."""
        logits = x.new_full((x.shape[0], vocabulary), float("-inf"))
        return logits.index_copy_(1, self.token_ids, self.head(x))


class Int8Head(QuantizeMethodBase):
    """Loads a 16-bit head and keeps INT8 rows with a scale per 128 inputs."""

    def __init__(self, options: HeadOptions) -> None:
        self.options = options

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)
        # Read before loading, so that a damaged file stops the engine at once.
        self.draft_token_ids = self.options.draft_token_ids(layer.org_vocab_size)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Choose the kernel and convert the weight to the format that the kernel reads.

        Memory peaks at the 16-bit weight, two copies of INT8 rows and a float32 block of rows.
        """
        weight = layer.weight.data
        values, scales = quantize_rows(weight)
        kernel = self.options.kernel or self._choose_kernel(weight, values, scales)
        if kernel == "own":
            # Register parameters, so that the engine counts and moves them.
            layer.register_parameter("head_int8", Parameter(values, requires_grad=False))
            layer.register_parameter("head_scales", Parameter(scales, requires_grad=False))
        self.head = make_head(kernel, values, scales, weight)
        rows, in_features = weight.shape
        if ids := self.draft_token_ids:
            index = torch.tensor(ids, device=weight.device)
            # Rows are the second dimension of scales.
            draft_scales = scales.index_select(1, index)
            head = make_head(kernel, values[index], draft_scales, weight[index])
            self.draft_head = DraftHead(head, index)
            logger.info("spark drafts from %d of %d tokens", len(ids), layer.org_vocab_size)
        if kernel != "bf16":
            del layer.weight, weight
        torch.cuda.empty_cache()
        logger.info(
            "spark int8-triton head: %d rows x %d inputs, computed by %s", rows, in_features, kernel
        )

    def _choose_kernel(
        self, weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
    ) -> str:
        path = self.options.times_path
        if path is None:
            return FALLBACK
        setup = HeadSetup(
            device=torch.cuda.get_device_name(weight.device),
            driver=read_driver_version(),
            image=os.environ.get(IMAGE_VARIABLE, ""),
            rows=weight.shape[0],
            in_features=weight.shape[1],
            batches=self.options.batches,
        )
        choice = read_choice(path, setup)
        if choice is None:
            times = measure_kernels(weight, values, scales, setup.batches)
            choice = save_fastest(path, setup, times)
            logger.info("spark int8-triton head: time in us by batch size: %s", times)
        return choice

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.head(x.reshape(-1, x.shape[-1]))
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Raise ValueError, because an embedding cannot be read from INT8 rows."""
        raise ValueError(
            "--additional-config: spark.lm_head: the model has tied embeddings; "
            "fix: remove the option"
        )


class SparkQwen35MoeMTP(Qwen3_5MoeMTP):
    """Uses the draft head, if any, of the LM head that it shares with the target.

    The target verifies drafts with all rows of its head, so answers do not change.
    """

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor | None:
        head = getattr(self.lm_head.quant_method, "draft_head", None)
        if head is None:
            return super().compute_logits(hidden_states, spec_step_idx)
        logits: torch.Tensor = head(hidden_states, self.config.vocab_size)
        return logits
