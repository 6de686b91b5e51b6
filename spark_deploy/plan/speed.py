"""How fast a pair would stream, computed from the bytes that one decode step reads.

Decoding waits for memory: a step reads its weights once, whatever the number of tokens it verifies,
and the more tokens it has, the more experts it touches. Bytes over bandwidth, corrected by one
efficiency for each kind of kernel, and a time for each layer, make the step; accepted drafts
say how many tokens it yields. docs/reference/speed.md holds it against published figures.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spark_deploy.config.catalog.companions import Speculation
from spark_deploy.config.catalog.model import Architecture, HybridModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.plan.engine_arguments import quantises_online
from spark_deploy.plan.kv_cache import layer_bytes_per_token, own_drafts, state_bytes
from spark_deploy.plan.memory import mtp_layer_bytes, weights_of

BANDWIDTH_BYTES_PER_S = 273e9  # of a Spark's memory, by its data sheet
# Shares of that bandwidth. Reported by the community of INT4 kernels:
LARGE_INT4 = 0.84
# Fitted with LAYER_S on two published figures: 28.3 and 30.8 tokens/s of profiles base and hybrid.
SMALL = 0.578
LAYER_S = 92e-6  # launches, norms, routing and waiting, for each layer of a step
# Measured on an H200 relative to its own bandwidth (proofs/results/gpu/lm-head.json, batch 1).
HEADS = {"keep": 0.96, "int8-g128": 0.81, "int8-triton": 0.99}
# Published: 0.95 of one draft accepted, 0.8 of two. Later drafts as often as the second.
FIRST_ACCEPTED, LATER_ACCEPTED = 0.95, 0.684
TOLERANCE = 0.15
"""By how much a figure may miss before the page has to say what is not known."""
MOST_DRAFTS = 3
_WORTH = 0.01


@dataclass(frozen=True, slots=True)
class Speed:
    """What one decode step takes and yields."""

    parts_s: tuple[tuple[str, float], ...]  # by what the time is spent on
    tokens_per_step: float  # of all requests

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return sum(seconds for _, seconds in self.parts_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests in a second."""
        return self.tokens_per_step / self.step_s


@dataclass(frozen=True, slots=True)
class Lever:
    """A change that would make a pair stream faster."""

    setting: str
    gain: float  # 0.1 is ten percent


@dataclass(frozen=True, slots=True)
class Calibration:
    """How Sparks differed from what is computed: times ``factor``, as so many reports tell."""

    factor: float = 1.0
    reports: int = 0


def calibrated(pairs: Iterable[tuple[float, float]]) -> Calibration:
    """Return the median of measured over computed; of no measurement, nothing is changed."""
    found = [measured / computed for measured, computed in pairs]
    return Calibration(statistics.median(found), len(found)) if found else Calibration()


def speed_of(
    model: Architecture, profile: Profile, *, requests: int = 1, context_tokens: int = 0
) -> Speed:
    """Return the computed speed of ``requests`` at once, each behind ``context_tokens``."""
    drafts = own_drafts(profile)
    parts = tuple(_parts(model, profile, drafts, requests, context_tokens))
    return Speed(parts, requests * tokens_per_step(drafts))


def tokens_per_step(drafts: int) -> float:
    """Return how many tokens of one request a step yields: one, and the drafts accepted."""
    return 1 + sum(FIRST_ACCEPTED * LATER_ACCEPTED**place for place in range(drafts))


def experts_touched(model: Architecture, tokens: int) -> float:
    """Return how many experts of a layer some of ``tokens`` choose, if each chooses by itself."""
    left_out = 1 - model.experts_per_token / model.experts
    return model.experts * float(1 - left_out**tokens)


def next_lever(model: HybridModel, profile: Profile) -> Lever | None:
    """Return the change of one setting that would gain most, if any gains a percent."""
    now = speed_of(model.architecture, profile).tokens_per_s
    levers = [
        Lever(setting, speed_of(model.architecture, other).tokens_per_s / now - 1)
        for setting, other in _changes(model, profile)
    ]
    best = max(levers, key=lambda lever: lever.gain, default=None)
    return best if best and best.gain >= _WORTH else None


def _changes(model: HybridModel, profile: Profile) -> Iterator[tuple[str, Profile]]:
    drafts = own_drafts(profile)
    if model.architecture.mtp_layers and drafts < MOST_DRAFTS:
        more = Speculation(method="mtp", tokens=drafts + 1)
        yield f"engine.drafts: {drafts + 1}", dataclasses.replace(profile, speculation=more)
    if profile.tree_needs_plugin and profile.plugin and profile.head != "int8-triton":
        yield "engine.head: int8-triton", dataclasses.replace(profile, head="int8-triton")
    elif profile.head == "keep":
        yield "engine.head: int8-g128", dataclasses.replace(profile, head="int8-g128")


def _parts(
    model: Architecture, profile: Profile, drafts: int, requests: int, context_tokens: int
) -> Iterator[tuple[str, float]]:
    sizes, tokens = weights_of(model), requests * (1 + drafts)
    touched = experts_touched(model, tokens) / model.experts
    head_bytes = sizes.head_bytes if profile.head == "keep" else sizes.head_int8_bytes
    head_s = _seconds(head_bytes, HEADS[profile.head])
    cache = model.attention_layers * layer_bytes_per_token(model, profile.kv_cache.dtype)
    # Read once; written for each token, so that a refused draft can be taken back.
    states = model.linear_layers * state_bytes(model, drafts) * (2 + drafts)
    yield "routed experts", _seconds(sizes.experts_bytes * touched, LARGE_INT4)
    yield "attention weights", _seconds(sizes.attention_bytes, LARGE_INT4)
    yield "shared experts", _seconds(_shared_bytes(model, profile), SMALL)
    yield "LM head", head_s
    yield "routers", _seconds(sizes.routers_bytes, SMALL)
    yield "states of linear layers", _seconds(requests * states, LARGE_INT4)
    yield "KV cache", _seconds(requests * context_tokens * cache, LARGE_INT4)
    yield "launches", model.layers * LAYER_S
    if drafts:
        always, expert = mtp_layer_bytes(model)
        layer_s = _seconds(always + experts_touched(model, requests) * expert, SMALL) + LAYER_S
        yield "drafts", drafts * (model.mtp_layers * layer_s + head_s)


def _seconds(size_bytes: float, efficiency: float) -> float:
    return size_bytes / efficiency / BANDWIDTH_BYTES_PER_S


def _shared_bytes(model: Architecture, profile: Profile) -> int:
    sizes = weights_of(model)
    if profile.shared_experts == "keep":
        # The one thing that is quantised while it is loaded, in profile online-fp8.
        return sizes.shared_fp8_bytes if quantises_online(profile) else sizes.shared_bytes
    own = profile.shared_experts == "int8-g128"
    return sizes.shared_int8_bytes if own else sizes.shared_fp8_bytes
