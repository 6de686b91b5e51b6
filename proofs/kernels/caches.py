"""KV caches of an attention layer without an engine: a common interface to four backends.

Every request has ``context`` tokens; its last tokens are those of the queries.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def open_backend(
    patch: Callable[[Any, str, Any], None],
    own: bool,
    preset: str,
    shape: tuple[int, int, int],
    tokens: int,
) -> Any:
    """Return a layer's backend, the plugin's (``own``) or the stock one, for up to ``tokens``.

    ``patch`` is a function like ``setattr``; ``shape`` is heads, KV heads and head size.
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


def dequantize_slots(slots: Any, config: Any) -> tuple[Any, Any]:
    """Return keys and values in float32.

    A slot holds the key (FP8, or centroid numbers and a 16-bit norm) and then the value (numbers,
    a 16-bit scale and a 16-bit smallest value); numbers lie one after the other, low bits first.
    ``slots`` are bytes ``[tokens, heads, slot]``; ``config`` is the engine's ``TurboQuantConfig``.
    """
    size, key_bytes = config.head_dim, config.key_packed_size
    if config.key_fp8:
        key = slots[..., :size].contiguous().view(torch.float8_e4m3fn).float()
    else:
        key = _rotated_key(slots[..., :key_bytes], config) @ _hadamard(size, slots.device)
    bits = config.effective_value_quant_bits
    data_bytes = size * bits // 8
    value = _unpack(slots[..., key_bytes : key_bytes + data_bytes], bits, size).float()
    scale = _read_half(slots, key_bytes + data_bytes)
    smallest = _read_half(slots, key_bytes + data_bytes + 2)
    return key, value * scale + smallest


