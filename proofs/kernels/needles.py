"""Chains of needles among similar keys with outlier channels, for cache formats.

A value holds the direction of the next key. A chain is found if each of its hops reads the right
value. Keys are as in trained models: all share a direction, groups of them are nearly equal, and
a few channels are far larger than the rest.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

SIZE = 256
TOKENS = 8192
GROUP = 8  # keys that resemble each other
SIMILARITY = (0.5, 0.97)  # cosine within a group; each group has its own
OUTLIERS = 4  # channels
OUTLIER_SIZE = 16.0  # times the usual channel
KEY_NORM = 24.0
QUERY_NORM = 16.0
CHAINS, HOPS = 256, 4


class Needles(NamedTuple):
    keys: Tensor
    values: Tensor
    first_queries: Tensor
    places: Tensor


def make_needles(seed: int, device: str) -> Needles:
    source = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    low, high = SIMILARITY
    similarity = low + (high - low) * torch.rand(TOKENS // GROUP, 1, generator=source)
    similarity = similarity.repeat_interleave(GROUP, 0)
    centers = normalize(random(TOKENS // GROUP, SIZE), dim=-1).repeat_interleave(GROUP, 0)
    own = normalize(random(TOKENS, SIZE), dim=-1)
    directions = normalize(centers * similarity**0.5 + own * (1 - similarity) ** 0.5, dim=-1)
    keys = KEY_NORM * (directions + normalize(random(1, SIZE), dim=-1))
    channels = torch.randperm(SIZE, generator=source)[:OUTLIERS]
    outliers = OUTLIER_SIZE * KEY_NORM / SIZE**0.5 * random(OUTLIERS).sign()
    keys[:, channels] += outliers * (1 + 0.1 * random(TOKENS, OUTLIERS))
    chains = torch.randperm(TOKENS, generator=source)[: CHAINS * (HOPS + 1)].view(CHAINS, -1)
    values = normalize(random(TOKENS, SIZE), dim=-1)
    for hop in range(HOPS):
        values[chains[:, hop]] = directions[chains[:, hop + 1]]
    made = (keys.bfloat16(), values.bfloat16(), directions[chains[:, 0]], chains[:, :HOPS])
    return Needles(*(tensor.to(device) for tensor in made))


Attend = Callable[[Tensor], Tensor]
"""Attention of queries ``[chains, size]`` over all keys and values."""


def attend_to(keys: Tensor, values: Tensor) -> Attend:
    return lambda query: (query @ keys.float().T / SIZE**0.5).softmax(-1) @ values.float()


def find_chains(needles: Needles, attend: Attend) -> Tensor:
    """Return which chains ``attend`` follows to the end.

    A hop is found if the output resembles the right value more than any other.
    """
    known = needles.values.float()
    query = needles.first_queries
    followed = torch.ones(len(query), dtype=torch.bool, device=query.device)
    for hop in range(HOPS):
        output = attend((QUERY_NORM * query).bfloat16().float())
        followed &= (output @ known.T).argmax(-1) == needles.places[:, hop]
        query = normalize(output, dim=-1)
    return followed
