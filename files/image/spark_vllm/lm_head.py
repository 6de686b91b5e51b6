"""Opt-in INT8 LM head: quantised while the model loads, computed by this package's own kernel.

Chosen with ``--additional-config '{"spark": {"lm_head": "int8-triton"}}'`` on a checkpoint whose
head is 16-bit. The default stays the head baked into the checkpoint, which the engine's own
kernels serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

from spark_vllm.lm_head_quantise import quantise_rows
from spark_vllm.lm_head_table import Tile, read_table, tile_for, tiles_for

# Below "vllm.", because vLLM gives handlers only to its own logger.
logger = init_logger("vllm.spark_vllm.lm_head")

OPTION = "lm_head"
CHOICES = ("int8-triton",)


def wanted_head() -> str | None:
    """Return the head chosen with ``--additional-config``; ``None``: the checkpoint decides.

    Raises:
        ValueError: when the choice is not one of ours.
    """
    additional = get_current_vllm_config().additional_config
    spark = additional.get("spark", {}) if isinstance(additional, Mapping) else {}
    choice = spark.get(OPTION)
    if choice is not None and choice not in CHOICES:
        raise ValueError(
            f"--additional-config: spark.{OPTION}: {choice!r}, accepted: {', '.join(CHOICES)}; "
            "fix: correct it, or leave it out to use the checkpoint's head"
        )
    return choice if choice is None else str(choice)


class Int8Head(QuantizeMethodBase):
    """Loads a 16-bit head, keeps INT8 rows with one scale per 128 inputs.

    Only ``apply``: an LM head that also serves as embedding is refused. Whatever could compile or
    synchronise happens after loading; requests only launch kernels, also inside CUDA graphs.
    """

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
        """Register the 16-bit weight the loader fills."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the weight by INT8 rows and scales, and compile every variant.

        Peak: the 16-bit weight, its INT8 form and one block of rows in float32.
        """
        weight = layer.weight
        values, scales = quantise_rows(weight.data)
        # parameters, so that the engine counts and moves them like any weight
        layer.register_parameter("head_int8", Parameter(values, requires_grad=False))
        layer.register_parameter("head_scales", Parameter(scales, requires_grad=False))
        in_features, dtype = weight.shape[1], weight.dtype
        del layer.weight, weight
        torch.cuda.empty_cache()
        properties = torch.cuda.get_device_properties(values.device)
        capability = (properties.major, properties.minor)
        self.processors = int(properties.multi_processor_count)
        self.tiles = tuple(tiles_for(capability, read_table()))
        for tile in self.tiles:
            self._run(torch.zeros((1, in_features), dtype=dtype, device=values.device), layer, tile)
        torch.cuda.synchronize(values.device)
        logger.info(
            "spark int8-triton head: %d rows x %d inputs, %d bytes, %d variants compiled for %d.%d",
            values.shape[0],
            in_features,
            values.nbytes + scales.nbytes,
            len(self.tiles),
            *capability,
        )

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of this rank's rows, in the dtype of ``x``."""
        rows = x.reshape(-1, x.shape[-1])
        out = self._run(rows, layer, tile_for(rows.shape[0], self.tiles))
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    def _run(self, rows: torch.Tensor, layer: torch.nn.Module, tile: Tile) -> torch.Tensor:
        # Imported late: the engine asks for the method where Triton may be missing (no GPU).
        from spark_vllm.lm_head_kernel import logits

        return logits(rows, layer.head_int8, layer.head_scales, tile, self.processors)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Refuse: an embedding cannot be read from INT8 rows.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "--additional-config: spark.lm_head: the head of this model is its embedding; "
            "fix: leave the option out"
        )
