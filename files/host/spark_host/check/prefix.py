"""Check that a growing conversation is not computed from its beginning in every turn."""

from __future__ import annotations

import time
from typing import Any

from spark_host.check.probe import CheckError, Probe, short, user
from spark_host.engine.client import EngineError

_HITS = "vllm:prefix_cache_hits_total"
_COUNTER_WAIT_S = 5.0
_NUMBER = "48213"
_NEEDLE = f"The secret number of the lighthouse is {_NUMBER}."
_QUESTION = "What is the secret number of the lighthouse? Digits only."
_FILLER = "The sea was calm and the gulls were quiet that day. "
_FILLER_TOKENS = 10
_TURNS = 3


def prefix_reuse(probe: Probe) -> str:
    """Later turns of one long conversation find the cache of the earlier ones, and answer right.

    The engine keeps whole blocks only, so the first turn is longer than two of them. It begins
    with a number never sent before: what is found again was computed in this conversation.
    """
    block_tokens = probe.plan.prefix.block_tokens if probe.plan.prefix else 0
    filler = _FILLER * (2 * block_tokens // _FILLER_TOKENS + 1)
    start = f"Note {time.time_ns() % 10**9}. {filler}{_NEEDLE}\n{_QUESTION}"
    messages: list[dict[str, str]] = []
    waits, found = [], []
    for turn in range(1, _TURNS + 1):
        messages.append(user(start if turn == 1 else _QUESTION))
        before = _hits(probe)
        answer, wait_s, prompt_tokens = _ask(probe, messages)
        if turn == 1 and prompt_tokens <= block_tokens:
            raise CheckError(
                f"the first turn has {prompt_tokens} tokens, a cache block {block_tokens}: "
                "nothing could be found again"
            )
        if _NUMBER not in answer:
            raise CheckError(f"turn {turn} of a long conversation was answered {short(answer)}")
        messages.append({"role": "assistant", "content": answer})
        waits.append(wait_s)
        if turn > 1:
            found.append(_found(probe, before, turn))
    return (
        f"turn 2 began to answer after {waits[1]:.2f} s, turn 1 after {waits[0]:.2f} s; turns 2 "
        f"and 3 found {found[0]:.0f} and {found[1]:.0f} tokens of the conversation in the cache"
    )


def _ask(probe: Probe, messages: list[dict[str, str]]) -> tuple[str, float, int]:
    """Return the streamed answer, the time to its first text and the tokens of the prompt."""
    body = probe.body(messages, 64, stream=True, stream_options={"include_usage": True})
    begun = time.monotonic()
    text, wait_s = "", 0.0
    usage: dict[str, Any] = {}
    try:
        for event in probe.engine.stream_chat(body, probe.left_s):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                text += choice.get("delta", {}).get("content") or ""
            if text and not wait_s:
                wait_s = time.monotonic() - begun
    except EngineError as error:
        raise CheckError(f"a long conversation got no usable answer: {error}") from error
    probe.tokens_seen += int(usage.get("completion_tokens", 0))
    return text, wait_s, int(usage.get("prompt_tokens", 0))


def _found(probe: Probe, before: float, turn: int) -> float:
    deadline = time.monotonic() + _COUNTER_WAIT_S
    while True:
        found = _hits(probe) - before
        if found > 0:
            return found
        if time.monotonic() > deadline:
            raise CheckError(
                f"turn {turn} of a conversation found no token of the earlier turns in the cache"
            )
        time.sleep(0.1)


def _hits(probe: Probe) -> float:
    try:
        hits = probe.engine.metrics(probe.left_s).total(_HITS)
    except EngineError as error:
        raise CheckError(f"/metrics: {error}") from error
    if hits is None:
        raise CheckError("the engine has no counter of prefix hits: prefix caching is off")
    return hits
