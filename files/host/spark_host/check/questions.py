"""Checks that ask questions about text, images or sounds."""

import base64
import io
import json
import math
import re
import struct
import time
import wave
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from spark_contract.release import Question

from spark_host.check.probe import (
    CheckError,
    Message,
    Probe,
    Severity,
    message_text,
    quote,
    user_message,
    wait_for_value,
)

_MAX_REPETITIONS = 24
_STREAMS = 3
# Typical clients: Qwen's generation_config.json, and no seed.
_SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "seed": None}


def _check_answer(
    question: Question, answer: str, context: str = "", severity: Severity | None = None
) -> None:
    if not re.search(question.expect, answer):
        _reject_repetition(question, answer, context, severity)
        text = f"{quote(answer)} does not match {question.expect!r}"
        raise CheckError(f"{context}wrong answer to {quote(question.prompt)}: {text}", severity)


def _reject_repetition(
    question: Question, answer: str, context: str = "", severity: Severity | None = None
) -> None:
    for units in (answer, answer.split()):  # characters, words
        longest_run = max((len(list(run)) for _, run in groupby(units)), default=0)
        if longest_run >= _MAX_REPETITIONS:
            text = f"the same token over and over, {quote(answer)}"
            problem = f"the answer to {quote(question.prompt)} is {text}"
            raise CheckError(f"{context}{problem}; the weights or kernels are broken", severity)


def check_answers(probe: Probe, only: tuple[Question, ...] = ()) -> str:
    questions = only or probe.plan.questions
    for question in questions:
        answer = probe.ask(question.prompt, question.max_tokens, thinking=question.thinking)
        _check_answer(question, answer, severity="warn" if question.thinking else None)
        example = f"{quote(question.prompt, 40)} with {quote(answer, 40)}"
    return f"{len(questions)} questions were answered correctly, for example {example}"


def check_copies(probe: Probe) -> str:
    for text in probe.plan.copy:
        answer = probe.ask(f"Repeat exactly: {text}", max(64, 2 * len(text)))
        if text not in answer:
            raise CheckError(f"the model repeated {quote(text)} as {quote(answer)}")
    return f"{len(probe.plan.copy)} strings were repeated unchanged"


def check_repeated_answer(probe: Probe) -> str:
    question = probe.plan.plain_questions[-1]
    first, second = (probe.ask(question.prompt, question.max_tokens) for _ in range(2))
    if first != second:
        raise CheckError(f"the same greedy request gave {quote(first)} and then {quote(second)}")
    return "the same greedy request gave the same text twice"


def check_sampled_answers(probe: Probe) -> str:
    questions = probe.plan.plain_questions
    for question in questions:
        messages = [user_message(question.prompt)]
        answer = message_text(probe.chat(messages, question.max_tokens, **_SAMPLING))
        if not answer.strip():
            raise CheckError(f"empty answer to {quote(question.prompt)} (with sampling)")
        _reject_repetition(question, answer)
        _check_answer(question, answer, "with sampling, ", "warn")
    return f"{len(questions)} sampled answers are plausible"


def check_conversation(probe: Probe) -> str:
    messages: list[Message] = []
    questions = (probe.plan.plain_questions * 3)[:3]
    for turn, question in enumerate(questions, 1):
        messages.append(user_message(question.prompt))
        answer = message_text(probe.chat(messages, question.max_tokens))
        _check_answer(question, answer, f"in turn {turn} of a conversation, ")
        messages.append({"role": "assistant", "content": answer})
    return f"all {len(questions)} turns of a conversation were answered correctly"


def check_parallel_streams(probe: Probe) -> str:
    questions = (probe.plan.plain_questions * _STREAMS)[:_STREAMS]
    with ThreadPoolExecutor(max_workers=_STREAMS) as pool:
        pending = [
            pool.submit(probe.stream, [user_message(question.prompt)], question.max_tokens)
            for question in questions
        ]
        for question, streamed in zip(questions, pending, strict=True):
            try:
                answer = streamed.result()
                _check_answer(question, answer.text)
            except CheckError as error:
                raise CheckError(f"with {_STREAMS} concurrent streams: {error}") from error
            probe.tokens_seen += answer.tokens
    return f"{_STREAMS} concurrent streaming requests were answered correctly"


