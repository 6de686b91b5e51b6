"""Compute the decode speed of a model and profile from the bytes that a step reads.

Decoding is memory-bound: a step reads its weights once, however many tokens it verifies. A step
takes bytes over bandwidth, with an efficiency per kind of kernel, plus a time per layer; accepted
drafts give the tokens per step. docs/reference/speed.md compares this with published figures.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spark_deploy.config.catalog.architecture import Architecture
from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.plan.engine_arguments import quantizes_online
from spark_deploy.plan.kv_cache import TURBOQUANT, layer_bytes_per_token, mtp_drafts, state_bytes
from spark_deploy.plan.memory import (
    SCHEME_BYTES,
    attention_bytes,
    draft_vocabulary_share,
    mtp_layer_bytes,
    served_architecture,
    weight_sizes,
)
from spark_deploy.plan.resolve import with_drafts

BANDWIDTH_BYTES_PER_S = 273e9  # of a Spark's memory, by the data sheet
EFFICIENCY = 0.84  # of all kernels but the LM head: reported by the community for INT4 kernels
# Arithmetic speed for prompts on one host: half of the 3,382 tokens/s reported for the 122B on two
# Sparks with 2,048-token prompts (proofs/speed-model.md). Attention is assumed to be as fast.
PROMPT_FLOPS_PER_S = 2.86e13
# Fitted to the published figures in catalog/profiles, as HEADS["keep"] (proofs/speed-model.md).
LAYER_OVERHEAD_S = 83e-6  # launches, norms, routing and waiting, for each layer of a step
TURBOQUANT_S = 749e-6  # for each attention layer of a step or draft
HEADS = {
    "keep": 0.73,
    # Relative to the bandwidth of the H200 that measured it (proofs/results/gpu/lm-head.json).
    "int8-g128": 0.81,
    "int8-triton": 0.99,
}
# Published acceptance: 0.95 with a single draft, 0.8 with two. Later drafts: like the second.
FIRST_ACCEPTED, LATER_ACCEPTED = 0.95, 0.684
TOLERANCE = 0.15
"""Largest deviation that the page leaves unexplained."""
MAX_DRAFTS = 3
_MIN_GAIN = 0.01
_HEAD = "LM head"


@dataclass(frozen=True, slots=True)
class Speed:
    parts_s: tuple[tuple[str, float], ...]  # by cause
    tokens_per_step: float  # all requests

    @property
    def step_s(self) -> float:
        return sum(seconds for _, seconds in self.parts_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s


@dataclass(frozen=True, slots=True)
class Speedup:
    setting: str
    gain: float  # 0.1 is ten percent


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured relative to computed speed, as the median of reports."""

    factor: float = 1.0
    reports: int = 0


def calibrated(speeds: Iterable[tuple[float, float]]) -> Calibration:
    """Return the median of measured over computed speed, or 1 without measurements."""
    ratios = [measured / computed for measured, computed in speeds]
    return Calibration(statistics.median(ratios), len(ratios)) if ratios else Calibration()


def compute_speed(
    model: Architecture, profile: Profile, *, requests: int = 1, context_tokens: int = 0
) -> Speed:
    """Return the computed speed of concurrent ``requests``, each with ``context_tokens``."""
    model = served_architecture(model, profile)
    mtp = profile.speculation if mtp_drafts(profile) else None
    drafts = mtp.draft_tokens(requests) if mtp else 0
    parts = tuple(_step_parts(model, profile, drafts, requests, context_tokens))
    return Speed(parts, requests * tokens_per_step(drafts))


def tokens_per_step(drafts: int) -> float:
    """Return the tokens per request and step: 1 plus accepted drafts."""
    return 1 + sum(FIRST_ACCEPTED * LATER_ACCEPTED**draft for draft in range(drafts))


def expected_experts(model: Architecture, tokens: int) -> float:
    """Return how many experts per layer ``tokens`` use on average, if they choose independently."""
    unused_by_token = 1 - model.experts_per_token / model.experts
    return model.experts * float(1 - unused_by_token**tokens)


def first_token_s(model: Architecture, tokens: int, cached_tokens: int = 0) -> float:
    """Return the computed time to read ``tokens``, in addition to ``cached_tokens``."""
    sizes = weight_sizes(model)
    used_experts_bytes = sizes.experts_bytes * model.experts_per_token / model.experts
    parameters = used_experts_bytes / SCHEME_BYTES[model.experts_scheme]
    parameters += sizes.attention_bytes / SCHEME_BYTES[model.attention_scheme]
    parameters += (sizes.shared_bytes + sizes.routers_bytes + sizes.hyper_bytes) / 2
    flops_per_key = 4 * model.attention_layers * model.attention_heads * model.head_width
    keys = _attended_tokens(model, cached_tokens + tokens / 2)
    flops = tokens * (2 * parameters + flops_per_key * keys)
    return flops / PROMPT_FLOPS_PER_S


def _attended_tokens(model: Architecture, tokens: float) -> float:
    return min(tokens, model.sparse_attention.budget) if model.sparse_attention else tokens


