"""A drafter that computes logits only for the most frequent tokens.

The target verifies drafts with all rows of its head, so answers do not change.
"""

from __future__ import annotations

import torch
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP

from spark_vllm.head.compute import Head


class DraftHead:
    """Rows of a head, by token id; all other logits are -inf."""

    def __init__(self, head: Head, token_ids: torch.Tensor) -> None:
        self.head, self.token_ids = head, token_ids

    def __call__(self, x: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return logits ``[tokens, vocabulary]`` for hidden states ``[tokens, inputs]``."""
        logits = x.new_full((x.shape[0], vocabulary), float("-inf"))
        return logits.index_copy_(1, self.token_ids, self.head(x))


class SparkQwen35MoeMTP(Qwen3_5MoeMTP):
    """Uses the draft head, if any, of the LM head that it shares with the target."""

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor | None:
        head = getattr(self.lm_head.quant_method, "draft_head", None)
        if head is None:
            return super().compute_logits(hidden_states, spec_step_idx)
        logits: torch.Tensor = head(hidden_states, self.config.vocab_size)
        return logits
