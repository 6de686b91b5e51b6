"""Models that nobody here prepared: written by transformers, added by one command, proven."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.labkit import CHECKOUT, SPARE, STATE, Guest, Site, guest_named, lab

pytestmark = pytest.mark.engine

NAME = SPARE[0]
# What an engine without a GPU needs; all that an owner of such hosts would write.
PROFILE: dict[str, Any] = {
    "based_on": "plain",
    "summary": "Plain models on the CPU engine",
    "choose_when": "you try them in the lab",
    "limits": {"max_sequences": 4, "max_batched_tokens": 2048, "memory_fraction": 0.8},
    "kv_cache": {"size_gib": 0.25},
    "options": {"enforce-eager": True, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    lab("prepare", "--engine", "cpu")
    lab("up", NAME, "--fresh", "--engine", "cpu")
    argv = ["-m", "lab.engine", "run", "-m", "lab.model.published", "--out", str(STATE / "hub")]
    env = {**os.environ, "SPARK_LAB_ENGINE_BIND": str(STATE)}
    subprocess.run([sys.executable, *argv], cwd=CHECKOUT, env=env, check=True, timeout=600)
    made = Site(tmp_path_factory.mktemp("plain"), hosts=[NAME])
    profiles = made.root / "catalog/profiles"
    profiles.mkdir(parents=True)
    (profiles / "lab-plain.yml").write_text(yaml.safe_dump(PROFILE))
    return made


@pytest.fixture(scope="module")
def guest(site: Site) -> Guest:
    return guest_named(NAME)


def add(site: Site, repository: str) -> tuple[int, str]:
    """Type the one command; return its exit code and both outputs."""
    inventory = str(site.root / "inventory/lab.py")
    words = ["add", repository, "--inventory", inventory, "--limit", NAME]
    done = subprocess.run(
        [sys.executable, "-m", "spark_deploy", *words, "--profile", "lab-plain", "--force"],
        capture_output=True, text=True, check=False, cwd=CHECKOUT, timeout=120,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def added(site: Site, repository: str) -> str:
    code, said = add(site, repository)
    assert code == 0, said
    return said


def served(site: Site, model: str) -> None:
    site.choose(model=model, profile="lab-plain")
    run = site.deploy()
    assert run.exit_code == 0, run.stderr[-6000:]
    site.deploy().must_have_changed_nothing()


def log_of(guest: Guest) -> str:
    return guest.run(f"journalctl -u {guest.serving()[0]} -o cat")


def proof_of(guest: Guest) -> dict[str, Any]:
    found: dict[str, Any] = guest.json(f"cat /var/lib/spark/proofs/{guest.release()}.json")
    return found


def planned(site: Site) -> dict[str, Any]:
    done = site.look("plan", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


def weights_on(guest: Guest, tree: str) -> int:
    return int(guest.run(f"cat {tree}/*.safetensors | wc -c"))


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_a_decoder_is_added_by_one_command_and_proven(site: Site, guest: Guest, model: str) -> None:
    said = added(site, f"org/{model}")
    assert f"{model}.yml: written" in said
    assert f"UNPROVEN    nobody here ran org/{model}" in said
    served(site, model)

    # Where its template knows thinking it was taught to answer without.
    question = "What is the capital of France? Answer with one word."
    body = {
        "model": guest.names()[0], "temperature": 0, "max_tokens": 16,
        "messages": [{"role": "user", "content": question}],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    status, body = guest.call("POST", "/v1/chat/completions", body)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Paris")
    proof = proof_of(guest)
    assert proof["ok"]
    asked = {one["name"] for one in proof["checks"]}
    assert {"first answer", "answers", "stream", "parallel", "conversation"} & asked

    plan = planned(site)
    memory = plan["memory"]
    files = weights_on(guest, plan["sources"][0]["dir"])
    assert memory["weights_bytes"] == pytest.approx(files, rel=0.01)
    # What the engine says it has room for, of the cache that was pinned.
    [tokens] = re.findall(r"KV cache size: ([\d,]+) tokens", log_of(guest))[-1:]
    assert memory["kv_tokens"] == pytest.approx(int(tokens.replace(",", "")), rel=0.01)
    assert memory["unknown"] == []


def test_an_embedder_is_added_by_one_command_and_proven_by_its_numbers(
    site: Site, guest: Guest
) -> None:
    said = added(site, "org/tiny-embedder")
    text = (site.root / "catalog/models/tiny-embedder.yml").read_text()
    assert yaml.safe_load(text)["task"] == "embedding"
    served(site, "tiny-embedder")
    proof = proof_of(guest)
    assert proof["ok"], said
    asked = {one["name"]: one["detail"] for one in proof["checks"]}
    assert asked["embedding"].startswith("128 numbers")
    assert "first answer" not in asked
    body = {"model": guest.names()[0], "input": ["one text", "another"]}
    status, answer = guest.call("POST", "/v1/embeddings", body)
    assert (status, [len(one["embedding"]) for one in answer["data"]]) == (200, [128, 128])


def test_the_way_back_leads_to_the_model_before(site: Site, guest: Guest) -> None:
    """From the embedder to the decoder that served before it, without a download."""
    before = guest.release()
    run = site.deploy(deploy="deploys/rollback.py")
    assert run.exit_code == 0, run.stderr[-4000:]
    assert guest.release() != before
    assert guest.names() == ["lab-model"]
    assert guest.ask("How many days has a week? Answer with one word.")[0] == 200


def test_a_repository_that_is_none_is_one_line(site: Site) -> None:
    code, said = add(site, "org/nothing-here")
    assert code == 1
    assert "Traceback" not in said
    assert not Path(site.root / "catalog/models/nothing-here.yml").exists()
