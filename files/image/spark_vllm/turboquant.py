"""Fixes three silent bugs in the engine's TurboQuant attention backend.

target: vllm.v1.attention.backends.turboquant_attn (0.30.0 to 0.33.0), by subclass.
why:
  1. A verify step of speculative decoding (1 + N tokens per request) is captured in a FULL CUDA
     graph over a Python loop with the dummy lengths of the capture (vllm-project/vllm#52475).
  2. With asynchronous scheduling the lengths of verify rows on the CPU are only an upper bound.
  3. A fresh prompt batched with shorter rows that have a cached prefix makes those rows ignore
     their cache (vllm-project/vllm#46461).
how: verify rows become decode rows, one per token, with lengths computed on the device inside the
  captured region; the path for fresh prompts runs only if every row is a fresh prompt.
remove when: the engine's builder sets ``supports_spec_as_decode=True``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.turboquant_attn import (
    TurboQuantAttentionBackend,
    TurboQuantAttentionImpl,
    TurboQuantMetadata,
    TurboQuantMetadataBuilder,
)
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized


class SparkTurboQuantBackend(TurboQuantAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[SparkTurboQuantImpl]:
        return SparkTurboQuantImpl

    @staticmethod
    def get_builder_cls() -> type[SparkTurboQuantBuilder]:
        return SparkTurboQuantBuilder


class SparkTurboQuantBuilder(TurboQuantMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def _reserve_workspace(self) -> None:
        """Reserve scratch memory for every token of a verify step, not for one per request."""
        super()._reserve_workspace()
        speculation = self.vllm_config.speculative_config
        if speculation is None or not is_workspace_manager_initialized():
            return
        model = self.vllm_config.model_config
        rows = self.vllm_config.scheduler_config.max_num_seqs * (
            1 + speculation.num_speculative_tokens
        )
        heads = model.get_num_attention_heads(self.vllm_config.parallel_config)
        size = self.kv_cache_spec.head_size
        splits = self.vllm_config.attention_config.tq_max_kv_splits_for_cuda_graph
        current_workspace_manager().get_simultaneous(
            ((rows, heads, splits, size + 1), torch.float32),
            ((rows, heads, size), model.dtype),
            ((rows, heads), torch.float32),
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TurboQuantMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.is_prefill = metadata.num_decode_tokens < metadata.num_actual_tokens
        return metadata


class SparkTurboQuantImpl(TurboQuantAttentionImpl):
    """Computes verify rows token by token; checks every row before the fast path."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.speculates = get_current_vllm_config().speculative_config is not None

    def _decode_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.speculates:
            attn_metadata = expand_to_tokens(attn_metadata, query.shape[0])
        return super()._decode_attention(query, kv_cache, attn_metadata, *args, **kwargs)

    def _prefill_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not has_only_fresh_prompts(attn_metadata):
            # If max_query_len equals max_seq_len, the engine ignores the caches of all rows.
            longest = max(attn_metadata.max_seq_len, attn_metadata.max_query_len) + 1
            attn_metadata = replace(attn_metadata, max_seq_len=longest)
        return super()._prefill_attention(
            query, key, value, kv_cache, attn_metadata, *args, **kwargs
        )


def expand_to_tokens(metadata: TurboQuantMetadata, tokens: int) -> TurboQuantMetadata:
    """Return metadata with a row per token: the token's length and its request's blocks.

    The metadata is computed on the device with fixed shapes, so it is safe in a CUDA graph and
    independent of CPU lengths.
    """
    ends = metadata.query_start_loc[1:]
    token = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    request = torch.searchsorted(ends, token, right=True).clamp_(max=ends.shape[0] - 1)
    # The last token of a request attends to the full length, each earlier token to one less.
    lengths = metadata.seq_lens[request] - (ends[request] - token) + 1
    return replace(
        metadata,
        seq_lens=lengths.clamp_(min=1).to(metadata.seq_lens.dtype),
        block_table=metadata.block_table[request],
    )


def has_only_fresh_prompts(metadata: TurboQuantMetadata) -> bool:
    """Return whether CPU lengths show that no row has a cached prefix; False without lengths."""
    if metadata.seq_lens_cpu is None or metadata.query_start_loc_cpu is None:
        return False
    lengths = metadata.query_start_loc_cpu[1:] - metadata.query_start_loc_cpu[:-1]
    return bool((metadata.seq_lens_cpu[: len(lengths)] == lengths).all())