def _rotated_key(part: Any, config: Any) -> Any:
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids

    size, bits = config.head_dim, config.key_mse_bits
    centroids = get_centroids(size, config.centroid_bits).to(part.device)
    keys = centroids[_unpack(part[..., : size * bits // 8], bits, size).long()]
    if config.norm_correction:
        keys = keys / keys.norm(dim=-1, keepdim=True)
    return keys * _read_half(part, size * bits // 8)


def _unpack(data: Any, bits: int, count: int) -> Any:
    shifts = torch.arange(8, device=data.device, dtype=torch.uint8)
    stream = (data.unsqueeze(-1) >> shifts) & 1
    groups = stream.flatten(-2)[..., : count * bits].unflatten(-1, (count, bits)).int()
    return (groups << torch.arange(bits, device=data.device)).sum(-1)


def _read_half(slots: Any, place: int) -> Any:
    return slots[..., place : place + 2].contiguous().view(torch.float16).float()


def _hadamard(size: int, device: Any) -> Any:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


BLOCK = 16
SEGMENTS = 16
"""Of a row, as TRITON_ATTN takes them on every device but capability 12.0."""
SCALE_BYTES = 4
CHUNK = 128
"""Queries of a request above which they are part of a prompt."""
UPSTREAM = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")


class Cache:
    item_type: Any = torch.uint8
    impl: Any = None

    def __init__(self, kind: str, shape: tuple[int, int, int], requests: int, context: int) -> None:
        self.kind, self.shape, self.requests, self.context = kind, shape, requests, context
        self.layer: Any = torch.nn.Module()
        self.prepare()
        blocks = requests * -(-context // BLOCK)
        _, heads, _ = shape
        self.store = torch.zeros(
            (blocks, BLOCK, heads, self.items()), dtype=self.item_type, device="cuda"
        )
        self.cache = self.store.transpose(1, 2)
        self.table = torch.arange(blocks, dtype=torch.int32, device="cuda").view(requests, -1)
        self.lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")

    def prepare(self) -> None:
        pass

    def items(self) -> int:
        """Each format defines it."""
        raise NotImplementedError

    def bytes_per_token(self) -> int:
        return self.store.element_size() * self.store.shape[2] * self.store.shape[3]

    def write(self, request: int, keys: Tensor, values: Tensor) -> None:
        first = int(self.table[request, 0]) * BLOCK
        slots = first + torch.arange(len(keys), device="cuda")
        self.impl.do_kv_cache_update(self.layer, keys, values, self.cache, slots)

    def attention(self, queries: Tensor) -> Callable[[], Tensor]:
        """Return attention of queries ``[requests * each, heads, size]``, ready to be captured.

        Each format defines it.
        """
        raise NotImplementedError

    def forward(self, queries: Tensor, metadata: Any) -> Callable[[], Tensor]:
        new = queries[:, : self.shape[1]].contiguous()

        def attend() -> Tensor:
            out = torch.empty_like(queries)
            self.impl.forward(self.layer, queries, new, new, self.cache, metadata, out)
            return out

        return attend

    def starts(self, each: int) -> Tensor:
        return torch.arange(self.requests + 1, dtype=torch.int32, device="cuda") * each


class FlashCache(Cache):
    item_type = torch.bfloat16

    def items(self) -> int:
        return 2 * self.shape[2]

    def write(self, request: int, keys: Tensor, values: Tensor) -> None:
        first = int(self.table[request, 0]) * BLOCK
        self.store.flatten(0, 1)[first : first + len(keys)] = torch.cat([keys, values], -1)

    def attention(self, queries: Tensor) -> Callable[[], Tensor]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        size, each = self.shape[2], len(queries) // self.requests
        starts = self.starts(each)
        return lambda: flash_attn_varlen_func(
            q=queries, k=self.store[..., :size], v=self.store[..., size:],
            cu_seqlens_q=starts, max_seqlen_q=each,
            seqused_k=self.lengths, max_seqlen_k=self.context, block_table=self.table,
            softmax_scale=size**-0.5, causal=True, fa_version=3,
        )  # fmt: skip


class FlashInferCache(FlashCache):
    """16 bits through FlashInfer's kernel without Hopper instructions, as on capability 12.x."""

    def attention(self, queries: Tensor) -> Callable[[], Tensor]:
        import flashinfer

        heads, kv_heads, size = self.shape
        each = len(queries) // self.requests
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")
        pages = self.starts(self.table.shape[1])
        wrapper.plan(
            self.starts(each), pages, self.table.flatten(),
            torch.full((self.requests,), (self.context - 1) % BLOCK + 1, dtype=torch.int32),
            heads, kv_heads, size, BLOCK,
            causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        cache = (self.store[..., :size], self.store[..., size:])
        return lambda: wrapper.run(queries, cache)


class TritonCache(Cache):
    """The engine's Triton attention: 16 bits (``auto``) or a scale for each token and head."""

    def prepare(self) -> None:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

        heads, kv_heads, size = self.shape
        self.impl = TritonAttentionImpl(heads, size, size**-0.5, kv_heads, None, None, self.kind)
        one = torch.ones((), device="cuda")
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        self.item_type = {
            "auto": torch.bfloat16,
            "int8_per_token_head": torch.int8,
        }.get(self.kind, torch.uint8)

    def items(self) -> int:
        size = self.shape[2]
        if self.kind == "auto":
            return 2 * size
        return 2 * ((size // 2 if self.kind.startswith("int4") else size) + SCALE_BYTES)

    def attention(self, queries: Tensor) -> Callable[[], Tensor]:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

        heads, kv_heads, size = self.shape
        each = len(queries) // self.requests
        # The builder gives INT4 scratch for a token of each request only.
        rows = self.requests if self.kind.startswith("int4") else len(queries)
        output, largest, total = (
            torch.empty((rows, heads, SEGMENTS, *last), dtype=torch.float32, device="cuda")
            for last in ((size,), (), ())
        )
        metadata = TritonAttentionMetadata(
            num_actual_tokens=len(queries), max_query_len=each,
            query_start_loc=self.starts(each), max_seq_len=self.context,
            seq_lens=self.lengths, block_table=self.table, slot_mapping=self.lengths,
            seq_threshold_3D=128 // kv_heads, num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=output, softmax_segm_max=largest, softmax_segm_expsum=total,
            causal=True,
        )  # fmt: skip
        return self.forward(queries, metadata)


class TurboQuantCache(Cache):
    def prepare(self) -> None:
        self.impl = open_backend(setattr, True, self.kind, self.shape, self.context)
        self.impl.max_num_kv_splits = 32  # the engine's default

    def items(self) -> int:
        return int(self.impl.tq_config.slot_size_aligned)

    def attention(self, queries: Tensor) -> Callable[[], Tensor]:
        from vllm.v1.attention.backends.turboquant_attn import TurboQuantMetadata

        each = len(queries) // self.requests
        self.impl.speculates = each > 1
        metadata = TurboQuantMetadata(
            seq_lens=self.lengths, slot_mapping=self.lengths, block_table=self.table,
            query_start_loc=self.starts(each), num_actual_tokens=len(queries),
            max_query_len=each, max_seq_len=self.context,
            is_prefill=False, num_decodes=self.requests, num_decode_tokens=len(queries),
        )  # fmt: skip
        if each > CHUNK:
            metadata.is_prefill, metadata.num_decodes, metadata.num_decode_tokens = True, 0, 0
            metadata.query_start_loc_cpu = metadata.query_start_loc.cpu()
            metadata.seq_lens_cpu = self.lengths.cpu()
        return self.forward(queries, metadata)


def make_cache(kind: str, shape: tuple[int, int, int], requests: int, context: int) -> Cache:
    """Return a cache of a format; ``flash``, ``flashinfer`` and ``auto`` hold 16 bits."""
    sixteen: dict[str, type[Cache]] = {"flash": FlashCache, "flashinfer": FlashInferCache}
    quantized = TurboQuantCache if kind.startswith("turboquant") else TritonCache
    return sixteen.get(kind, quantized)(kind, shape, requests, context)
