"""The models that ``lab.model.published`` writes, and how an engine without a GPU serves them."""

from __future__ import annotations

from typing import Any

# All that an owner of such hosts would write.
PROFILE: dict[str, Any] = {
    "based_on": "plain",
    "summary": "Plain models on the CPU engine",
    "choose_when": "you try them in the lab",
    "limits": {"max_sequences": 4, "max_batched_tokens": 2048, "memory_fraction": 0.8},
    "kv_cache": {"size_gib": 0.25},
    # Without a GPU its blocks are this large by themselves; said, so that the plan counts them.
    "options": {"enforce-eager": True, "dtype": "bfloat16", "block-size": 128},
}
DECODERS = {
    "tiny-sliding": "Gemma3ForCausalLM",
    "tiny-moe": "Qwen3MoeForCausalLM",
    "tiny-llama": "LlamaForCausalLM",
    "tiny-qwen3": "Qwen3ForCausalLM",
}
DRAFTS = {"method": "draft_model", "tokens": 2, "repository": "org/tiny-draft"}
WORDS = {"method": "ngram", "tokens": 3, "longest_match": 4, "shortest_match": 2}
