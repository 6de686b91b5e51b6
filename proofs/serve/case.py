"""Serve a checkpoint over HTTP with the arguments of a profile, and test the answers.

The result lists replacements for this machine and a tiny model.
"""

import io
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spark_contract import documents
from spark_contract.release import CHAT, Release
from spark_host.engine.client import Engine, EngineError, Metrics

from lab.model import lessons
from proofs import stages
from proofs.engine import quick
from proofs.judges.answers import row
from proofs.prompts import FILLER, PICTURES, picture
from proofs.releases import asking
from proofs.releases.asking import TIMEOUT_S, image_part
from proofs.releases.judge import failed_checks
from proofs.releases.server import MACHINE, Server
from proofs.result_files import write_result
from proofs.serve import long as serve_long

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
        deltas = [event["choices"][0]["delta"] for event in events]
        return {
            "events": len(events),
            "content": "".join(delta.get("content") or "" for delta in deltas),
            "reasoning": "".join(delta.get("reasoning") or "" for delta in deltas),
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


def talk_to(engine: Engine, model: str, *, pictures: bool) -> dict[str, Any]:
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


def judge_talk(result: dict[str, Any], profile: str, *, pictures: bool) -> list[dict[str, Any]]:
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
    sampled = result["sampled"]
    claim = f"{name}: sampled requests without a seed are answered"
    passed = bool(sampled) and not failed_checks(sampled)
    rows.append(row(claim, passed, [], findings=sampled))
    if "--speculative-config" in result["argv"]:
        counted = Metrics.parse("\n".join(result["counters"]))
        share = round((counted.accepted or 0) / counted.drafted, 3) if counted.drafted else 0.0
        rows.append(row(f"{name}: drafts are accepted", share > 0.3, [], acceptance=share))
    talked = result["conversation"]
    again = talked["answers"][0] == talked["answers"][1]
    if "--enable-prefix-caching" in result["argv"]:
        claim = f"{name}: later turns of a conversation hit the cache, answers stay the same"
        rows.append(row(claim, again and min(talked["tokens_found"][1:]) > 0, [], **talked))
    else:
        claim = f"{name}: a repeated conversation gets the same answers"
        rows.append(row(claim, again, [], **talked))
    if pictures:
        answers = result["pictures"]
        passed = all(answers) and answers[0] == answers[2]
        rows.append(
            row(f"{name}: requests with pictures are answered", passed, [], answers=answers)
        )
    return rows


REPLACED = {"--max-model-len": "4096", "--gpu-memory-utilization": "0.05"}
CACHE_DIRECTORY = "/tmp/spark-serve-cache"
"""Shared by all profiles, which compile the same kernels."""
CACHE = "--kv-cache-memory-bytes"
CACHE_BYTES = 1 << 30
"""Without a profiling run: other engines on the same card would disturb it."""
START_LIMIT_S = 420


def adapt_arguments(
    argv: list[str], tree: str, sock: str, kind: str
) -> tuple[list[str], list[str]]:
    changed = []
    result = [tree, *(word.replace('"/cache/', f'"{CACHE_DIRECTORY}/') for word in argv[1:])]
    replaced = {**REPLACED, "--uds": sock}
    if kind == "long":
        replaced.pop("--max-model-len")
    for option, value in replaced.items():
        if option in result:
            index = result.index(option) + 1
            changed.append(f"{option}: {result[index]} -> {value}")
            result[index] = value
    if kind == "pictures":
        result.remove("--language-model-only")
        changed.append("without --language-model-only, as vision: true renders it")
    added = {CACHE: str(serve_long.CACHE_BYTES if kind == "long" else CACHE_BYTES)}
    if "turboquant" not in " ".join(argv):  # it chooses by itself
        added["--attention-config"] = json.dumps({"flash_attn_version": quick.flash_attention()})
    for option, value in added.items():
        result += [option, value]
        changed.append(f"added {option} {value}")
    return result, changed


def adapt_environment(planned: dict[str, str]) -> dict[str, str]:
    moved = {name: value.replace("/cache", CACHE_DIRECTORY, 1) for name, value in planned.items()}
    # Without the variable vLLM loads every plugin; the release's image has none to load.
    return {"VLLM_PLUGINS": "", **moved, **MACHINE}


def start(plan: dict[str, Any], tree: str, log: Path, kind: str) -> Server:
    engine = plan["release"]["engine"]
    socket = Path(f"/tmp/spark-engine-{log.stem}-{os.getpid()}.sock")
    argv, changed = adapt_arguments(engine["argv"], tree, str(socket), kind)
    server = Server(log, socket, argv, {**os.environ, **adapt_environment(engine["env"])}, changed)
    server.start(apart=False)
    return server


def serve(
    plan: dict[str, Any],
    tree: str,
    log: Path,
    kind: str,
    talk: Callable[[Server, Release], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    release = documents.read(Release, plan["release"])
    server = start(plan, tree, log, kind)
    result: dict[str, Any] = {
        "argv": server.argv,
        "changed": server.changed,
        "env": release.engine.env,
        "env_changed": [f"/cache -> {CACHE_DIRECTORY}", *(f"{k}={v}" for k, v in MACHINE.items())],
        "state": "died",
    }
    try:
        result["healthy_s"] = server.healthy(START_LIMIT_S)
        if result["healthy_s"] is not None:
            result["state"] = "talking"
            engine, name = Engine(server.socket), release.names[0]
            if talk:
                result.update(talk(server, release))
            elif kind == "long":
                result.update(serve_long.talk(engine, name))
            else:
                result.update(talk_to(engine, name, pictures=kind == "pictures"))
                result["sampled"] = asking.run_check(server, release, "sampled")
            result["state"] = "served"
    except (EngineError, KeyError, ValueError, OSError) as error:
        result["error"] = repr(error)
    finally:
        server.stop()
    result["log"] = server.kernel_lines()
    result["log_tail"] = [] if result["state"] == "served" else server.lines()[-25:]
    return result


def judge_kernels(name: str, pinned: list[str], log: str) -> dict[str, Any]:
    matches = {pattern: bool(re.search(pattern, log)) for pattern in pinned}
    claim = f"{name}: the log names every kernel that the profile pins"
    return row(claim, all(matches.values()), [], **matches)


def prove(tree: Path, out: Path, plan_path: Path, kind: str = "") -> list[dict[str, Any]]:
    """Serve ``tree`` like the first host of a JSON plan, write the result file, return the rows.

    Kind ``pictures`` keeps the vision tower; ``long`` samples the watchdog's metrics.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    log_path = out.with_suffix(".log")
    plan = json.loads(plan_path.read_text())[0]
    result = serve(plan, str(tree), log_path, kind)
    profile = plan["release"]["profile"]
    if kind == "long":
        rows = serve_long.judge(result, profile)
    else:
        rows = judge_talk(result, profile, pictures=kind == "pictures")
        pinned = [text for text in plan["release"]["check"]["log_required"] if "Using " in text]
        name = f"{profile}, {kind}" if kind else profile
        rows.append(judge_kernels(name, pinned, "\n".join(result["log"])))
    document = {**stages.environment(), "tree": tree.name, "seed": 0, "rows": rows, **result}
    write_result(out, document)
    return rows
