"""What every check gets, and how it reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_contract.release import CHAT, COMPLETIONS, CheckPlan, Release

from spark_host.engine.client import Engine, EngineError
from spark_host.engine.metrics import Metrics

Message = dict[str, Any]
Weight = Literal["must", "warn"]


class CheckError(Exception):
    """The engine violates what is checked; the message is a plain sentence.

    It weighs what its check does, unless a ``weight`` says otherwise: a right server may show a
    part of what a check looks at, and one that answers with an error is broken whoever asks.
    """

    def __init__(self, text: str, weight: Weight | None = None):
        super().__init__(text)
        self.weight = weight


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed answer that came whole."""

    text: str
    wait_s: float  # until its first text
    tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class Probe:
    """A running engine and what is known about it so far."""

    release: Release
    engine: Engine
    read_log: Callable[[], list[str]]
    before: Metrics | None = None
    tokens_seen: int = 0
    engine_version: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    load_lines: list[str] = field(default_factory=list)  # demanded of the log, and found
    until_s: float = float("inf")

    @property
    def plan(self) -> CheckPlan:
        """What the release wants checked."""
        return self.release.check

    @property
    def model(self) -> str:
        """The name requests are sent to: the first one, stable over rollouts."""
        return self.release.names[0]

    @property
    def left_s(self) -> float:
        """Seconds this check may still take; never 0, which would mean no limit to a socket."""
        return max(0.01, min(self.plan.timeout_s, self.until_s - time.monotonic()))

    @property
    def out_of_time(self) -> bool:
        """Whether this check has used up its time."""
        return time.monotonic() >= self.until_s

    @property
    def path(self) -> str:
        """Where text is asked for: a base model goes on with a text and knows no roles."""
        return COMPLETIONS if self.plan.task == "completion" else CHAT

    def body(self, messages: list[Message], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return a greedy request; thinking is off unless ``more`` says otherwise."""
        if self.path == COMPLETIONS:
            more.pop("chat_template_kwargs", None)
            prompt = "\n".join(str(one["content"]) for one in messages)
            asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
            return {**asked, "temperature": 0, "seed": 1, **more}
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 1,
            "chat_template_kwargs": {"enable_thinking": False},
            **more,
        }

    def chat(self, messages: list[Message], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the first choice's message of a chat answer; count its tokens.

        Raises:
            CheckError: No complete, well-formed answer within the limit.
        """
        start = time.monotonic()
        try:
            answer = self.engine.ask(
                self.path, self.body(messages, max_tokens, **more), self.left_s
            )
        except EngineError as error:
            waited = time.monotonic() - start
            late = self.out_of_time
            limit = f"; the check's {self.plan.timeout_s:g} s are over" if late else ""
            what = f"no usable answer after {waited:.1f} s: {error}{limit}"
            raise CheckError(what, None if late else "must") from error
        try:
            choice = answer["choices"][0]
            self.tokens_seen += int(answer["usage"]["completion_tokens"])
            message = dict(choice.get("message") or {"content": choice["text"]})
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise CheckError(f"the answer lacks {error}") from error
        message["finish_reason"] = choice.get("finish_reason")
        return message

    def streamed(self, messages: list[Message], max_tokens: int) -> Streamed:
        """Return a streamed answer that came whole; the caller counts its tokens.

        Raises:
            CheckError: It broke off, or lacks its end.
        """
        body = self.body(messages, max_tokens, stream=True, stream_options={"include_usage": True})
        start, wait_s = time.monotonic(), 0.0
        text, finished, usage = "", None, None
        try:
            for event in self.engine.stream_chat(body, self.left_s, self.path):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    text += choice.get("delta", {}).get("content") or choice.get("text") or ""
                    finished = choice.get("finish_reason") or finished
                if text and not wait_s:
                    wait_s = time.monotonic() - start
        except EngineError as error:
            raise CheckError(f"the streamed answer broke: {error}, after {short(text)}") from error
        if finished is None:
            raise CheckError(f"the streamed answer has no finish_reason, after {short(text)}")
        if not usage:
            raise CheckError("the streamed answer carries no usage")
        counted = (int(usage.get(key, 0)) for key in ("completion_tokens", "prompt_tokens"))
        return Streamed(text, wait_s, *counted)

    def metrics(self) -> Metrics:
        """Return the engine's counters and gauges."""
        try:
            return self.engine.metrics(self.left_s)
        except EngineError as error:
            raise CheckError(f"/metrics: {error}") from error

    def say(self, prompt: str, max_tokens: int, *, thinking: bool = False) -> str:
        """Return the text of the answer to one prompt."""
        more = {"chat_template_kwargs": {"enable_thinking": thinking}}
        return content(self.chat([user(prompt)], max_tokens, **more))


def user(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def content(message: dict[str, Any]) -> str:
    """Return the text of a message; an absent one is empty."""
    return str(message.get("content") or "")


def short(text: str, length: int = 60) -> str:
    """Return ``text`` quoted and cut, fit for a sentence."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= length else flat[: length - 1] + "…")
