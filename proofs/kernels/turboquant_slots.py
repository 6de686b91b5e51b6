"""A TurboQuant backend without an engine, and keys and values of its cache slots."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def open_backend(
    patch: Callable[[Any, str, Any], None],
    own: bool,
    preset: str,
    shape: tuple[int, int, int],
    tokens: int,
) -> Any:
    """Return the plugin's or the stock backend of a layer.

    Args:
        patch: sets an attribute of a module, such as ``monkeypatch.setattr``.
        own: the plugin's.
        preset: cache format, such as ``turboquant_k8v4``.
        shape: heads, KV heads and head size.
        tokens: longest context.
    """
    from spark_vllm import turboquant
    from vllm.v1.attention.backends import turboquant_attn as stock

    config = SimpleNamespace(
        attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=8),
        model_config=SimpleNamespace(max_model_len=tokens),
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
    )
    for module in (stock, turboquant):
        patch(module, "get_current_vllm_config", lambda: config)
    heads, kv_heads, size = shape
    backend = turboquant.SparkTurboQuantImpl if own else stock.TurboQuantAttentionImpl
    return backend(heads, size, size**-0.5, kv_heads, kv_cache_dtype=preset)


def dequantise_slots(slots: Any, config: Any) -> tuple[Any, Any]:
    """Return keys and values in float32.

    A slot holds the key (FP8, or centroid numbers and a 16-bit norm) and then the value (numbers,
    a 16-bit scale and a 16-bit smallest value); numbers lie one after the other, low bits first.

    Args:
        slots: bytes ``[tokens, heads, slot]``.
        config: the engine's ``TurboQuantConfig``: bit widths and sizes of the format.
    """
    size, key_bytes = config.head_dim, config.key_packed_size
    if config.key_fp8:
        key = slots[..., :size].contiguous().view(torch.float8_e4m3fn).float()
    else:
        key = _rotated_key(slots[..., :key_bytes], config) @ _hadamard(size, slots.device)
    bits = config.effective_value_quant_bits
    data_bytes = size * bits // 8
    value = _numbers(slots[..., key_bytes : key_bytes + data_bytes], bits, size).float()
    scale = _half(slots, key_bytes + data_bytes)
    smallest = _half(slots, key_bytes + data_bytes + 2)
    return key, value * scale + smallest


def _rotated_key(part: Any, config: Any) -> Any:
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids

    size, bits = config.head_dim, config.key_mse_bits
    centroids = get_centroids(size, config.centroid_bits).to(part.device)
    keys = centroids[_numbers(part[..., : size * bits // 8], bits, size).long()]
    if config.norm_correction:
        keys = keys / keys.norm(dim=-1, keepdim=True)
    return keys * _half(part, size * bits // 8)


def _numbers(data: Any, bits: int, count: int) -> Any:
    places = torch.arange(8, device=data.device, dtype=torch.uint8)
    stream = (data.unsqueeze(-1) >> places) & 1
    groups = stream.flatten(-2)[..., : count * bits].unflatten(-1, (count, bits)).int()
    return (groups << torch.arange(bits, device=data.device)).sum(-1)


def _half(slots: Any, place: int) -> Any:
    return slots[..., place : place + 2].contiguous().view(torch.float16).float()


def _hadamard(size: int, device: Any) -> Any:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5