def check_stream(probe: Probe) -> str:
    question = probe.plan.plain_questions[0]
    answer = probe.stream([user_message(question.prompt)], question.max_tokens)
    probe.tokens_seen += answer.tokens
    _check_answer(question, answer.text)
    return f"streamed answer completed ({answer.tokens} tokens)"


# Marks of a call that the engine did not parse.
_RAW_CALLS = ("<tool_call>", "<function=", "get_weather")
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


def check_tool_call(probe: Probe) -> str:
    prompt = "Use the tool to get the weather in Paris for 3 days."
    message = probe.chat([user_message(prompt)], 256, tools=[_WEATHER], tool_choice="auto")
    calls = message.get("tool_calls") or []
    if not calls:
        text = message_text(message)
        has_raw_call = any(mark in text for mark in _RAW_CALLS)
        problem = f"no tool was called; the answer is {quote(text)}"
        raise CheckError(problem, None if has_raw_call else "warn")
    function = calls[0].get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (TypeError, ValueError) as error:
        text = quote(str(function.get("arguments")))
        raise CheckError(f"the tool's arguments are not JSON: {text}") from error
    if not isinstance(arguments, dict):
        raise CheckError(f"the tool's arguments are not an object: {arguments!r}")
    if function.get("name") != "get_weather":
        raise CheckError(f"the tool {function.get('name')!r} was called, not get_weather")
    city, days = arguments.get("city", ""), arguments.get("days")
    if "paris" not in str(city).lower():
        raise CheckError(f"the tool was called for the city {city!r}, not Paris", "warn")
    if type(days) is not int or days != 3:
        text = f"the tool was called with days={days!r}, not the number 3"
        raise CheckError(text, "warn" if type(days) is int else None)
    return f"get_weather was called with {json.dumps(arguments)}"


