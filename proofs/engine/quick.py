"""Start many engines on a GPU within minutes, for proofs that measure no speed."""

import os
from typing import Any

FLASH = "SPARK_FLASH_ATTENTION"
"""Set to 3 on Hopper: version 2 of the x86 wheel has no Hopper code, which takes the driver minutes
to compile. A Spark has only version 2."""
FIRST = "SPARK_FIRST_CONFIGURATION"


def caveats() -> list[str]:
    texts = []
    if is_enabled():
        texts.append("autotuned Triton kernels take the first of their configurations")
    if flash_attention() == 3:
        texts.append("flash-attention 3 where no other attention is named")
    return texts


def start_quickly() -> None:
    """Take the first configuration of every autotuned kernel, and inspect models in this process.

    Call it before importing the engine. The search for the fastest compiles a hundred kernels.
    """
    from triton.runtime.autotuner import Autotuner

    own = Autotuner.__init__

    def first(self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        own(self, fn, names, configs[:1], *rest, **named)

    Autotuner.__init__ = first
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda inspect: inspect()


def flash_attention() -> int:
    return 3 if os.environ.get(FLASH) == "3" else 2


def read_turboquant_prompts_with_flash_attention_3() -> None:
    """Allow it for prompts with a TurboQuant cache; the engine rejects it as untested."""
    from vllm.v1.attention.backends import turboquant_attn

    turboquant_attn.get_flash_attn_version = lambda *_, **__: 3


def is_enabled() -> bool:
    return os.environ.get(FIRST) == "1"


def set_flash_attention(options: dict[str, Any]) -> dict[str, Any]:
    if flash_attention() != 3:
        return options
    if options.get("kv_cache_dtype", "auto").startswith("turboquant"):
        read_turboquant_prompts_with_flash_attention_3()
        return options
    return {**options, "attention_config": {**options["attention_config"], "flash_attn_version": 3}}
