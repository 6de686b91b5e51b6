"""The recall model's dimensions: real head sizes, every expert active, two layers of attention."""

from __future__ import annotations

from lab.model.shape import Shape
from proofs.recall.language import VOCABULARY

RECALL = Shape(
    layers=4,
    attention_interval=2,
    hidden=256,
    vocabulary=VOCABULARY,
    experts=4,
    experts_per_token=4,  # all of them: no routing flips between kernels
    expert_width=256,
    shared_width=256,
    heads=4,
    kv_heads=2,
    head_dim=256,  # that of Qwen3.5, as are the next ones' 128
    linear_key_heads=2,
    linear_value_heads=8,
    linear_head_dim=128,
    max_positions=262144,
)
