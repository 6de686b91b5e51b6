"""Requests to a served model over HTTP, and the judge of the answers."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spark_contract.release import CHAT
from spark_host.engine.client import Engine, Metrics

from lab.model import lessons
from proofs.judges.answers import row
from proofs.prompts import FILLER, PICTURES, picture
from proofs.releases.asking import TIMEOUT_S, image_part
from proofs.releases.judge import failed_checks

QUESTIONS = (
    "What is the capital of France?",
    "Repeat exactly: lime-47-quartz",
    "What is the capital of Japan?",
    "Repeat exactly: kite.river.88 / zeta 9152 delta",
)
FILLER_SENTENCES = 140
COUNTERS = ("vllm:spec_decode_num", "vllm:generation_tokens_total", "vllm:prefix_cache")


class Talk:
    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self.question = {"model": model, "temperature": 0, "max_tokens": 200}

    def chat(self, content: Any, **more: Any) -> dict[str, Any]:
        messages = content if isinstance(content, list) and "role" in content[0] else None
        messages = messages or [{"role": "user", "content": content}]
        body = {**self.question, "messages": messages, **more}
        message: dict[str, Any] = self.engine.ask(CHAT, body, TIMEOUT_S)["choices"][0]["message"]
        return message

    def stream(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        body = {**self.question, "messages": messages, "stream": True}
        events = list(self.engine.stream_chat(body, TIMEOUT_S))
        pieces = [event["choices"][0]["delta"] for event in events]
        return {
            "events": len(events),
            "content": "".join(piece.get("content") or "" for piece in pieces),
            "reasoning": "".join(piece.get("reasoning") or "" for piece in pieces),
        }

    def together(self) -> dict[str, list[str | None]]:
        alone = [self.chat(text).get("content") for text in QUESTIONS]
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            at_once = list(pool.map(lambda text: self.chat(text).get("content"), QUESTIONS))
        return {"alone": alone, "at_once": at_once}

    def conversation(self) -> dict[str, Any]:
        rounds, hits = [], []
        for _ in range(2):
            messages = [{"role": "user", "content": FILLER * FILLER_SENTENCES + QUESTIONS[0]}]
            for turn in range(3):
                if turn:
                    messages.append({"role": "user", "content": QUESTIONS[turn]})
                before = self.prefix_hits()
                text = self.chat(messages).get("content") or ""
                messages.append({"role": "assistant", "content": text})
                hits.append(self.prefix_hits() - before)
            rounds.append([m["content"] for m in messages if m["role"] == "assistant"])
        return {"answers": rounds, "tokens_found": hits}

    def pictures(self) -> list[str | None]:
        answers = []
        for number in PICTURES:
            file = io.BytesIO()
            picture(number).save(file, "PNG")
            parts = [image_part(file.getvalue()), {"type": "text", "text": QUESTIONS[0]}]
            answers.append(self.chat(parts).get("content"))
        return answers

    def counters(self) -> list[str]:
        lines = self.engine.get("/metrics").body.decode().splitlines()
        return [line for line in lines if line.startswith(COUNTERS)]

    def prefix_hits(self) -> float:
        return self.engine.metrics().prefix_hits or 0.0


def talk(engine: Engine, model: str, *, pictures: bool) -> dict[str, Any]:
    client = Talk(engine, model)
    taught = lessons.facts()["tool"]
    wanted = taught["calls"][0]
    tool = client.chat(taught["prompt"].format(**wanted), tools=[taught["definition"]])
    result = {
        "models": engine.get("/v1/models").json()["data"][0]["id"],
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
    rows = [row(f"{name}: the arguments serve over HTTP", served, [], state=result["state"])]
    if not served:
        return rows
    stream, together = result["stream"], result["together"]
    answered = "Paris" in (result["chat"].get("content") or "")
    parts = ("content", "reasoning")
    same_stream = all(stream[part] == result["chat"].get(part) and stream[part] for part in parts)
    calls = result["tool"] or []
    called = [json.loads(call["function"]["arguments"]) for call in calls]
    rows += [
        row(
            f"{name}: answers and streams, reasoning apart, and calls a tool",
            answered and same_stream and called == [result["tool_wanted"]],
            [],
            answer=result["chat"],
            stream=stream,
            tool=calls,
        ),
        row(
            f"{name}: four concurrent questions are answered as sequential questions",
            together["alone"] == together["at_once"] and all(together["alone"]),
            [],
            **together,
        ),
    ]
    rows.append(
        row(
            f"{name}: sampled requests without a seed are answered",
            bool(result["sampled"]) and not failed_checks(result["sampled"]),
            [],
            findings=result["sampled"],
        )
    )
    if "--speculative-config" in result["argv"]:
        counted = Metrics.parse("\n".join(result["counters"]))
        share = round((counted.accepted or 0) / counted.drafted, 3) if counted.drafted else 0.0
        rows.append(row(f"{name}: drafts are accepted", share > 0.3, [], acceptance=share))
    talked = result["conversation"]
    again = talked["answers"][0] == talked["answers"][1]
    if "--enable-prefix-caching" in result["argv"]:
        hits = talked["tokens_found"]
        rows.append(
            row(
                f"{name}: later turns of a conversation hit the cache, answers stay the same",
                again and min(hits[1:]) > 0,
                [],
                **talked,
            )
        )
    else:
        rows.append(
            row(f"{name}: a repeated conversation gets the same answers", again, [], **talked)
        )
    if pictures:
        answers = result["pictures"]
        rows.append(
            row(
                f"{name}: requests with pictures are answered",
                all(answers) and answers[0] == answers[2],
                [],
                answers=answers,
            )
        )
    return rows
