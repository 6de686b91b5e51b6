"""A chat model, an embedder and a ranker on one host, each by the real engine, under one address.

The repositories are written by transformers; the engines are the CPU build, one for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.labkit import CHECKOUT, SPARE, STATE, Guest, Site, guest_named, lab
from tests.published import PROFILE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

NAME = SPARE[0]
CHAT, EMBEDDER, RANKER = "tiny-qwen3", "tiny-embedder", "tiny-reranker"
START_S = 1500  # of an engine on two cores that others use as well
SERVICES = {
    "embed": {"model": EMBEDDER, "profile": "lab-plain", "port": 8001, "memory_gib": 5,
              "names": ["embedder"]},
    "rerank": {"model": RANKER, "profile": "lab-plain", "port": 8002, "memory_gib": 5,
               "names": ["ranker"]},
}  # fmt: skip
QUESTION = "What is the capital of France? Answer with one word."
DOCUMENTS = [
    "How do I bake bread at home without a machine?",
    "The next train leaves from platform four at noon.",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    lab("prepare", "--engine", "cpu")
    lab("up", NAME, "--fresh", "--engine", "cpu")
    argv = ["-m", "lab.engine", "run", "-m", "lab.model.published", "--out", str(STATE / "hub")]
    env = {**os.environ, "SPARK_LAB_ENGINE_BIND": str(STATE)}
    subprocess.run([sys.executable, *argv], cwd=CHECKOUT, env=env, check=True, timeout=900)
    made = Site(tmp_path_factory.mktemp("three"), hosts=[NAME])
    profiles = made.root / "catalog/profiles"
    profiles.mkdir(parents=True)
    (profiles / "lab-plain.yml").write_text(yaml.safe_dump(PROFILE))
    for model in (CHAT, EMBEDDER, RANKER):
        added(made, f"org/{model}")
    made.choose(
        model=CHAT,
        profile="lab-plain",
        services=SERVICES,
        serve={"start_timeout_s": START_S},
        memory={"total_gib": 20},
    )
    return made


def added(site: Site, repository: str) -> None:
    words = ["add", repository, "--inventory", str(site.root / "inventory/lab.py")]
    more = ["--limit", NAME, "--profile", "lab-plain", "--force"]
    done = subprocess.run(
        [sys.executable, "-m", "spark_deploy", *words, *more],
        capture_output=True, text=True, check=False, cwd=CHECKOUT, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def guest(site: Site) -> Guest:
    run = site.deploy(timeout_s=4 * START_S)
    assert run.exit_code == 0, run.stderr[-6000:]
    return guest_named(NAME)


def chat(guest: Guest) -> tuple[int, str]:
    body = {
        "model": guest.names()[0], "temperature": 0, "max_tokens": 16,
        "messages": [{"role": "user", "content": QUESTION}],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    status, answer = guest.call("POST", "/v1/chat/completions", body)
    return status, answer["choices"][0]["message"]["content"] if status == 200 else str(answer)


def embedded(guest: Guest) -> tuple[int, list[int]]:
    status, answer = guest.call(
        "POST", "/v1/embeddings", {"model": "embedder", "input": ["a", "b"]}
    )
    return status, [len(one["embedding"]) for one in answer["data"]] if status == 200 else []


def ranked(guest: Guest) -> tuple[int, list[int]]:
    body = {"model": "ranker", "query": "When does the train leave?", "documents": DOCUMENTS}
    status, answer = guest.call("POST", "/v1/rerank", body)
    return status, [one["index"] for one in answer["results"]] if status == 200 else []


def test_all_three_are_proven_and_a_second_run_changes_nothing(site: Site, guest: Guest) -> None:
    assert len(guest.serving()) == 3
    for unit in guest.serving():
        name = unit.split("@")[1].removesuffix(".service")
        proof: dict[str, Any] = guest.json(f"cat /var/lib/spark/proofs/{name}.json")
        assert proof["ok"], proof
    site.deploy().must_have_changed_nothing()


def test_one_address_answers_for_all_three(guest: Guest) -> None:
    status, listed = guest.call("GET", "/v1/models")
    names = {one["id"] for one in listed["data"]}
    assert (status, names) == (200, {guest.names()[0], "embedder", "ranker"})
    assert chat(guest) == (200, "Paris")
    assert embedded(guest) == (200, [128, 128])
    assert ranked(guest) == (200, [1, 0])


def test_one_that_is_stopped_leaves_the_others_alone(site: Site, guest: Guest) -> None:
    assert site.look("stop", "--service", "embed").returncode == 0
    assert embedded(guest)[0] == 503
    assert (chat(guest), ranked(guest)) == ((200, "Paris"), (200, [1, 0]))
    assert site.look("start", timeout_s=START_S).returncode == 0
    assert embedded(guest) == (200, [128, 128])


def test_after_a_reboot_all_three_serve(site: Site, guest: Guest) -> None:
    guest.reboot()
    up = "test $(systemctl is-active 'spark-serve@*' | grep -cx active) = 3"
    guest.wait(up, seconds=START_S)
    assert (chat(guest), embedded(guest)[0], ranked(guest)[0]) == ((200, "Paris"), 200, 200)
    site.deploy(timeout_s=START_S).must_have_changed_nothing()


def test_memory_that_three_cannot_share_is_refused_with_the_number_that_fits(site: Site) -> None:
    asked = {name: {**one, "memory_gib": 500} for name, one in SERVICES.items()}
    site.choose(services=asked)
    done = site.look("plan")
    site.choose(services=SERVICES)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "lower services.embed.memory_gib, services.rerank.memory_gib to " in said
