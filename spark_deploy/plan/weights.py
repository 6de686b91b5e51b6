"""Bytes of weights, computed from a model's architecture instead of from its files.

Files can hold tensors twice or lack some; what the engine loads follows from the numbers of
``config.json``. INT4 in groups of 128: half a byte, a 16-bit scale and a 4-bit zero per group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_deploy.config.catalog.model import Architecture

_INT4 = 0.5 + 2 / 128 + 0.5 / 128
_INT8 = 1 + 2 / 128 + 1 / 128
_BF16 = 2.0


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of each part as the base tree stores it, and as the recipe replaces it."""

    experts_bytes: int
    attention_bytes: int  # full attention and GDN projections
    embedding_bytes: int
    head_bytes: int
    head_int8_bytes: int
    shared_bytes: int
    shared_fp8_bytes: int
    shared_int8_bytes: int
    routers_bytes: int
    vision_bytes: int
    mtp_bytes: int

    @property
    def tree_bytes(self) -> int:
        """Unique tensors of the base tree, MTP and vision included."""
        return (
            self.experts_bytes
            + self.attention_bytes
            + self.embedding_bytes
            + self.head_bytes
            + self.shared_bytes
            + self.routers_bytes
            + self.vision_bytes
            + self.mtp_bytes
        )


def of_one_rank(model: Architecture, ranks: int) -> Architecture:
    """Return the architecture with the heads that one of so many ranks has of the cache.

    Heads of keys and values are repeated where there are fewer than ranks.
    """
    net = model.linear_attention
    return replace(
        model,
        kv_heads=max(1, model.kv_heads // ranks),
        linear_attention=net
        and replace(net, key_heads=net.key_heads // ranks, value_heads=net.value_heads // ranks),
    )


def weights_of(model: Architecture) -> Weights:
    """Return the bytes of every part of ``model``."""
    expert = 3 * model.hidden * model.expert_width
    shared = model.layers * 3 * model.hidden * model.shared_expert_width
    matrix = model.vocabulary * model.hidden
    attention = model.attention_layers * _attention(model) + model.linear_layers * _gdn(model)
    return Weights(
        experts_bytes=round(model.layers * model.experts * expert * _INT4),
        attention_bytes=round(attention * _INT4),
        embedding_bytes=round(matrix * _BF16),
        head_bytes=round(matrix * _BF16),
        head_int8_bytes=round(matrix * _INT8),
        shared_bytes=round(shared * _BF16),
        shared_fp8_bytes=round(shared * (1 + 2 / 128**2)),
        shared_int8_bytes=round(shared * _INT8),
        routers_bytes=round(model.layers * model.experts * model.hidden * _BF16),
        vision_bytes=model.vision_bytes,
        mtp_bytes=_mtp(model),
    )


def _attention(model: Architecture) -> int:
    """Parameters of one full-attention layer; queries carry a gate, hence twice."""
    queries = 2 * model.attention_heads * model.head_width
    keys_values = 2 * model.kv_heads * model.head_width
    return model.hidden * (queries + keys_values + model.attention_heads * model.head_width)


def _gdn(model: Architecture) -> int:
    """Parameters of one gated delta net: qkv, z, a, b in; out."""
    net = model.linear_attention
    if net is None:
        return 0
    keys, values = net.key_heads * net.head_width, net.value_heads * net.head_width
    return model.hidden * (2 * keys + values + values + 2 * net.value_heads + values)


def _mtp(model: Architecture) -> int:
    """Bytes of the drafter: one layer of full attention and experts, and a joining matrix."""
    always, expert = drafter_bytes(model)
    return round(model.mtp_layers * (always + model.experts * expert))


def drafter_bytes(model: Architecture) -> tuple[float, float]:
    """Bytes of a drafter's layer that every draft reads, and of one of its experts."""
    scheme = _INT4 if model.mtp_scheme == "int4" else _BF16
    other = 3 * model.hidden * model.shared_expert_width + model.experts * model.hidden
    joining = 2 * model.hidden * model.hidden
    always = _attention(model) * scheme + (other + joining) * _BF16
    return always, 3 * model.hidden * model.expert_width * scheme
