"""Prompts for served releases: recall contexts, pictures, and the questions of spark-check."""

import base64
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from spark_contract.documents import to_plain
from spark_contract.paths import Paths
from spark_contract.release import CHAT, COMPLETIONS, LOG_LINES, Release
from spark_host.check import compare
from spark_host.check.checks import CHECKS
from spark_host.check.probe import CheckError, Probe
from spark_host.check.questions import png
from spark_host.engine.client import Engine, EngineError
from spark_host.system.host import Host

from proofs.prompts import COLORS, SEVERAL_PICTURES
from proofs.recall import language
from proofs.releases.server import Server

TIMEOUT_S = 120.0
AT_ONCE = 4
LENGTHS = {4096: {"record": 24, "passage": 4, "register": 4}, 12288: {"record": 8, "passage": 4}}
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
NOT_ASKED = LOG_LINES
"""Skipped: it checks kernels and libraries of a Spark's image."""


def recall_questions() -> list[language.Question]:
    questions = []
    for length, kinds in LENGTHS.items():
        text = language.context(np.random.default_rng([length, 7]), length, near=True, asks=False)
        for question in language.questions(text, length, kinds):
            tokens = [*text.tokens.tolist(), *question.tokens]
            questions.append(
                language.Question(question.kind, tokens, question.answer, question.depth)
            )
    return questions


def ask_recall_questions(server: Server, model: str) -> list[dict[str, Any]]:
    questions = recall_questions()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(
            pool.map(
                lambda question: completion(
                    server, model, question.tokens, len(question.answer), ignore_eos=True
                ),
                questions,
            )
        )
    return [
        {"kind": question.kind, "wanted": question.answer, **answer}
        for question, answer in zip(questions, answers, strict=True)
    ]


def completion(
    server: Server,
    model: str,
    prompt: list[int] | str,
    tokens: int,
    *,
    ignore_eos: bool,
    **more: Any,
) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": ignore_eos,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": False,
        **more,
    }
    choice = Engine(server.socket).ask(COMPLETIONS, body, TIMEOUT_S)["choices"][0]
    logprobs = choice["logprobs"]
    margins = []
    for step in logprobs["top_logprobs"]:
        best = sorted(step.values(), reverse=True)
        margins.append(round(best[0] - best[1], 4) if len(best) > 1 else 0.0)
    return {
        "tokens": [int(name.rpartition(":")[2]) for name in logprobs["tokens"]],
        "logprobs": [round(value, 4) for value in logprobs["token_logprobs"]],
        "margins": margins,
        "text": choice["text"],
    }


def count_drafts(server: Server) -> dict[str, float]:
    metrics = Engine(server.socket).metrics()
    return {"drafted": metrics.total(DRAFTED) or 0.0, "accepted": metrics.total(ACCEPTED) or 0.0}


def run_check(server: Server, release: Release, only: str | None = None) -> list[dict[str, Any]]:
    probe = Probe(release, Engine(server.socket), server.lines)
    probe.metrics_before = probe.metrics()
    findings = []
    for check_entry in CHECKS:
        if (
            check_entry.level == "deep"
            or check_entry.name == NOT_ASKED
            or not check_entry.applies(probe.plan)
        ):
            continue
        if only is not None and check_entry.name != only:
            continue
        started = time.monotonic()
        probe.deadline_s = started + TIMEOUT_S
        result: dict[str, Any] = {"ok": True, "severity": check_entry.severity}
        try:
            result["detail"] = check_entry.run(probe)
        except (CheckError, EngineError) as error:
            severity = getattr(error, "severity", None) or check_entry.severity
            result = {"ok": False, "severity": severity, "detail": str(error)}
        findings.append(
            {"check": check_entry.name, **result, "s": round(time.monotonic() - started, 2)}
        )
    return findings


def record_answers(server: Server, release: Release) -> dict[str, Any]:
    prompts = compare.check_prompts(release)
    host = Host(Paths(server.log.parent))
    answers: dict[str, Any] = to_plain(
        compare.collect_answers(release, Engine(server.socket), prompts, host)
    )
    return answers


def ask_check_questions(server: Server, release: Release) -> list[dict[str, Any]]:
    plan = release.check
    prompts = [question.prompt for question in plan.questions]
    prompts += [f"Repeat exactly: {text}" for text in plan.copy]
    turns = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    rendered = [turns.format(prompt) for prompt in prompts]
    name = release.names[0]
    return [completion(server, name, text, 96, ignore_eos=False) for text in rendered]


DOCUMENTS = (
    ("red", "blue"),
    ("blue", "red"),
    ("green", "yellow", "black"),
    ("white", "red", "green"),
    ("black", "black"),
    ("yellow", "blue", "white"),
)


def ask_about_pictures(server: Server, model: str) -> list[dict[str, Any]]:
    answers = []
    for names in DOCUMENTS:
        images = [image_part(png(COLORS[name])) for name in names]
        content = [*images, {"type": "text", "text": SEVERAL_PICTURES}]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 32,
            "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        answer = Engine(server.socket).ask(CHAT, body, TIMEOUT_S)
        text = (answer["choices"][0]["message"].get("content") or "").strip()
        answers.append({"wanted": " ".join(names), "said": text})
    return answers


def image_part(content: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
