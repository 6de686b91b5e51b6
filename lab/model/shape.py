"""The architecture of `lab-tiny` and its configuration files.

Quantized dimensions are multiples of 128, as in the real model. A packed row of zero points
contains eight outputs, so `in_proj_a` needs at least eight value heads; the engine's CPU kernels
for linear attention support head sizes 64 and 128.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP = 128  # input features that share an INT4 scale
BLOCK = 128  # edge of the square that shares an FP8 scale


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int = 4
    attention_interval: int = 4
    hidden: int = 256
    vocabulary: int = 1024
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 256
    shared_width: int = 384  # so that a swapped or transposed scale does not fit
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    linear_key_heads: int = 2
    linear_value_heads: int = 8
    linear_head_dim: int = 64
    conv_kernel: int = 4
    max_positions: int = 4096
    vision_depth: int = 2
    vision_hidden: int = 64
    vision_heads: int = 2
    vision_width: int = 128
    vision_positions: int = 64
    patch: int = 16
    temporal_patch: int = 2
    merge: int = 2

    @property
    def key_dim(self) -> int:
        return self.linear_key_heads * self.linear_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_value_heads * self.linear_head_dim

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0

    @property
    def layer_types(self) -> list[str]:
        return [
            "full_attention" if self.is_attention(layer) else "linear_attention"
            for layer in range(self.layers)
        ]


TINY = Shape()


_CONFIG: dict[str, Any] = json.loads(Path(__file__).with_name("config.json").read_text())
"""What does not depend on the shape."""


def text_config(shape: Shape, token_ids: dict[str, int]) -> dict[str, Any]:
    rotary_pairs = shape.head_dim // 8  # a quarter of the head is rotated, in pairs
    section = [rotary_pairs - 2 * (rotary_pairs // 3)] + 2 * [rotary_pairs // 3]
    constant = _CONFIG["text_config"]
    return {
        **constant,
        "eos_token_id": token_ids["<|endoftext|>"],
        "full_attention_interval": shape.attention_interval,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "layer_types": shape.layer_types,
        "linear_conv_kernel_dim": shape.conv_kernel,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "linear_value_head_dim": shape.linear_head_dim,
        "max_position_embeddings": shape.max_positions,
        "moe_intermediate_size": shape.expert_width,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rope_parameters": {**constant["rope_parameters"], "mrope_section": section},
        "shared_expert_intermediate_size": shape.shared_width,
        "vocab_size": shape.vocabulary,
    }


def model_config(shape: Shape, token_ids: dict[str, int]) -> dict[str, Any]:
    vision = {
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_width,
        "num_heads": shape.vision_heads,
        "num_position_embeddings": shape.vision_positions,
        "out_hidden_size": shape.hidden,
        "patch_size": shape.patch,
        "spatial_merge_size": shape.merge,
        "temporal_patch_size": shape.temporal_patch,
    }
    return {
        **_CONFIG,
        "image_token_id": token_ids["<|image_pad|>"],
        "video_token_id": token_ids["<|video_pad|>"],
        "vision_end_token_id": token_ids["<|vision_end|>"],
        "vision_start_token_id": token_ids["<|vision_start|>"],
        "text_config": text_config(shape, token_ids),
        "vision_config": {**_CONFIG["vision_config"], **vision},
    }


def int4_config(shape: Shape) -> dict[str, Any]:
    kept = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
    names = [
        f"model.language_model.layers.{layer}.mlp.{part}"
        for layer in range(shape.layers)
        for part in (*kept, "shared_expert_gate")
    ]
    return {
        "bits": 4,
        "block_name_to_quantize": "model.language_model.layers",
        "data_type": "int",
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in names},
        "group_size": GROUP,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": True,
    }


def fp8_config(not_converted: list[str]) -> dict[str, Any]:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": not_converted,
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
