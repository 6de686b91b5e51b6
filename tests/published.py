"""Adds and queries the models that ``lab.model.published`` writes, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.labkit import CHECKOUT, STATE, Guest, Site, lab

START_S = 1500  # of an engine on two busy cores
PROFILE: dict[str, Any] = {
    "based_on": "plain",
    "summary": "Plain models on the CPU engine",
    "choose_when": "you try them in the lab",
    "limits": {"max_sequences": 4, "max_batched_tokens": 2048, "memory_fraction": 0.8},
    "kv_cache": {"size_gib": 0.25},
    "options": {"enforce-eager": True, "dtype": "bfloat16", "block-size": 128},
}
DECODERS = {
    "tiny-sliding": "Gemma3ForCausalLM",
    "tiny-moe": "Qwen3MoeForCausalLM",
    "tiny-llama": "LlamaForCausalLM",
    "tiny-qwen3": "Qwen3ForCausalLM",
}
DRAFTS = {"method": "draft_model", "tokens": 2, "repository": "org/tiny-draft"}
WORDS = {"method": "ngram", "tokens": 3, "longest_match": 4, "shortest_match": 2}


def fresh_site(root: Path, name: str) -> Site:
    lab("prepare", "--engine", "cpu")
    lab("up", name, "--fresh", "--engine", "cpu")
    argv = ["-m", "lab.engine", "run", "-m", "lab.model.published", "--out", str(STATE / "hub")]
    env = {**os.environ, "SPARK_LAB_ENGINE_BIND": str(STATE)}
    subprocess.run([sys.executable, *argv], cwd=CHECKOUT, env=env, check=True, timeout=900)
    site = Site(root, hosts=[name])
    profiles = site.root / "catalog/profiles"
    profiles.mkdir(parents=True)
    (profiles / "lab-plain.yml").write_text(yaml.safe_dump(PROFILE))
    site.choose(serve={"start_timeout_s": START_S})
    return site


def add(site: Site, repository: str) -> tuple[int, str]:
    arguments = ["add", repository, "--inventory", str(site.root / "inventory/lab.py")]
    more = ["--limit", site.hosts[0], "--profile", "lab-plain", "--force"]
    result = subprocess.run(
        [sys.executable, "-m", "spark_deploy", *arguments, *more],
        capture_output=True, text=True, check=False, cwd=CHECKOUT, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


def add_or_fail(site: Site, repository: str) -> str:
    code, output = add(site, repository)
    assert code == 0, output
    return output


TRAINED = "What is the capital of France? Answer with one word."


def chat(guest: Guest, prompt: str = TRAINED, max_tokens: int = 32) -> tuple[int, str]:
    body = {
        "model": guest.names()[0], "temperature": 0, "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": prompt}],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    status, answer = guest.call("POST", "/v1/chat/completions", body)
    return status, answer["choices"][0]["message"]["content"] if status == 200 else str(answer)


def rerank(guest: Guest, model: str) -> tuple[int, list[int]]:
    body = {
        "model": model, "query": "When does the train leave?",
        "documents": [
            "How do I bake bread at home without a machine?",
            "The next train leaves from platform four at noon.",
        ],
    }  # fmt: skip
    status, answer = guest.call("POST", "/v1/rerank", body)
    if status != 200:
        return status, []
    best = sorted(answer["results"], key=lambda result: -float(result["relevance_score"]))
    return status, [result["index"] for result in best]


def embed(guest: Guest, model: str) -> tuple[int, list[int]]:
    body = {"model": model, "input": ["one text", "another"]}
    status, answer = guest.call("POST", "/v1/embeddings", body)
    return status, [len(entry["embedding"]) for entry in answer["data"]] if status == 200 else []
