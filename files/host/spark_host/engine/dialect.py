"""What engines call what every one of them has: data, one row an engine.

A release names its row. Releases, proofs and watch speak of what is counted in the words of
``Dialect`` alone; docs/decisions/0024 says what else another engine needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_contract.errors import HostToolError
from spark_contract.serving.release import Release


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of one engine: of what it counts, in the text form of Prometheus."""

    running: str  # requests it works on
    waiting: str
    generated: str  # tokens
    read: str  # tokens of prompts
    cache_share: str  # of the KV cache in use
    drafted: str  # tokens
    accepted: str  # of these
    found_again: str  # tokens of prompts whose cache was kept


ENGINES: dict[str, Dialect] = {
    "vllm": Dialect(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        generated="vllm:generation_tokens_total",
        read="vllm:prompt_tokens_total",
        cache_share="vllm:kv_cache_usage_perc",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        found_again="vllm:prefix_cache_hits_total",
    ),
}
USUAL = ENGINES["vllm"]


def problem(release: Release) -> HostToolError | None:
    """Return why these tools cannot talk to a release's engine; ``None`` when they can."""
    kind = release.engine.kind
    if kind in ENGINES:
        return None
    what = f"is no engine that these tools know ({', '.join(ENGINES)})"
    return HostToolError(f"engine {kind!r} of {release.name}", what, "run the deploy again")


def of(release: Release) -> Dialect:
    """Return what a release's engine calls what it has.

    Raises:
        HostToolError: These tools do not know it.
    """
    refused = problem(release)
    if refused is not None:
        raise refused
    return ENGINES[release.engine.kind]
