"""Checks that a long text is read to its end, and not anew in every turn of a conversation."""

from __future__ import annotations

import time

from spark_host.check.probe import CheckError, Message, Probe, short, user

_COUNTER_WAIT_S = 5.0
_NUMBER = "48213"
_NEEDLE = f"The secret number of the lighthouse is {_NUMBER}."
_QUESTION = "What is the secret number of the lighthouse? Digits only."
_FILLER = "The sea was calm and the gulls were quiet that day. "
_FILLER_TOKENS = 10
_TURNS = 3


def needle(probe: Probe) -> str:
    """A fact in the middle of a long context is found again."""
    tokens = probe.plan.needle.context_tokens if probe.plan.needle else 0
    half = _FILLER * (tokens // 24)
    answer = probe.say(f"{half}{_NEEDLE} {half}\n{_QUESTION}", 64)
    if _NUMBER not in answer:
        raise CheckError(
            f"a number in the middle of about {tokens} tokens was not found: {short(answer)}"
        )
    return f"a number in the middle of about {tokens} tokens was found"


def prefix_reuse(probe: Probe) -> str:
    """Later turns of one long conversation find the cache of the earlier ones, and answer right.

    The engine keeps whole blocks only, so the first turn is longer than two of them. It begins
    with a number never sent before: what is found again was computed in this conversation.
    """
    block_tokens = probe.plan.prefix.block_tokens if probe.plan.prefix else 0
    filler = _FILLER * (2 * block_tokens // _FILLER_TOKENS + 1)
    start = f"Note {time.time_ns() % 10**9}. {filler}{_NEEDLE}\n{_QUESTION}"
    messages: list[Message] = []
    waits, found = [], []
    for turn in range(1, _TURNS + 1):
        messages.append(user(start if turn == 1 else _QUESTION))
        before = _hits(probe)
        answer = probe.streamed(messages, 64)
        probe.tokens_seen += answer.tokens
        if turn == 1 and answer.prompt_tokens <= block_tokens:
            raise CheckError(
                f"the first turn has {answer.prompt_tokens} tokens, a cache block {block_tokens}: "
                "nothing could be found again"
            )
        if _NUMBER not in answer.text:
            said = short(answer.text)
            what = f"turn {turn} of a long conversation was answered {said}"
            # Nothing of turn 1 comes from the cache: there it is the model that did not find it.
            raise CheckError(what, "warn" if turn == 1 else None)
        messages.append({"role": "assistant", "content": answer.text})
        waits.append(answer.wait_s)
        if turn > 1:
            found.append(_found(probe, before, turn))
    return (
        f"turn 2 began to answer after {waits[1]:.2f} s, turn 1 after {waits[0]:.2f} s; turns 2 "
        f"and 3 found {found[0]:.0f} and {found[1]:.0f} tokens of the conversation in the cache"
    )


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
    hits = probe.metrics().found_again
    if hits is None:
        raise CheckError("the engine has no counter of prefix hits: prefix caching is off")
    return hits
