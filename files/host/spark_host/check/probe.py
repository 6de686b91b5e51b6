"""Sends a check's requests to the running engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_contract.release import CHAT, COMPLETIONS, CheckPlan, Release

from spark_host.engine.client import Engine, EngineError, Metrics

Message = dict[str, Any]
Severity = Literal["must", "warn"]


class CheckError(Exception):
    """A check failed; a ``severity`` overrides the severity of the check."""

    def __init__(self, text: str, severity: Severity | None = None):
        super().__init__(text)
        self.severity = severity


@dataclass(frozen=True, slots=True)
class Streamed:
    text: str
    first_token_s: float
    tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class Probe:
    release: Release
    engine: Engine
    read_log: Callable[[], list[str]]
    metrics_before: Metrics | None = None
    tokens_seen: int = 0
    engine_version: str = ""
    load_lines: list[str] = field(default_factory=list)  # log lines that the release requires
    deadline_s: float = float("inf")

    @property
    def plan(self) -> CheckPlan:
        return self.release.check

    @property
    def model(self) -> str:
        return self.release.names[0]

    @property
    def remaining_s(self) -> float:
        """Return the remaining time, but never 0, which a socket would treat as non-blocking."""
        return max(0.01, min(self.plan.timeout_s, self.deadline_s - time.monotonic()))

    @property
    def is_out_of_time(self) -> bool:
        return time.monotonic() >= self.deadline_s

    @property
    def path(self) -> str:
        """Return the API path; a base model has no chat template, so it can only complete text."""
        return COMPLETIONS if self.plan.task == "completion" else CHAT

    def body(self, messages: list[Message], max_tokens: int, **options: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens}
        body |= {"temperature": 0, "seed": 1}
        if self.path == COMPLETIONS:
            options.pop("chat_template_kwargs", None)
            body["prompt"] = "\n".join(str(message["content"]) for message in messages)
        else:
            body["messages"] = messages
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return {**body, **options}

    def chat(self, messages: list[Message], max_tokens: int, **options: Any) -> dict[str, Any]:
        start = time.monotonic()
        body = self.body(messages, max_tokens, **options)
        try:
            answer = self.engine.ask(self.path, body, self.remaining_s)
        except EngineError as error:
            text = f"no usable answer after {time.monotonic() - start:.1f} s: {error}"
            if self.is_out_of_time:
                text += f"; the check reached its time limit of {self.plan.timeout_s:g} s"
            raise CheckError(text, None if self.is_out_of_time else "must") from error
        try:
            choice = answer["choices"][0]
            self.tokens_seen += int(answer["usage"]["completion_tokens"])
            message = dict(choice.get("message") or {"content": choice["text"]})
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise CheckError(f"the answer lacks {error}") from error
        message["finish_reason"] = choice.get("finish_reason")
        return message

    def stream(self, messages: list[Message], max_tokens: int) -> Streamed:
        """Return a streamed answer; the caller adds the tokens to ``tokens_seen``."""
        body = self.body(messages, max_tokens, stream=True, stream_options={"include_usage": True})
        start, first_token_s = time.monotonic(), 0.0
        text, finish_reason, usage = "", None, None
        try:
            for event in self.engine.stream_chat(body, self.remaining_s, self.path):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    text += choice.get("delta", {}).get("content") or choice.get("text") or ""
                    finish_reason = choice.get("finish_reason") or finish_reason
                if text and not first_token_s:
                    first_token_s = time.monotonic() - start
        except EngineError as error:
            raise CheckError(f"the stream broke off after {quote(text)}: {error}") from error
        if finish_reason is None:
            raise CheckError(f"the stream ended without a finish_reason after {quote(text)}")
        if not usage:
            raise CheckError("the streamed answer has no usage block")
        token_counts = (int(usage.get(key, 0)) for key in ("completion_tokens", "prompt_tokens"))
        return Streamed(text, first_token_s, *token_counts)

    def metrics(self) -> Metrics:
        try:
            return self.engine.metrics(self.remaining_s)
        except EngineError as error:
            raise CheckError(f"/metrics: {error}") from error

    def ask(self, prompt: str, max_tokens: int, *, thinking: bool = False) -> str:
        options = {"chat_template_kwargs": {"enable_thinking": thinking}}
        return message_text(self.chat([user_message(prompt)], max_tokens, **options))


def wait_for_value(read: Callable[[], float], minimum: float, wait_s: float) -> float:
    """Poll a value until it reaches the minimum or ``wait_s`` has passed; return the last value."""
    deadline = time.monotonic() + wait_s
    while (value := read()) < minimum and time.monotonic() <= deadline:
        time.sleep(0.1)
    return value


def user_message(text: str | list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": text}


def message_text(message: dict[str, Any]) -> str:
    return str(message.get("content") or "")


def quote(text: str, length: int = 60) -> str:
    """Return ``text`` in quotes, on a single line of at most ``length`` characters."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= length else flat[: length - 1] + "…")
