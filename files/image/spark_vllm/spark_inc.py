"""Quantization method ``spark_inc``: INC's INT4 plus block FP8 for exactly named modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from spark_vllm import QUANT_METHOD
from spark_vllm.checkpoint import names
from spark_vllm.checkpoint.gate import check_checkpoint
from spark_vllm.checkpoint.names import check_expert_width
from spark_vllm.checkpoint.settings import Settings, read_settings
from spark_vllm.head.method import Int8Head, read_head_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Below "vllm.", because vLLM gives handlers only to its own logger.
logger = init_logger("vllm.spark_vllm")


class SparkIncConfig(INCConfig):
    """INC with an exact list of block-FP8 modules.

    It is a subclass, because vLLM replicates ``in_proj_ba`` under tensor parallelism only for
    instances of INCConfig. It has only plain data, because vLLM pickles and deep-copies it.
    """

    settings: Settings
    fp8_modules: list[str]  # checkpoint names; after apply_vllm_mapper the engine's names
    portable: bool = False
    requires_finite: bool = True  # finite.py checks only models of this method

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None
    ) -> str | None:
        """Return None; the inherited method would claim plain ``auto-round`` checkpoints."""
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SparkIncConfig:
        settings = read_settings(config)
        instance: SparkIncConfig = super().from_config(config)
        instance.settings = settings
        instance.fp8_modules = list(settings.fp8_modules)
        return instance

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PreTrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Check names, dtypes and shapes before weights are loaded, because the engine does not."""
        text_config = getattr(hf_config, "text_config", hf_config)
        check_checkpoint(
            model_name,
            self.settings,
            layers=getattr(text_config, "num_hidden_layers", 0) or 0,
            mtp_layers=getattr(text_config, "mtp_num_hidden_layers", 0) or 0,
            experts=getattr(text_config, "num_experts", 0) or 0,
        )
        # Logged here, because logging is not set up in register().
        logger.info(
            "%s: %d FP8 block names in %d modules, block_shape=%s",
            QUANT_METHOD,
            len(self.settings.fp8_modules),
            len(names.fused_modules(self.settings.fp8_modules)),
            list(self.settings.block_shape),
        )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Replace checkpoint names with the engine's; vLLM calls this once per model class."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.fp8_modules = hf_to_vllm_mapper.apply_list(self.fp8_modules)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Add the overlay's rename rules, except in portable mode, whose loader renames tensors."""
        mapper = super().get_checkpoint_weight_mapper()
        if self.portable:
            return mapper
        return mapper | WeightsMapper(orig_to_new_regex=dict(self.settings.rules))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return block FP8 for listed modules, 16 bits in portable mode, else INC's method."""
        if self.portable:
            return _unquantized_method(layer)
        if isinstance(layer, LinearBase) and names.are_all_shards_listed(
            prefix, self.fp8_modules, self.packed_modules_mapping
        ):
            # Not a subclass, because vLLM selects the weight loader by class name.
            return Fp8LinearMethod(
                Fp8Config(
                    is_checkpoint_fp8_serialized=True,
                    activation_scheme="dynamic",
                    weight_block_size=list(self.settings.block_shape),
                )
            )
        options = read_head_options() if isinstance(layer, ParallelLMHead) else None
        if options is not None:
            if self.settings.head_int8:
                raise ValueError(
                    "--additional-config: spark.lm_head: the checkpoint already has an INT8 head; "
                    "fix: remove the option, or build the checkpoint with head 'keep'"
                )
            return Int8Head(options)
        method = super().get_quant_method(layer, prefix)
        is_packed = method is not None and not isinstance(method, UnquantizedFusedMoEMethod)
        if is_packed and isinstance(layer, RoutedExperts):
            width = layer.moe_config.intermediate_size_per_partition
            check_expert_width(prefix, width, self.settings.group_size)
        return method


def _unquantized_method(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    if isinstance(layer, LinearBase):
        return UnquantizedLinearMethod()
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    return None
