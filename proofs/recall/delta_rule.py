"""The gated delta rule in plain torch, differentiable and fast enough to train 131,072 tokens.

The same arithmetic as ``torch_chunk_gated_delta_rule`` of transformers 5.17, which is only for
inference: it writes every chunk into one large tensor, and the gradient of each such write copies
the whole of it. Here chunks go to a list. (flash-linear-attention's own backward pass refuses
Hopper with Triton 3.4 to 3.7.0, whose code for it is wrong.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Return what the rule reads at every position, from an empty state.

    Args:
        query: ``[batch, tokens, heads, width]``, as are ``key`` and ``value``; normed here.
        key: see ``query``.
        value: see ``query``.
        g: logarithm of the decay, ``[batch, tokens, heads]``.
        beta: strength of a write, ``[batch, tokens, heads]``.
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
    """Return ``[batch, heads, chunks, CHUNK, width]``, padded with zeros at the end."""
    x = functional.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))


def _scan(
    q: Tensor, k: Tensor, values: Tensor, reads: Tensor, inside: Tensor, decay: Tensor
) -> Tensor:
    """Return the output of every chunk; the state goes from one to the next."""
    state = torch.zeros(*q.shape[:2], k.shape[-1], values.shape[-1], device=q.device)
    flat = [x.unbind(2) for x in (q, k.transpose(-1, -2), values, reads, inside)]
    out = []
    for chunk, (one_q, one_k, one_v, one_read, one_inside) in enumerate(zip(*flat, strict=True)):
        new = one_v - one_read @ state
        out.append(one_q @ state + one_inside @ new)
        state = state * decay[:, :, chunk, None, None] + one_k @ new
    return torch.stack(out, 2)
