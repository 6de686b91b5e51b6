"""Requests to a served model over HTTP, and the judge of the answers."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab.model import lessons
from proofs.prompts import FILLER, picture
from proofs.releases.judge import failed_checks

QUESTIONS = (
    "What is the capital of France?",
    "Repeat exactly: lime-47-quartz",
    "What is the capital of Japan?",
    "Repeat exactly: kite.river.88 / zeta 9152 delta",
)
FILLER_SENTENCES = 140
"""About 700 tokens: longer than two cache blocks of the lab's trained model."""
COUNTERS = ("vllm:spec_decode_num", "vllm:generation_tokens_total", "vllm:prefix_cache")
CHAT = "/v1/chat/completions"


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(120)
        self.sock.connect(self._path)


def ask(path: str, method: str, target: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    connection = UnixConnection(path)
    content = json.dumps(body) if body else None
    connection.request(method, target, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


class Talk:
    def __init__(self, sock: str, model: str) -> None:
        self.sock = sock
        self.question = {"model": model, "temperature": 0, "max_tokens": 200}

    def chat(self, content: Any, **more: Any) -> dict[str, Any]:
        messages = content if isinstance(content, list) and "role" in content[0] else None
        messages = messages or [{"role": "user", "content": content}]
        body = {**self.question, "messages": messages, **more}
        status, text = ask(self.sock, "POST", CHAT, body)
        if status != 200:
            raise ValueError(f"status {status}: {text[:300]}")
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        return message

    def stream(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        body = {**self.question, "messages": messages, "stream": True}
        status, text = ask(self.sock, "POST", CHAT, body)
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        pieces = [json.loads(event)["choices"][0]["delta"] for event in events if event != "[DONE]"]
        return {
            "status": status,
            "events": len(events),
            "done": events[-1] == "[DONE]",
            "content": "".join(piece.get("content") or "" for piece in pieces),
            "reasoning": "".join(piece.get("reasoning") or "" for piece in pieces),
        }

    def together(self) -> dict[str, list[str | None]]:
        alone = [self.chat(text).get("content") for text in QUESTIONS]
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            at_once = list(pool.map(lambda text: self.chat(text).get("content"), QUESTIONS))
        return {"alone": alone, "at_once": at_once}

    def conversation(self) -> dict[str, Any]:
        """Run a conversation of three turns twice; return answers and cache hits."""
        rounds, hits = [], []
        for _ in range(2):
            messages = [{"role": "user", "content": FILLER * FILLER_SENTENCES + QUESTIONS[0]}]
            for turn in range(3):
                if turn:
                    messages.append({"role": "user", "content": QUESTIONS[turn]})
                before = self.counter("vllm:prefix_cache_hits_total")
                text = self.chat(messages).get("content") or ""
                messages.append({"role": "assistant", "content": text})
                hits.append(self.counter("vllm:prefix_cache_hits_total") - before)
            rounds.append([m["content"] for m in messages if m["role"] == "assistant"])
        return {"answers": rounds, "tokens_found": hits}

    def pictures(self) -> list[str | None]:
        """Return the answers about three pictures; the first and last are equal."""
        answers = []
        for number in (1, 2, 1):
            file = io.BytesIO()
            picture(number).save(file, "PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            parts = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": QUESTIONS[0]},
            ]
            answers.append(self.chat(parts).get("content"))
        return answers

    def counters(self) -> list[str]:
        lines = ask(self.sock, "GET", "/metrics")[1].splitlines()
        return [line for line in lines if line.startswith(COUNTERS)]

    def counter(self, name: str) -> float:
        return sum(float(line.split()[-1]) for line in self.counters() if line.startswith(name))


def talk(sock: str, model: str, *, pictures: bool) -> dict[str, Any]:
    client = Talk(sock, model)
    taught = lessons.facts()["tool"]  # the only tool that the lab's model was trained on
    wanted = taught["calls"][0]
    tool = client.chat(taught["prompt"].format(**wanted), tools=[taught["definition"]])
    result = {
        "models": json.loads(ask(sock, "GET", "/v1/models")[1])["data"][0]["id"],
        "chat": client.chat(QUESTIONS[0]),
        "stream": client.stream(),
        "tool": tool.get("tool_calls"),
        "tool_wanted": wanted,
        "together": client.together(),
        "conversation": client.conversation(),
        "pictures": client.pictures() if pictures else None,
    }
    return {**result, "counters": client.counters()}


def judge(result: dict[str, Any], profile: str, *, pictures: bool) -> list[dict[str, Any]]:
    served = result["state"] == "served"
    name = f"{profile}{', pictures' if pictures else ''}"
    rows = [_row(f"{name}: the arguments serve over HTTP", served, state=result["state"])]
    if not served:
        return rows
    stream, together = result["stream"], result["together"]
    answered = "Paris" in (result["chat"].get("content") or "")
    parts = ("content", "reasoning")
    same_stream = stream["done"] and all(
        stream[part] == result["chat"].get(part) and stream[part] for part in parts
    )
    calls = result["tool"] or []
    called = [json.loads(call["function"]["arguments"]) for call in calls]
    rows += [
        _row(
            f"{name}: answers and streams, reasoning apart, and calls a tool",
            answered and same_stream and called == [result["tool_wanted"]],
            answer=result["chat"],
            stream=stream,
            tool=calls,
        ),
        _row(
            f"{name}: four concurrent questions are answered as sequential questions",
            together["alone"] == together["at_once"] and all(together["alone"]),
            **together,
        ),
    ]
    rows.append(
        _row(
            f"{name}: sampled requests without a seed are answered",
            bool(result["sampled"]) and not failed_checks(result["sampled"]),
            findings=result["sampled"],
        )
    )
    drafted = _total(result, "vllm:spec_decode_num_draft_tokens_total")
    if "--speculative-config" in result["argv"]:
        accepted = _total(result, "vllm:spec_decode_num_accepted_tokens_total")
        share = round(accepted / drafted, 3) if drafted else 0.0
        rows.append(_row(f"{name}: drafts are accepted", share > 0.3, acceptance=share))
    talked = result["conversation"]
    again = talked["answers"][0] == talked["answers"][1]
    if "--enable-prefix-caching" in result["argv"]:
        hits = talked["tokens_found"]
        rows.append(
            _row(
                f"{name}: later turns of a conversation hit the cache, answers stay the same",
                again and min(hits[1:]) > 0,
                **talked,
            )
        )
    else:
        rows.append(_row(f"{name}: a repeated conversation gets the same answers", again, **talked))
    if pictures:
        answers = result["pictures"]
        rows.append(
            _row(
                f"{name}: requests with pictures are answered",
                all(answers) and answers[0] == answers[2],
                answers=answers,
            )
        )
    return rows


def _total(result: dict[str, Any], name: str) -> float:
    return sum(float(line.split()[-1]) for line in result["counters"] if line.startswith(name))


def _row(claim: str, passed: bool, **numbers: Any) -> dict[str, Any]:
    return {"claim": claim, "passed": bool(passed), "numbers": numbers}
