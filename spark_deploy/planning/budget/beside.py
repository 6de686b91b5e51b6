"""Bytes of what an engine loads beside a model: a drafter of its own repository, adapters."""

from __future__ import annotations

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile

# Slots for adapters are as wide as the widest may be; the engine knows these widths only.
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def drafter_bytes(profile: Profile) -> int:
    """Return the bytes of a drafter that has a repository; its own embedding may be shared."""
    anatomy = profile.speculation.anatomy if profile.speculation else None
    return anatomy.weights_bytes if anatomy else 0


def adapter_rank(model: Model) -> int:
    """Return how wide the slots for adapters are; 0 without adapters."""
    widest = max((one.rank for one in model.adapters.values()), default=0)
    return next((rank for rank in ADAPTER_RANKS if rank >= widest), widest) if widest else 0


def adapters_bytes(model: Model) -> int:
    """Return the bytes of as many slots as there are adapters, each as large as the largest."""
    rank = adapter_rank(model)
    sizes = [
        one.anatomy.weights_bytes * rank // one.rank
        for one in model.adapters.values()
        if one.anatomy
    ]
    return len(model.adapters) * max(sizes, default=0)
