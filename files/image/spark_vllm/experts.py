"""How narrow routed experts may be: pure functions, no vLLM, no torch."""

from __future__ import annotations


def demand_wider_than_a_group(module: str, width: int, group_size: int) -> None:
    """Refuse packed experts whose width on this device is one group of scales, or less.

    vLLM 0.30 to 0.33 reorders the scales of gate and up by the experts' width where their inputs
    are meant (``fused_moe/oracle/int_wna16.py``, ``size_k`` of ``w13``). With one group the order
    is another, and every answer is a little wrong without a word.

    Args:
        module: the engine's name of the experts.
        width: intermediate size of one expert on this device.
        group_size: inputs that share one scale.

    Raises:
        ValueError: naming the module, its width and what to change.
    """
    if width <= group_size:
        raise ValueError(
            f"{module}: its experts are {width} wide on this device, and {group_size} inputs share "
            "one scale: the engine would put the scales of gate and up in a wrong order and answer "
            "wrong without an error; fix: a smaller --tensor-parallel-size, so that each device "
            f"holds more than {group_size} of an expert's width"
        )
