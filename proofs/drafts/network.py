"""Draft models for training, for all anchors of a text at once.

An anchor is the last position with hidden states of the target; the token after it is known.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from proofs.drafts.trees import (
    EPSILON,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MASK_TOKEN,
    THETA,
    TOKENS,
    shapes,
)


class Draft(nn.Module):
    kind = ""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.held = nn.ParameterDict()
        for name, size in shapes(self.kind).items():
            drawn = torch.randn(size, generator=generator) * size[-1] ** -0.5
            start = torch.ones(size) if "norm" in name else drawn
            self.held[name.replace(".", "/")] = nn.Parameter(start)

    def weight(self, name: str) -> Tensor:
        return self.held[name.replace(".", "/") + "/weight"]

    def norm(self, name: str, values: Tensor) -> Tensor:
        return functional.rms_norm(values, values.shape[-1:], self.weight(name), EPSILON)

    def times(self, name: str, values: Tensor) -> Tensor:
        return functional.linear(values, self.weight(name))

    def heads(self, layer: int, part: str, values: Tensor) -> Tensor:
        """Key-value heads are repeated per query head."""
        heads = self.times(f"layers.{layer}.self_attn.{part}_proj", values)
        heads = heads.unflatten(-1, (-1, HEAD_DIM))
        if self.kind == "dflash" and part != "v":
            heads = self.norm(f"layers.{layer}.self_attn.{part}_norm", heads)
        return heads if part == "q" else heads.repeat_interleave(HEADS // KV_HEADS, dim=-2)

    def mlp(self, layer: int, values: Tensor) -> Tensor:
        prefix = f"layers.{layer}.mlp."
        gate = functional.silu(self.times(f"{prefix}gate_proj", values))
        return self.times(f"{prefix}down_proj", gate * self.times(f"{prefix}up_proj", values))

    def out(self, layer: int, attended: Tensor) -> Tensor:
        return self.times(f"layers.{layer}.self_attn.o_proj", attended.flatten(-2))


def turned(values: Tensor, places: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    rates = THETA ** -(torch.arange(half, device=values.device) / half)
    angles = (places[..., None] * rates)[..., None, :]
    first, second = values.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class DFlash(Draft):
    """Drafts a block: the known token and masks attend to each other and to earlier states."""

    kind = "dflash"

    def forward(self, embedding: Tensor, tokens: Tensor, seen: Tensor, anchors: Tensor) -> Tensor:
        """Return final states [row, anchor, drafted, hidden].

        ``embedding`` and ``seen`` (hidden states per token) are the target's.
        """
        rows, count = anchors.shape
        context = self.norm("hidden_norm", self.times("fc", seen))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        ahead = torch.arange(TOKENS + 1, device=tokens.device)
        block = torch.full((rows, count, TOKENS + 1), MASK_TOKEN, device=tokens.device)
        block[..., 0] = tokens.gather(1, anchors + 1)
        own = (anchors[..., None] + 1 + ahead).flatten(1)
        owner = torch.arange(count, device=tokens.device).repeat_interleave(TOKENS + 1)
        before = places <= anchors.repeat_interleave(TOKENS + 1, 1)[..., None]
        within = (owner[:, None] == owner).expand(rows, -1, -1)
        mask = torch.cat([before, within], -1)[:, None]
        hidden = functional.embedding(block, embedding).flatten(1, 2)
        for layer in range(LAYERS[self.kind]):
            normed = self.norm(f"layers.{layer}.input_layernorm", hidden)
            query = turned(self.heads(layer, "q", normed), own)
            keys = [turned(self.heads(layer, "k", context), places)]
            keys.append(turned(self.heads(layer, "k", normed), own))
            values = [self.heads(layer, "v", part) for part in (context, normed)]
            parts = (query, torch.cat(keys, 1), torch.cat(values, 1))
            attended = functional.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in parts), attn_mask=mask
            )
            hidden = hidden + self.out(layer, attended.transpose(1, 2))
            hidden = hidden + self.mlp(
                layer, self.norm(f"layers.{layer}.post_attention_layernorm", hidden)
            )
        return self.norm("norm", hidden).unflatten(1, (count, TOKENS + 1))[:, :, 1:]


class Eagle3(Draft):
    """Drafts token by token: each step reads the previous state and token."""

    kind = "eagle3"

    def forward(self, embedding: Tensor, tokens: Tensor, seen: Tensor, anchors: Tensor) -> Tensor:
        state = self.times("fc", seen)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        ahead = functional.pad(tokens, (0, TOKENS))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states = []
        for step in range(TOKENS):
            known = ahead[:, step + 1 : step + 1 + tokens.shape[1]]
            embedded = self.norm("layers.0.input_layernorm", functional.embedding(known, embedding))
            read = torch.cat([embedded, self.norm("layers.0.hidden_norm", state)], -1)
            query = turned(self.heads(0, "q", read), places + step)
            keys.append(turned(self.heads(0, "k", read), places + step))
            values.append(self.heads(0, "v", read))
            hidden = state + self.out(0, _attended(query, keys, values))
            state = hidden + self.mlp(0, self.norm("layers.0.post_attention_layernorm", hidden))
            states.append(self.norm("norm", state))
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        return torch.stack([part[rows, anchors] for part in states], 2)


def _attended(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return attention over all first steps up to each position, and its own later steps."""
    before = torch.einsum("bqhd,bkhd->bhqk", query, keys[0])
    length = query.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    own = [(query * key).sum(-1).transpose(1, 2)[..., None] for key in keys[1:]]
    scores = torch.cat([before.masked_fill(later, -torch.inf), *own], -1) * HEAD_DIM**-0.5
    shares = scores.softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", shares[..., :length], values[0])
    for place, value in enumerate(values[1:], start=length):
        out = out + shares[..., place].transpose(1, 2)[..., None] * value
    return out