def next_turn_s(
    model: Architecture, profile: Profile, block_tokens: int, session_tokens: int, new_tokens: int
) -> float:
    """Return the computed time to the first token of a later turn.

    Prefix caching covers the session except its last block, which is half full on average.
    """
    cached = max(0, session_tokens - block_tokens // 2) if profile.prefix_caching else 0
    return first_token_s(model, session_tokens + new_tokens - cached, cached)


def best_speedup(model: HybridModel, profile: Profile) -> Speedup | None:
    """Return the change that increases the computed speed most, if the gain is worthwhile."""
    current = compute_speed(model.architecture, profile).tokens_per_s
    speedups = [
        Speedup(setting, compute_speed(model.architecture, other).tokens_per_s / current - 1)
        for setting, other in _possible_changes(model, profile)
    ]
    best = max(speedups, key=lambda speedup: speedup.gain, default=None)
    return best if best and best.gain >= _MIN_GAIN else None


def _possible_changes(model: HybridModel, profile: Profile) -> Iterator[tuple[str, Profile]]:
    drafts = mtp_drafts(profile)
    if model.architecture.mtp_layers and drafts < MAX_DRAFTS:
        yield f"engine.drafts: {drafts + 1}", with_drafts(profile, drafts + 1)
    if profile.checkpoint_needs_plugin and profile.plugin and profile.head != "int8-triton":
        yield "engine.head: int8-triton", dataclasses.replace(profile, head="int8-triton")
    elif profile.head == "keep":
        yield "engine.head: int8-g128", dataclasses.replace(profile, head="int8-g128")


def step_reads(
    model: Architecture,
    profile: Profile,
    drafts: int = 0,
    requests: int = 1,
    context_tokens: int = 0,
) -> Iterator[tuple[str, float, float]]:
    """Yield the cause, bytes and efficiency of a step's reads and writes, without the drafter's.

    The step verifies ``drafts`` tokens of each request.
    """
    sizes, tokens = weight_sizes(model), requests * (1 + drafts)
    used_share = expected_experts(model, tokens) / model.experts
    head_bytes = sizes.head_bytes if profile.head == "keep" else sizes.head_int8_bytes
    token_bytes = model.attention_layers * layer_bytes_per_token(model, profile.kv_cache.dtype)
    # A state is read once, and written for each token, so that rejected drafts can be undone.
    states_bytes = model.linear_layers * state_bytes(model, profile, drafts) * (2 + drafts)
    yield "routed experts", sizes.experts_bytes * used_share, EFFICIENCY
    yield "attention weights", attention_bytes(model, profile), EFFICIENCY
    yield "shared experts", _shared_bytes(model, profile), EFFICIENCY
    yield _HEAD, head_bytes, HEADS[profile.head]
    yield "routers", sizes.routers_bytes, EFFICIENCY
    if model.hyper_connections:
        yield "hyper-connections", sizes.hyper_bytes, EFFICIENCY
    yield "states of linear layers", requests * states_bytes, EFFICIENCY
    keys = _attended_tokens(model, context_tokens)
    yield "KV cache", requests * keys * token_bytes, EFFICIENCY
    if indexer := model.sparse_attention:
        index = context_tokens / indexer.compression * indexer.index_width * 2
        yield "index", requests * model.attention_layers * index, EFFICIENCY


def _step_parts(
    model: Architecture, profile: Profile, drafts: int, requests: int, context_tokens: int
) -> Iterator[tuple[str, float]]:
    """Yield the parts of a step's time: cause and seconds."""
    head_s = 0.0
    for cause, size_bytes, efficiency in step_reads(
        model, profile, drafts, requests, context_tokens
    ):
        seconds = _seconds(size_bytes, efficiency)
        if cause == _HEAD:
            head_s = seconds
        yield cause, seconds
    yield "launches", model.layers * LAYER_OVERHEAD_S
    if profile.kv_cache.dtype in TURBOQUANT:
        yield "TurboQuant", (model.attention_layers + drafts * model.mtp_layers) * TURBOQUANT_S
    if drafts:
        draft_head_s = head_s * (draft_vocabulary_share(model, profile) or 1)
        layers_s = model.mtp_layers * _mtp_layer_s(model, requests)
        yield "drafts", drafts * (layers_s + draft_head_s)


def _mtp_layer_s(model: Architecture, requests: int) -> float:
    """Return the time for an MTP layer per draft."""
    mtp = mtp_layer_bytes(model)
    read_bytes = mtp.plain + mtp.attention + expected_experts(model, requests) * mtp.expert
    return _seconds(read_bytes, EFFICIENCY) + LAYER_OVERHEAD_S


def _seconds(size_bytes: float, efficiency: float) -> float:
    return size_bytes / efficiency / BANDWIDTH_BYTES_PER_S


def _shared_bytes(model: Architecture, profile: Profile) -> int:
    sizes = weight_sizes(model)
    if profile.shared_experts == "keep":
        # Profile online-fp8 quantizes only this part when the model is loaded.
        return sizes.shared_fp8_bytes if quantizes_online(profile) else sizes.shared_bytes
    int8 = profile.shared_experts == "int8-g128"
    return sizes.shared_int8_bytes if int8 else sizes.shared_fp8_bytes
