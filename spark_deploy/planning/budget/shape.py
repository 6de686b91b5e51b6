"""Blocks of the engine's KV cache: how many bytes one takes, and how many a request needs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of one model and profile."""

    block_tokens: int
    block_bytes: int  # of one block over the layers of one group
    attention_groups: int
    state_blocks: int  # blocks that one request needs for its states
    window_groups: int = 0  # of layers that keep a window of the context only
    window_tokens: int = 0

    def request_blocks(self, tokens: int) -> int:
        """Blocks of one request of this length."""
        pages = self.attention_groups * math.ceil(tokens / self.block_tokens)
        if self.window_groups:
            # One more: a window begins anywhere in a block.
            kept = math.ceil(min(tokens, self.window_tokens) / self.block_tokens) + 1
            pages += self.window_groups * kept
        return pages + self.state_blocks

    def held_tokens(self, cache_bytes: int, sequences: int, longest: int) -> int:
        """Tokens of context that fit beside the states of so many requests."""
        blocks = cache_bytes // self.block_bytes
        if self.window_groups:
            return int(blocks / self.request_blocks(longest) * longest)
        left = max(blocks - self.state_blocks * sequences, 0)
        return left // max(1, self.attention_groups) * self.block_tokens


def group_layers(kinds: Iterable[int]) -> int:
    """Return how many layers one group has: every group of the cache has as many."""
    counts = sorted(count for count in kinds if count) or [1]
    return counts[-1] if counts[-1] < 1.25 * counts[0] else counts[0]
