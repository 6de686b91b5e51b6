"""An INT4 base of three layers, with the real names and random bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lab.model.safetensors import INDEX
from tests.unit.checkpoint.builder_shards import Raw, bf16_tensor, write_shard

HIDDEN, WIDTH, VOCABULARY, LAYERS, EXPERTS, GROUP = 256, 384, 64, 3, 2, 128
TEXT = "model.language_model."


class Random:
    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def bf16(self, *shape: int) -> Raw:
        return bf16_tensor(self._random.normal(0, 0.05, shape).astype(np.float32))

    def int4(self, out: int, width: int) -> dict[str, Raw]:
        packed = self._random.integers(0, 2**32, (width // 8, out), np.uint32)
        scales = self._random.uniform(0.001, 0.01, (width // GROUP, out)).astype(np.float16)
        zeros = np.full((width // GROUP, out // 8), 0x77777777, np.uint32)
        return {
            "qweight": Raw("I32", packed.shape, packed.tobytes()),
            "scales": Raw("F16", scales.shape, scales.tobytes()),
            "qzeros": Raw("I32", zeros.shape, zeros.tobytes()),
        }


def _shared(prefix: str) -> dict[str, tuple[int, int]]:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {f"{prefix}.mlp.shared_expert.{part}_proj": shape for part, shape in shapes.items()}


def _packed(prefix: str) -> dict[str, tuple[int, int]]:
    modules = {
        f"{prefix}.mlp.experts.{expert}.{part}_proj": (HIDDEN, HIDDEN)
        for expert in range(EXPERTS)
        for part in ("gate", "up", "down")
    }
    return {**modules, **{f"{prefix}.self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}}


def _small(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}.self_attn.q_norm.weight": (64,),
        f"{prefix}.self_attn.k_norm.weight": (64,),
        f"{prefix}.mlp.gate.weight": (EXPERTS, HIDDEN),
        f"{prefix}.mlp.shared_expert_gate.weight": (1, HIDDEN),
    }


def _target(random: Random) -> dict[str, Raw]:
    tensors: dict[str, Raw] = {f"{TEXT}embed_tokens.weight": random.bf16(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"{TEXT}layers.{layer}"
        for module, shape in _packed(prefix).items():
            tensors |= {f"{module}.{part}": raw for part, raw in random.int4(*shape).items()}
        for module, shape in _shared(prefix).items():
            tensors[f"{module}.weight"] = random.bf16(*shape)
        tensors |= {name: random.bf16(*shape) for name, shape in _small(prefix).items()}
    tensors[f"{TEXT}norm.weight"] = random.bf16(HIDDEN)
    tensors["lm_head.weight"] = random.bf16(VOCABULARY, HIDDEN)
    return tensors


def _drafter(random: Random) -> dict[str, Raw]:
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": (HIDDEN,),
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        **_small("mtp.layers.0"),
    }
    linear = {**_packed("mtp.layers.0"), **_shared("mtp.layers.0")}
    shapes |= {f"{module}.weight": shape for module, shape in linear.items()}
    return {name: random.bf16(*shape) for name, shape in shapes.items()}


def base_config() -> dict[str, Any]:
    sixteen = {"bits": 16, "data_type": "float"}
    shared = [name for n in range(LAYERS) for name in _shared(f"{TEXT}layers.{n}")]
    return {
        "text_config": {"mtp_num_hidden_layers": 1, "num_experts": EXPERTS},
        "quantization_config": {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": f"{TEXT}layers",
            "extra_config": dict.fromkeys(shared, sixteen),
        },
    }


def write_base(base: Path) -> Path:
    random = Random(seed=20)
    base.mkdir()
    target, index = _target(random), {}
    half = len(target) // 2
    files = {
        "model-00001-of-00002.safetensors": dict(list(target.items())[:half]),
        "model-00002-of-00002.safetensors": dict(list(target.items())[half:]),
        "model_extra_tensors.safetensors": _drafter(random),
    }
    for file, tensors in files.items():
        write_shard(base / file, tensors)
        index.update(dict.fromkeys(tensors, file))
    (base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (base / "config.json").write_text(json.dumps(base_config()))
    return base
