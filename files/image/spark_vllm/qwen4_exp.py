"""Qwen4Exp (Qwen3.8-Flash-Next) with tables in files and quantized heads."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix
from vllm.models.qwen4_exp.nvidia.hyperconnection import GatedResidual
from vllm.models.qwen4_exp.nvidia.model import Qwen4ExpForConditionalGeneration
from vllm.models.qwen4_exp.nvidia.mtp import Qwen4ExpMTP

from spark_vllm.ngram.embedding import tables_in_files


class SparkQwen4Exp(Qwen4ExpForConditionalGeneration):
    """Builds the head with a quantization method, unlike the engine's class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        with tables_in_files(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_text_config
        self.language_model.lm_head = None  # Frees its memory before the next line.
        self.language_model.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "language_model.lm_head"),
        )
        clear_padding(self)


class SparkQwen4ExpMTP(Qwen4ExpMTP):
    """A drafter without a head; the engine gives it the target's head, which may be quantized."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.lm_head = PPMissingLayer()
        clear_padding(self)


def clear_padding(model: torch.nn.Module) -> None:
    """Zero the padding rows of mixers, which checkpoints lack, because finite.py checks them."""
    for module in model.modules():
        if isinstance(module, GatedResidual) and module.pad_size:
            module.input_mix_weight_down_block_inject.weight.data[-module.pad_size :].zero_()
