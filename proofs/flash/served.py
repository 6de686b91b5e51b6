"""Serve a small Qwen4Exp checkpoint over HTTP with the arguments of profile flash-nvme."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spark_contract.release import COMPLETIONS, Release
from spark_host.engine.client import Engine

from lab.model import vocabulary
from proofs.engine import run as engine_run
from proofs.flash import model
from proofs.flash.run import HEAD, Row, case
from proofs.flash.stages import CAVEATS
from proofs.judges.answers import compare_answers, failed_start, row
from proofs.prompts import random_prompts
from proofs.releases.asking import TIMEOUT_S, completion, count_drafts
from proofs.releases.server import Server
from proofs.result_files import write_result
from proofs.serve import case as serve_case

TREE = "flash-planned"
LENGTHS, TOKENS = [200, 96, 33, 64], 64
SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
COUNTED = "spark_inc:"
"""The log line with the number of modules of the true model."""


def make(trees: Path) -> None:
    model.make(trees)
    size, positions = model.TEXT["vocab_size"], model.TEXT["max_position_embeddings"]
    vocabulary.write(trees / TREE, vocabulary.train(size), positions)


def talk(server: Server, release: Release) -> Row:
    def answer(prompt: list[int], **more: Any) -> Row:
        return completion(server, release.names[0], prompt, TOKENS, ignore_eos=True, **more)

    prompts = random_prompts(LENGTHS)
    result: Row = {"alone": [answer(prompt) for prompt in prompts]}
    result["drafts"] = count_drafts(server)
    with ThreadPoolExecutor(len(prompts)) as pool:
        result["at_once"] = list(pool.map(answer, prompts))
        result["sampled"] = list(pool.map(lambda prompt: answer(prompt, **SAMPLED), prompts))
    result["streamed"] = [_stream(server, release.names[0], prompt) for prompt in prompts]
    return result


def _stream(server: Server, name: str, prompt: list[int]) -> list[int]:
    body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    events = Engine(server.socket).stream_chat(body, TIMEOUT_S, COMPLETIONS)
    choices = [choice for event in events for choice in event["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


def judge(result: Row, offline: Row, patterns: list[str]) -> list[Row]:
    served = result["state"] == "served"
    rows = [row("flash-nvme: the arguments serve over HTTP", served, [], state=result["state"])]
    if offline["state"] != "ran":
        rows.append(failed_start("offline", offline))
    if not all(entry["passed"] for entry in rows):
        return rows
    alone, at_once = ({"answers": result[key]} for key in ("alone", "at_once"))
    known, following = model.next_tokens(), 0
    for prompt, answer in zip(random_prompts(LENGTHS), result["alone"], strict=True):
        before = [prompt[-1], *answer["tokens"][:-1]]
        following += int((known[before] == answer["tokens"]).sum())
    share = round(following / len(LENGTHS) / TOKENS, 3)
    for claim, pair in {
        "answers are those of an offline engine without drafts": (offline, alone),
        "concurrent requests are answered as sequential ones": (alone, at_once),
    }.items():
        compared = compare_answers(*pair)
        numbers = {**compared, "as_constructed": share}
        passed = not compared["beyond_margin"] and share > 0.5
        rows.append(row(f"flash-nvme: {claim} outside ties", passed, [], **numbers))
    whole = [answer["tokens"] for answer in result["alone"]]
    agree = [streamed == tokens for streamed, tokens in zip(result["streamed"], whole, strict=True)]
    claim = "flash-nvme: streamed answers equal unstreamed answers"
    rows.append(row(claim, all(agree), [], answers=len(agree), equal=sum(agree)))
    drafts = result["drafts"]
    rate = round(drafts["accepted"] / drafts["drafted"], 3) if drafts["drafted"] else 0.0
    rows.append(row("flash-nvme: drafts are accepted", rate > 0.3, [], acceptance=rate))
    finished = sum(
        len(answer["tokens"]) == TOKENS and all(map(math.isfinite, answer["logprobs"]))
        for answer in result["sampled"]
    )
    claim = "flash-nvme: sampled requests without a seed are answered"
    rows.append(row(claim, finished == len(LENGTHS), [], answers=finished))
    kernels = serve_case.judge_kernels("flash-nvme", patterns, "\n".join(result["log"]))
    return [*rows, kernels]


def prove(trees: Path, work: Path, out: Path, plan_path: Path) -> list[Row]:
    """Serve like the first host of a JSON plan, write the result file, return the rows."""
    from proofs.stages import environment

    out.parent.mkdir(parents=True, exist_ok=True)
    plan = json.loads(plan_path.read_text())[0]
    patterns = [text for text in plan["release"]["check"]["log_required"] if COUNTED not in text]
    reference = case("offline", TREE, additional=HEAD, lengths=LENGTHS, capture=False)
    offline = engine_run.run_cases([reference], trees, work, module="proofs.flash.engine")
    result = serve_case.serve(plan, str(trees / TREE), out.with_suffix(".log"), "", talk)
    rows = judge(result, offline["offline"], patterns)
    answers = ("alone", "at_once", "streamed", "sampled")
    kept = {key: value for key, value in result.items() if key not in answers}
    failed = not all(entry["passed"] for entry in rows)
    document = {**environment(), "caveats": CAVEATS, "tree": TREE, "seed": 0, "rows": rows}
    write_result(out, {**document, **(result if failed else kept)})
    return rows