def check_reasoning(probe: Probe) -> str:
    question = probe.plan.plain_questions[0]
    limit = min(2048, max(256, probe.plan.max_model_len // 4))
    thinking = {"enable_thinking": True}
    message = probe.chat([user_message(question.prompt)], limit, chat_template_kwargs=thinking)
    thought = str(message.get("reasoning") or message.get("reasoning_content") or "")
    answer = message_text(message)
    if "<think>" in answer or "</think>" in answer:
        raise CheckError(f"thinking is mixed into the answer: {quote(answer)}")
    if not thought.strip():
        raise CheckError(f"the reasoning is not separate from the answer {quote(answer)}", "warn")
    if message["finish_reason"] != "length":
        _check_answer(question, answer, "after thinking, ", "warn")
    return f"{len(thought)} characters of reasoning are separate from the answer"


_COUNTER_WAIT_S = 5.0
_NUMBER = "48213"
_NEEDLE = f"The secret number of the lighthouse is {_NUMBER}."
_QUESTION = "What is the secret number of the lighthouse? Digits only."
_FILLER = "The sea was calm and the gulls were quiet that day. "
_FILLER_TOKENS = 10  # at least
_MAX_FILLER_TOKENS = 12
_TURNS = 3


def check_needle(probe: Probe) -> str:
    tokens = probe.plan.needle.context_tokens if probe.plan.needle else 0
    half = _FILLER * (tokens // 2 // _MAX_FILLER_TOKENS)
    answer = probe.ask(f"{half}{_NEEDLE} {half}\n{_QUESTION}", 64)
    hidden = f"a number hidden in the middle of about {tokens} tokens"
    if _NUMBER not in answer:
        raise CheckError(f"the answer {quote(answer)} does not contain {hidden}")
    return f"the answer contains {hidden}"


def check_prefix_reuse(probe: Probe) -> str:
    """Check that later turns of a long conversation hit the prefix cache and get correct answers.

    The first turn is longer than two cache blocks. It starts with a new number, so that earlier
    conversations cannot cause hits.
    """
    block_tokens = probe.plan.prefix.block_tokens if probe.plan.prefix else 0
    filler = _FILLER * (2 * block_tokens // _FILLER_TOKENS + 1)
    start = f"Note {time.time_ns() % 10**9}. {filler}{_NEEDLE}\n{_QUESTION}"
    messages: list[Message] = []
    waits, hits = [], []
    for turn in range(1, _TURNS + 1):
        messages.append(user_message(start if turn == 1 else _QUESTION))
        hits_before = _prefix_hits(probe)
        answer = probe.stream(messages, 64)
        probe.tokens_seen += answer.tokens
        if turn == 1 and answer.prompt_tokens <= block_tokens:
            raise CheckError(
                f"the first turn has {answer.prompt_tokens} tokens, "
                f"which do not fill a cache block of {block_tokens} tokens"
            )
        if _NUMBER not in answer.text:
            text = f"wrong answer in turn {turn} of a long conversation: {quote(answer.text)}"
            # Turn 1 does not use the cache, so the model itself gave a wrong answer.
            raise CheckError(text, "warn" if turn == 1 else None)
        messages.append({"role": "assistant", "content": answer.text})
        waits.append(answer.first_token_s)
        if turn > 1:
            hits.append(_wait_for_hits(probe, hits_before, turn))
    return (
        f"the first token came after {waits[0]:.2f} s in turn 1 and {waits[1]:.2f} s in turn 2; "
        f"turn 2 found {hits[0]:.0f} cached tokens, turn 3 {hits[1]:.0f}"
    )


def _wait_for_hits(probe: Probe, before: float, turn: int) -> float:
    hits = wait_for_value(lambda: _prefix_hits(probe) - before, 1, _COUNTER_WAIT_S)
    if hits <= 0:
        text = f"turn {turn} of a conversation found no tokens from earlier turns in the cache"
        raise CheckError(text)
    return hits


def _prefix_hits(probe: Probe) -> float:
    hits = probe.metrics().prefix_hits
    if hits is None:
        raise CheckError("the engine has no counter for prefix hits: prefix caching is off")
    return hits


_SIDE_PIXELS = 64
_COLORS = (("red", (220, 20, 20)), ("blue", (20, 20, 220)))


def check_image(probe: Probe) -> str:
    answers = []
    for _, rgb in _COLORS:
        url = "data:image/png;base64," + base64.b64encode(png(rgb)).decode()
        text = "What colour is this picture? Answer with one word."
        messages = [_media_message("image_url", {"url": url}, text)]
        answers.append(message_text(probe.chat(messages, 64)))
    for (color, _), answer in zip(_COLORS, answers, strict=True):
        if not re.search(rf"\b{color}\b", answer, re.IGNORECASE):
            text = f"a {color} image was described as {quote(answer)}"
            raise CheckError(text, None if len(set(answers)) == 1 else "warn")
    return f"the colors of all {len(_COLORS)} images were named correctly"


def _media_message(kind: str, data: dict[str, str], text: str) -> Message:
    return user_message([{"type": kind, kind: data}, {"type": "text", "text": text}])


def png(rgb: tuple[int, int, int]) -> bytes:
    """Return a square PNG of a single color (RFC 2083), not compressed."""
    row = b"\0" + bytes(rgb) * _SIDE_PIXELS
    head = struct.pack(">IIBBBBB", _SIDE_PIXELS, _SIDE_PIXELS, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(row * _SIDE_PIXELS, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


_RATE_HZ = 16_000
_TONE_HZ = 440
_SECONDS = (1, 4)


def check_sound(probe: Probe) -> str:
    counts = []
    for seconds in _SECONDS:
        data = {"data": base64.b64encode(wav(seconds)).decode(), "format": "wav"}
        question = _media_message("input_audio", data, "What do you hear? Answer with one word.")
        answer = probe.stream([question], 32)
        probe.tokens_seen += answer.tokens
        counts.append(answer.prompt_tokens)
    result = (
        f"{_SECONDS[0]} s of audio took {counts[0]} tokens, {_SECONDS[1]} s took {counts[1]} tokens"
    )
    if not counts[1] > counts[0]:
        raise CheckError(result)
    return result


def wav(seconds: int) -> bytes:
    samples = (
        round(12_000 * math.sin(2 * math.pi * _TONE_HZ * index / _RATE_HZ))
        for index in range(seconds * _RATE_HZ)
    )
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, _RATE_HZ, 0, "NONE", ""))  # mono, 2 bytes per sample
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return buffer.getvalue()
