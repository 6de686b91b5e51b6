"""The model to train: transformers' implementation, an MTP layer, and rounding during training.

Rounding is straight-through: the forward pass uses the weights as the repositories store them, the
backward pass the exact weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import Qwen3_5MoeTextConfig, Qwen3_5MoeTextModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
)

from lab.model.original import LAYERS, Floats, is_int4
from lab.model.shape import BLOCK, GROUP, Shape, text_config

START = 0.035  # standard deviation of initial weights; a narrow model learns faster with more


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.active = False

    def forward(self, weight: Tensor) -> Tensor:
        if not self.active:
            return weight
        return weight + (self.rounded(weight.detach()) - weight.detach())

    def rounded(self, weight: Tensor) -> Tensor:
        """Each format defines it."""
        raise NotImplementedError


class Int4(Rounding):
    def rounded(self, weight: Tensor) -> Tensor:
        groups = weight.unflatten(-1, (-1, GROUP))
        scales = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-4).half().float()
        return (groups / scales).round().clamp(-8, 7).mul(scales).flatten(-2)


class BlockFp8(Rounding):
    def rounded(self, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        largest = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12)
        scales = (largest / 448).bfloat16().float()
        return (blocks / scales).to(torch.float8_e4m3fn).float().mul(scales).view(rows, columns)


class MtpLayer(nn.Module):
    """Predicts the token after next from a hidden state and the next token's embedding."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        attention = next(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(config, attention)])
        self.norm = Qwen3_5MoeRMSNorm(hidden, eps)
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        mixed = self.layers[0](self.fc(torch.cat(both, -1)), position_embeddings=rotary)
        drafted: Tensor = self.norm(mixed)
        return drafted


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        settings = {**text_config(shape, {"<|endoftext|>": 0}), "initializer_range": START}
        config = Qwen3_5MoeTextConfig(**settings)
        self.model = Qwen3_5MoeTextModel(config)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.mtp = MtpLayer(config)
        for part in (self.lm_head, self.mtp):
            part.apply(self.model._init_weights)
        for name, parameter in self.model.named_parameters():
            if name.endswith("dt_bias"):
                # The library's initial value forgets within a token; this remembers 10 to 1000.
                steps = torch.logspace(-3, -1, shape.linear_value_heads)
                parameter.data.copy_(steps + torch.log(-torch.expm1(-steps)))
            elif name.endswith("A_log"):
                parameter.data.zero_()
        self.roundings = list(self._add_roundings())

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """One MTP step: position t sees `hidden[t]` and token t+1; the last position is lost."""
        following = self.model.embed_tokens(tokens[:, 1:])
        positions = torch.arange(following.shape[1]).expand(3, following.shape[0], -1)
        rotary = self.model.rotary_emb(following, positions)
        drafted: Tensor = self.mtp(following, hidden[:, : following.shape[1]], rotary)
        return drafted

    def round_weights(self) -> None:
        for rounding in self.roundings:
            rounding.active = True

    def _add_roundings(self) -> list[Rounding]:
        added: list[Rounding] = []
        for path, module in list(self.model.layers.named_modules()):
            for name, _ in list(module.named_parameters(recurse=False)):
                rounding = _rounding_of(f"{LAYERS}.{path}.{name}")
                if rounding:
                    parametrize.register_parametrization(module, name, rounding, unsafe=True)
                    added.append(rounding)
        return added


def _rounding_of(name: str) -> Rounding | None:
    if ".shared_expert." in name:
        return BlockFp8()
    if is_int4(name) or ".mlp.experts." in name:
        return Int4()
    return None


def state(network: Network) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        plain = name.replace("parametrizations.", "").removesuffix(".original")
        if plain.startswith("model."):
            plain = "model.language_model." + plain.removeprefix("model.")
        tensors.update(_single_experts(plain, value.detach()))
    return tensors


def load_state(network: Network, weights: Mapping[str, Floats]) -> None:
    with torch.no_grad():
        for name, value in state(network).items():  # views of the network's own tensors
            value.copy_(torch.from_numpy(weights[name]))


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _single_experts(name: str, value: Tensor) -> dict[str, Tensor]:
    module, _, part = name.rpartition(".experts.")
    if not module:
        return {name: value}
    tensors: dict[str, Tensor] = {}
    for expert, weight in enumerate(value):
        prefix = f"{module}.experts.{expert}"
        if part == "gate_up_proj":
            gate, up = weight.chunk(2)
            tensors[f"{prefix}.gate_proj.weight"] = gate
            tensors[f"{prefix}.up_proj.weight"] = up
        else:
            tensors[f"{prefix}.down_proj.weight"] = weight
    return tensors
