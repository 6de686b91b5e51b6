"""Compile the kernels of the engine's Triton attention for caches with a scale per token and head.

Like ``engine_launches``: the engine's metadata builder, backend and launchers choose the kernels
and their block sizes.
"""

from __future__ import annotations

import ast
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from engine_launches import (
    FP8,
    HEAD_SIZE,
    KV_HEADS,
    OPS,
    Stub,
    Tensor,
    Usage,
    engine,
    module,
    read_usage,
)

BACKEND = "vllm.v1.attention.backends.triton_attn"
FORMATS = "vllm.v1.kv_cache_interface"
INT4 = f"{OPS}.int4_per_token_head"
REAL = ["vllm.utils.math_utils", f"{OPS}.triton_attention_helpers"]
REAL += [f"{OPS}.triton_unified_attention", INT4, f"{OPS}.triton_reshape_and_cache_flash", BACKEND]
FILES = {f"{name.replace('.', '/')}.py" for name in [*REAL, FORMATS]}
DRAFTS, PROMPT = 2, 2048
"""DRAFTS as in v2-tq; PROMPT is the number of tokens in a step of a prompt."""
SCALE_BYTES = 4


class Builder(Stub):
    """What the engine's metadata builders inherit."""

    def __init__(self, spec: Any, layers: Any, config: Any, device: Any) -> None:
        self.vllm_config = config


def cache_formats(root: Path) -> ModuleType:
    """Return the engine's list of formats; its module needs a Python that we do not require."""
    wanted = ("KVQuantMode", "get_kv_quant_mode", "is_quantized_kv_cache")
    tree = ast.parse((root / f"{FORMATS.replace('.', '/')}.py").read_text())
    body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    formats = module(FORMATS, IntEnum=IntEnum)
    exec(compile(ast.Module(body, []), FORMATS, "exec"), formats.__dict__)
    return formats


def stubs(root: Path, heads: int) -> list[ModuleType]:
    envs = module("vllm.envs", VLLM_BATCH_INVARIANT=False, VLLM_TRITON_USE_TD=None)
    quantization = "vllm.model_executor.layers.quantization.utils.quant_utils"
    return [
        envs,
        module("vllm", envs=envs),
        module("vllm._aiter_ops"),
        module("vllm.platforms.interface"),
        module("vllm.config.cache", get_kv_cache_dtype_handler=lambda _: None),
        module("vllm.utils.torch_utils", get_dtype_size=lambda _: SCALE_BYTES),
        module(
            "vllm.v1.attention.backend",
            AttentionMetadataBuilder=Builder,
            AttentionType=SimpleNamespace(
                DECODER="decoder", ENCODER="encoder", ENCODER_ONLY="only"
            ),
        ),
        module(
            "vllm.v1.attention.backends.utils",
            get_num_attention_heads_from_layers=lambda *_: heads,
        ),
        module(f"{OPS}.triton_prefill_attention"),
        module(quantization, FP8_DTYPE="float8_e4m3fn", get_fp8_min_max=lambda: (FP8.min, FP8.max)),
        cache_formats(root),
    ]


def engine_config(requests: int) -> SimpleNamespace:
    steps = [(1 + DRAFTS) * count for count in range(1, requests + 1)]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_kv_heads=lambda _: KV_HEADS,
            get_head_size=lambda: HEAD_SIZE,
            rswa_window=None,
        ),
        parallel_config=None,
        compilation_config=SimpleNamespace(
            cudagraph_mode=Stub.FULL_AND_PIECEWISE, cudagraph_capture_sizes=steps
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS, parallel_drafting=False),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )


def launches(
    root: Path, kind: str, heads: int, block: int, requests: int
) -> dict[str, list[Usage]]:
    """Return the usage of the kernels that store tokens and compute the attention of a step.

    Steps are: a token of each request (``decode``), with drafts (``verify``), of a prompt.

    Args:
        root: where the engine's sources are.
        kind: a format with a scale for each token and head.
        heads: query heads.
        block: tokens in a block of the cache.
        requests: answered at once.
    """
    blocks = 4096 if requests % 16 == 0 else 4097
    used: dict[str, list[Usage]] = {}
    with (
        engine(root, REAL, stubs(root, heads)) as launched,
        patch.object(Tensor, "address", 4096),
        # A CUDA library rotates tokens.
        patch.object(sys.modules[INT4], "single_rht", lambda tensor, inverse=False: tensor),
    ):
        backend = sys.modules[BACKEND]
        impl = backend.TritonAttentionImpl(
            heads, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, None, None, kind
        )
        spec = SimpleNamespace(block_size=block, kv_quant_mode=impl._kv_quant_mode)
        builder = backend.TritonAttentionMetadataBuilder(spec, [], engine_config(requests), None)
        items = 2 * ((HEAD_SIZE // 2 if kind.startswith("int4") else HEAD_SIZE) + SCALE_BYTES)
        item = "int8" if kind.startswith("int8") else "uint8"
        strides = (block * KV_HEADS * items, items, KV_HEADS * items, 1)
        cache = Tensor(blocks, KV_HEADS, block, items, dtype=item, strides=strides)
        key = Tensor(PROMPT, KV_HEADS, HEAD_SIZE, dtype="bfloat16")
        impl.do_kv_cache_update(None, key, key, cache, Tensor(PROMPT, dtype="int64"))
        used["store"] = [read_usage(kernel) for kernel in launched]
        steps = {"decode": (requests, 1), "verify": (requests, 1 + DRAFTS), "prompt": (1, PROMPT)}
        for step, (batch, each) in steps.items():
            launched.clear()
            common = SimpleNamespace(
                num_reqs=batch,
                num_actual_tokens=batch * each,
                max_query_len=each,
                max_seq_len=131072,
                query_start_loc=Tensor(batch + 1, dtype="int32"),
                seq_lens=Tensor(batch, dtype="int32"),
                block_table_tensor=Tensor(batch, blocks, dtype="int32"),
                slot_mapping=Tensor(batch * each, dtype="int64"),
                causal=True,
                mm_req_doc_ranges=None,
                rswa_prefix_lens=None,
            )
            query = Tensor(batch * each, heads, HEAD_SIZE, dtype="bfloat16")
            impl.forward(None, query, key, key, cache, builder.build(0, common), query)
            used[step] = [read_usage(kernel) for kernel in launched]
    return used
