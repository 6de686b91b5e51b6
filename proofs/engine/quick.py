"""Starting many engines on one card within minutes, where no speed is measured."""

from __future__ import annotations

import os
from typing import Any

FLASH = "SPARK_FLASH_ATTENTION"
"""Set to 3 on Hopper: version 2 of the x86 wheel has no code for it, and the driver compiles that
for minutes. A Spark has version 2 only."""
FIRST = "SPARK_FIRST_CONFIGURATION"
"""Set to 1: every autotuned kernel takes the first of its configurations."""


def caveats() -> list[str]:
    said = []
    if wanted():
        said.append("autotuned Triton kernels take the first of their configurations")
    if flash_attention() == 3:
        said.append("flash-attention 3 where no other attention is named")
    return said


def start_quickly() -> None:
    """Take the first configuration of every autotuned kernel, and look at models in this process.

    Called before anything of the engine is imported: kernels are made then.

    The search for the fastest one compiles a hundred kernels on a single core, for minutes; every
    one of them has to be right.
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
    """Take it for the prompts of a TurboQuant cache, where it is one product of plain tensors.

    The engine forbids that as not yet tried.
    """
    from vllm.v1.attention.backends import turboquant_attn

    turboquant_attn.get_flash_attn_version = lambda *_, **__: 3


def use_flash_attention_3(options: dict[str, Any]) -> None:
    """Take flash-attention 3 for 16-bit keys, and for the prompts of a TurboQuant cache."""
    if options.get("kv_cache_dtype", "auto").startswith("turboquant"):
        read_turboquant_prompts_with_flash_attention_3()
    else:
        chosen = {**options["attention_config"], "flash_attn_version": 3}
        options["attention_config"] = chosen


def wanted() -> bool:
    return os.environ.get(FIRST) == "1"


def arrange(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an engine that starts so; ``start_quickly`` was called before."""
    if flash_attention() == 3:
        use_flash_attention_3(options)
    return options
