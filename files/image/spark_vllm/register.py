"""The entry point that vLLM calls at least once in every process."""

from __future__ import annotations

from spark_vllm import PORTABLE_LOAD_FORMAT, QUANT_METHOD

MODELS = {
    "Qwen3_5MoeMTP": "head.method:SparkQwen35MoeMTP",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp:SparkQwen4Exp",
    "Qwen4ExpMTP": "qwen4_exp:SparkQwen4ExpMTP",
}


def register() -> None:
    """Register the quantization method and the load format; a second call changes nothing."""
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    if QUANT_METHOD in QUANTIZATION_METHODS:
        return
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from spark_vllm import finite
    from spark_vllm.portable import PortableLoader
    from spark_vllm.spark_inc import SparkIncConfig

    finite.install()
    register_model_loader(PORTABLE_LOAD_FORMAT)(PortableLoader)
    register_quantization_config(QUANT_METHOD)(SparkIncConfig)
    # The name avoids the import in engines without a TurboQuant cache.
    register_backend(
        AttentionBackendEnum.TURBOQUANT, "spark_vllm.turboquant.SparkTurboQuantBackend"
    )
    for architecture, model_class in MODELS.items():
        if architecture in ModelRegistry.models:  # Older engines lack some.
            ModelRegistry.register_model(architecture, f"spark_vllm.{model_class}")
