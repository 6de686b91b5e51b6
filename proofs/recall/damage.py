"""Damage to the caches of eager engines, which a judge must detect."""

from collections.abc import Callable
from typing import Any


def lose_band(start: int, end: int) -> None:
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    project = Qwen3NextAttention._project_qkv_gate

    def projected(self: Any, qkv: Any, positions: Any) -> Any:
        q, k, v, gate = project(self, qkv, positions)
        place = positions if positions.dim() == 1 else positions[0]
        kept = ((place < start) | (place >= end)).to(k.dtype)[:, None]
        return q, k * kept, v * kept, gate

    Qwen3NextAttention._project_qkv_gate = projected


def add_noise(relative: float) -> None:
    import torch
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    project = Qwen3NextAttention._project_qkv_gate

    def noisy(x: Any, width: int) -> Any:
        heads = x.view(len(x), -1, width)
        size = heads.float().pow(2).mean(-1, keepdim=True).sqrt()
        return (heads + relative * size * torch.randn_like(heads)).to(x.dtype).view_as(x)

    def projected(self: Any, qkv: Any, positions: Any) -> Any:
        q, k, v, gate = project(self, qkv, positions)
        return q, noisy(k, self.head_dim), noisy(v, self.head_dim), gate

    Qwen3NextAttention._project_qkv_gate = projected


def forget_states() -> None:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule

    for name in ("forward_native", "forward_cuda"):
        own = getattr(ChunkGatedDeltaRule, name)
        setattr(ChunkGatedDeltaRule, name, _without_state(own))


def _without_state(own: Callable[..., Any]) -> Callable[..., Any]:
    def rule(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["initial_state"] = kwargs["initial_state"] * 0
        return own(self, *args, **kwargs)

    return rule


def keep_no_states() -> None:
    from vllm.v1.worker import mamba_utils

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    mamba_utils.MambaSpecDecodeGPUContext.run_fused_postprocess_align = nothing
    mamba_utils.MambaSpecDecodeGPUContext.run_fused_precopy = nothing


def break_drafts() -> None:
    import torch
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MultiTokenPredictor

    own = Qwen3_5MultiTokenPredictor.forward

    def forward(
        self: Any, input_ids: Any, positions: Any, hidden_states: Any, *args: Any, **kwargs: Any
    ) -> Any:
        noise = torch.randn_like(hidden_states) * hidden_states.abs().mean()
        return own(self, input_ids, positions, noise, *args, **kwargs)

    Qwen3_5MultiTokenPredictor.forward = forward


WAYS: dict[str, Callable[..., None]] = {
    "band": lose_band,
    "noise": add_noise,
    "states": forget_states,
    "carry": keep_no_states,
    "drafts": break_drafts,
}


def inflict(wanted: dict[str, list[Any]]) -> None:
    for name, numbers in wanted.items():
        WAYS[name](*numbers)
