"""Checks of what the engine answers."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

from spark_contract.release import Question

from spark_host.check.probe import CheckError, Message, Probe, Streamed, content, short, user

_SAME_TOKEN_RUN = 24
_STREAMS = 3


# What ordinary clients send: the values of Qwen's generation_config.json, and no seed.
_SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "seed": None}


def _judge(question: Question, answer: str) -> None:
    if re.search(question.expect, answer):
        return
    _refuse_one_token_repeated(question, answer)
    raise CheckError(
        f"{short(question.prompt)} was answered {short(answer)}, "
        f"which does not match {question.expect!r}"
    )


def _refuse_one_token_repeated(question: Question, answer: str) -> None:
    longest = max((len(list(run)) for _, run in groupby(answer)), default=0)
    words = answer.split()
    same_words = max((len(list(run)) for _, run in groupby(words)), default=0)
    if longest >= _SAME_TOKEN_RUN or same_words >= _SAME_TOKEN_RUN:
        raise CheckError(
            f"{short(question.prompt)} was answered by one token over and over, {short(answer)}: "
            "the numbers inside the model are broken"
        )


def first_answer(probe: Probe) -> str:
    """The first question is answered right, which any instruct model does."""
    return _ask(probe, probe.plan.plain_questions[:1])


def all_answers(probe: Probe) -> str:
    """Every checkable question is answered right, those with thinking as well."""
    return _ask(probe, probe.plan.questions)


def _ask(probe: Probe, questions: tuple[Question, ...]) -> str:
    for question in questions:
        answer = probe.say(question.prompt, question.max_tokens, thinking=question.thinking)
        try:
            _judge(question, answer)
        except CheckError as error:
            if question.thinking:
                error.weight = "warn"
            raise
        probe.answers[question.prompt] = answer
    last = questions[-1].prompt
    return f"{len(questions)} answered right, {short(last, 40)} by {short(probe.answers[last], 40)}"


def copies(probe: Probe) -> str:
    """Given strings come back letter by letter, whatever stands around them."""
    for text in probe.plan.copy:
        answer = probe.say(f"Repeat exactly: {text}", max(64, 2 * len(text)))
        if text not in answer:
            raise CheckError(f"asked to repeat {short(text)}, it said {short(answer)}")
    return f"{len(probe.plan.copy)} strings came back unchanged"


def repeats(probe: Probe) -> str:
    """The same greedy request gives the same text again."""
    question = probe.plan.plain_questions[-1]
    first, second = (probe.say(question.prompt, question.max_tokens) for _ in range(2))
    if first != second:
        raise CheckError(f"the same greedy request gave {short(first)} and then {short(second)}")
    return "the same greedy request gave the same text twice"


def sampled(probe: Probe) -> str:
    """Requests with temperature, top_k and top_p and without a seed get sane answers."""
    questions = probe.plan.plain_questions
    for question in questions:
        answer = content(probe.chat([user(question.prompt)], question.max_tokens, **_SAMPLING))
        if not answer.strip():
            raise CheckError(f"{short(question.prompt)}, sampled, got an empty answer")
        _refuse_one_token_repeated(question, answer)
        if not re.search(question.expect, answer):
            what = f"{short(question.prompt)}, sampled, got {short(answer)}"
            raise CheckError(f"{what}, which does not match {question.expect!r}", "warn")
    return f"{len(questions)} sampled answers are sane"


def conversation(probe: Probe) -> str:
    """A conversation that grows keeps its thread."""
    messages: list[Message] = []
    questions = (probe.plan.plain_questions * 3)[:3]
    for turn, question in enumerate(questions, 1):
        messages.append(user(question.prompt))
        answer = content(probe.chat(messages, question.max_tokens))
        try:
            _judge(question, answer)
        except CheckError as error:
            raise CheckError(f"in turn {turn} of a conversation {error}") from error
        messages.append({"role": "assistant", "content": answer})
    return f"{len(questions)} turns of one conversation were answered right"


def parallel(probe: Probe) -> str:
    """Several streams at once are each answered right."""
    questions = (probe.plan.plain_questions * _STREAMS)[:_STREAMS]
    with ThreadPoolExecutor(max_workers=_STREAMS) as pool:
        asked = [(question, pool.submit(_streamed, probe, question)) for question in questions]
        for question, streamed in asked:
            try:
                answer = streamed.result()
                _judge(question, answer.text)
            except CheckError as error:
                raise CheckError(f"among {_STREAMS} streams at once {error}") from error
            probe.tokens_seen += answer.tokens
    return f"{_STREAMS} streams at once were answered right"


def stream(probe: Probe) -> str:
    """A streamed answer is complete and says the same as a plain one."""
    question = probe.plan.plain_questions[0]
    answer = _streamed(probe, question)
    probe.tokens_seen += answer.tokens
    _judge(question, answer.text)
    return f"a streamed answer came whole, {answer.tokens} tokens"


def _streamed(probe: Probe, question: Question) -> Streamed:
    return probe.streamed([user(question.prompt)], question.max_tokens)


_RAW_CALLS = ("<tool_call>", "<function=", "get_weather")  # a call that nobody parsed
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city for a number of days",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


def tool_call(probe: Probe) -> str:
    """A request that needs a tool becomes a well-formed call with the right types."""
    message = probe.chat(
        [user("Use the tool to get the weather in Paris for 3 days.")],
        256,
        tools=[_WEATHER],
        tool_choice="auto",
    )
    calls = message.get("tool_calls") or []
    if not calls:
        said = content(message)
        raw = any(mark in said for mark in _RAW_CALLS)
        raise CheckError(f"no tool was called, it said {short(said)}", None if raw else "warn")
    function = calls[0].get("function") or {}
    arguments = _arguments(function)
    if function.get("name") != "get_weather":
        raise CheckError(f"the tool {function.get('name')!r} was called, not get_weather")
    if "paris" not in str(arguments.get("city", "")).lower():
        what = f"the tool was called for the city {arguments.get('city')!r}, not Paris"
        raise CheckError(what, "warn")
    days = arguments.get("days")
    if isinstance(days, bool) or days != 3 or not isinstance(days, int):
        number = isinstance(days, int) and not isinstance(days, bool)
        what = f"the tool was called with days={days!r}, not the number 3"
        raise CheckError(what, "warn" if number else None)
    return f"get_weather was called with {json.dumps(arguments)}"


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (TypeError, ValueError) as error:
        said = short(str(function.get("arguments")))
        raise CheckError(f"the tool's arguments are not JSON: {said}") from error
    if not isinstance(arguments, dict):
        raise CheckError(f"the tool's arguments are not an object: {arguments!r}")
    return arguments


def reasoning(probe: Probe) -> str:
    """Thinking arrives apart from the answer."""
    question = probe.plan.plain_questions[0]
    limit = min(2048, max(256, probe.plan.max_model_len // 4))
    message = probe.chat(
        [user(question.prompt)], limit, chat_template_kwargs={"enable_thinking": True}
    )
    thought = str(message.get("reasoning") or message.get("reasoning_content") or "")
    answer = content(message)
    if "<think>" in answer or "</think>" in answer:
        raise CheckError(f"thinking is mixed into the answer: {short(answer)}")
    if not thought.strip():
        raise CheckError(f"no reasoning came apart from the answer {short(answer)}", "warn")
    if message["finish_reason"] != "length":
        try:
            _judge(question, answer)
        except CheckError as error:
            raise CheckError(f"after thinking, {error}", "warn") from error
    return f"{len(thought)} characters of reasoning came apart from the answer"


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
    hits = probe.metrics().prefix_hits
    if hits is None:
        raise CheckError("the engine has no counter of prefix hits: prefix caching is off")
    return hits
