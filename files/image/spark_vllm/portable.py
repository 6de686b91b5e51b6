"""Load format ``spark_portable``: dequantize a hybrid checkpoint to BF16 while loading."""

# For hardware without the quantized kernels; needs about four times the memory.

from __future__ import annotations

import json
from pathlib import Path

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from spark_vllm import PORTABLE_LOAD_FORMAT
from spark_vllm.checkpoint.reader import ModuleReader
from spark_vllm.checkpoint.settings import read_settings
from spark_vllm.finite import check_finite_tensors

# Below "vllm.", because vLLM gives handlers only to its own logger.
logger = init_logger("vllm.spark_vllm.portable")


class PortableLoader(BaseModelLoader):
    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing, because the checkpoint is a local directory."""

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Build every layer unquantized, then load the dequantized weights.

        Raise ValueError if the checkpoint is not a hybrid.
        """
        if not hasattr(vllm_config.quant_config, "portable"):
            raise ValueError(
                f"--load-format {PORTABLE_LOAD_FORMAT}: "
                f"{model_config.model} is not a hybrid checkpoint; fix: remove this option"
            )
        vllm_config.quant_config.portable = True
        model: torch.nn.Module = super().load_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        config = json.loads((Path(model_config.model) / "config.json").read_text())
        settings = read_settings(config["quantization_config"])
        reader = ModuleReader(Path(model_config.model), settings)
        unused = getattr(model, "is_unused_checkpoint_weight", None)
        loaded = model.load_weights(
            reader.read_weights(lambda name: unused is None or not unused(name))
        )
        _check_all_loaded(model, loaded)
        # Check now, because on a CPU the engine will repack the weights into opaque kernel data.
        check_finite_tensors(model)
        logger.warning(
            "spark portable mode: dequantized %d tensors to bfloat16 (%s) for %s; "
            "every layer runs unquantized; quantized kernels are not used",
            reader.counts.total(),
            ", ".join(f"{kind} {count}" for kind, count in sorted(reader.counts.items())),
            type(model).__name__,
        )


def _check_all_loaded(model: torch.nn.Module, loaded: set[str] | None) -> None:
    """Reject parameters without a tensor, because they would stay uninitialized."""
    if loaded is None:
        return
    filled = {_plain_name(name) for name in loaded}
    parameters = (name for name, _ in model.named_parameters())
    missing = sorted(name for name in parameters if _plain_name(name) not in filled)
    if missing:
        raise ValueError(
            f"{len(missing)} parameters have no tensor in the checkpoint: "
            f"{', '.join(missing[:5])}; fix: build the checkpoint again"
        )


def _plain_name(name: str) -> str:
    return name.replace(".routed_experts.", ".")
