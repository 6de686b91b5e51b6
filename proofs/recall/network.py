"""The recall model for training: transformers' layers, a differentiable delta rule, the losses."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from lab.model.network import Network
from proofs.recall.trees import RECALL

CHUNK = 64


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Return the rule's output at every position, from an empty state.

    ``torch_chunk_gated_delta_rule`` of transformers 5.17 writes chunks into a large tensor, which
    the gradient copies; here chunks are listed. (flash-linear-attention's backward pass
    refuses Hopper with Triton 3.4 to 3.7.0, which miscompile it.)

    Shapes: ``query``, ``key``, ``value`` [batch, tokens, heads, width], normed here; ``g`` (log of
    the decay) and ``beta`` (strength of a write) [batch, tokens, heads].
    """
    dtype, tokens = query.dtype, query.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = (_chunks(x.float()) for x in (query, key, value))
        decay, strength = (_chunks(x.float()[..., None])[..., 0] for x in (g, beta))
        q = functional.normalize(q, dim=-1, eps=1e-6) * q.shape[-1] ** -0.5
        k = functional.normalize(k, dim=-1, eps=1e-6)
        total = decay.cumsum(-1)
        upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        pair = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
        written = k * strength[..., None]
        system = (written @ k.transpose(-1, -2)) * pair
        inside = (q @ k.transpose(-1, -2)) * pair
        right = torch.cat([v * strength[..., None], written * total.exp()[..., None]], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
        q = q * total.exp()[..., None]
        k = k * (total[..., -1:] - total).exp()[..., None]
        out = _scan(q, k, values, reads, inside, total[..., -1].exp())
        return out.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(dtype), None


def _chunks(x: Tensor) -> Tensor:
    x = functional.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))


def _scan(
    q: Tensor, k: Tensor, values: Tensor, reads: Tensor, inside: Tensor, decay: Tensor
) -> Tensor:
    state = torch.zeros(*q.shape[:2], k.shape[-1], values.shape[-1], device=q.device)
    flat = [x.unbind(2) for x in (q, k.transpose(-1, -2), values, reads, inside)]
    out = []
    for chunk, (one_q, one_k, one_v, one_read, one_inside) in enumerate(zip(*flat, strict=True)):
        new = one_v - one_read @ state
        out.append(one_q @ state + one_inside @ new)
        state = state * decay[:, :, chunk, None, None] + one_k @ new
    return torch.stack(out, 2)


RULE_TOLERANCE = 0.02


def use_own_rule(device: str) -> float:
    """Use the trainable rule in transformers; return the error, or raise ValueError."""
    own = modeling.torch_chunk_gated_delta_rule
    worst = max(_rule_errors(own, chunk_gated_delta_rule, device))
    if worst > RULE_TOLERANCE:
        raise ValueError(f"the gated delta rule differs from transformers' by {worst:.3f}")
    modeling.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    return worst


def _rule_errors(first: Any, second: Any, device: str) -> list[float]:
    results = []
    for rule in (first, second):
        generator = torch.Generator(device).manual_seed(1)
        shape = (2, 200, 8, 128)
        q, k, v = (
            torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)
            for _ in range(3)
        )
        g = -torch.rand(shape[:3], device=device, generator=generator) * 0.2
        beta = torch.rand(shape[:3], device=device, generator=generator).bfloat16()
        inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
        out, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        weights = torch.randn(out.shape, device=device, generator=generator)
        (out.float() * weights).sum().backward()
        results.append([out.detach().float(), *(x.grad.float() for x in inputs)])
    return [((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]


def dense_experts(self: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    spread = torch.zeros(len(hidden), self.num_experts, dtype=weights.dtype, device=hidden.device)
    spread = spread.scatter(1, expert_ids, weights)
    gate_up = functional.linear(hidden, self.gate_up_proj.flatten(0, 1))
    gate, up = gate_up.view(len(hidden), self.num_experts, -1).chunk(2, -1)
    inner = functional.silu(gate) * up * spread[..., None].to(gate.dtype)
    down = self.down_proj.permute(1, 0, 2).flatten(1)
    return functional.linear(inner.flatten(1), down)


def make_network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    network = Network(RECALL)
    network.model.config._attn_implementation = "sdpa"
    with torch.no_grad():  # copying a word gives that word from the start
        network.lm_head.weight.copy_(network.model.embed_tokens.weight)
    for module in network.modules():
        if isinstance(module, modeling.Qwen3_5MoeExperts):
            module.forward = MethodType(dense_experts, module)
    return network


def hidden_states(network: Network, tokens: Tensor, places: Tensor) -> tuple[Tensor, Any]:
    hidden = network.model.embed_tokens(tokens)
    rotary = network.model.rotary_emb(hidden, places.expand(3, *places.shape))
    for layer in network.model.layers:
        hidden = layer(hidden, position_embeddings=rotary, attention_mask=None)
    return network.model.norm(hidden), rotary


def losses(network: Network, tokens: Tensor, labels: Tensor, places: Tensor) -> dict[str, Tensor]:
    hidden, (cos, sin) = hidden_states(network, tokens, places)
    results: dict[str, Tensor] = {}
    state_of, embedded = hidden, network.model.embed_tokens(tokens)
    for ahead in (1, 2, 3):
        if ahead > 1:
            # Position t sees the state of t and token t + ahead - 1, as the engine's drafter does.
            size = tokens.shape[1] - ahead + 1
            rotary = (cos[:, :size], sin[:, :size])
            state_of = network.mtp(embedded[:, ahead - 1 :], state_of[:, :size], rotary)
        targets = labels[:, ahead:]
        # Drafts are trained only where the previous token is known too.
        taught = targets >= 0
        if ahead > 1:
            taught &= labels[:, 1 : 1 + targets.shape[1]] >= 0
        logits = network.lm_head(state_of[:, : targets.shape[1]][taught]).float()
        results[f"loss{ahead}"] = functional.cross_entropy(logits, targets[taught])
        results[f"right{ahead}"] = (logits.detach().argmax(-1) == targets[taught]).float().mean()
    return results
