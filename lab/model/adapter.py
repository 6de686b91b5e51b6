"""A LoRA adapter in PEFT's format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 8
_SCALE = 2.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Matrices = dict[str, torch.nn.Parameter]


def add_adapter(model: Any) -> Matrices:
    """Freeze a model and add trainable matrices; return them by name in the adapter file."""
    model.requires_grad_(False)
    matrices: Matrices = {}
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] not in TARGETS:
            continue
        down = torch.nn.Parameter(torch.randn(RANK, module.in_features) / module.in_features**0.5)
        up = torch.nn.Parameter(torch.zeros(module.out_features, RANK))
        module.register_parameter("lora_down", down)
        module.register_parameter("lora_up", up)
        module.register_forward_hook(_add_output)
        matrices |= {
            f"base_model.model.{name}.lora_A.weight": down,
            f"base_model.model.{name}.lora_B.weight": up,
        }
    return matrices


def _add_output(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    return output + _SCALE * (inputs[0] @ module.lora_down.T) @ module.lora_up.T


def write(folder: Path, matrices: Matrices, base: str) -> None:
    folder.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": RANK, "lora_alpha": int(_SCALE * RANK), "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(TARGETS), "modules_to_save": None, "inference_mode": True,
        "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    tensors = {
        name: part.detach().to(torch.bfloat16).contiguous() for name, part in matrices.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
