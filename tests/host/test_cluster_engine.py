"""Two hosts serve with vLLM's CPU build; RESULTS=write updates two-hosts.json."""

import json
import os
import time

import pytest

from lab.engine.patch import ENGINE_VERSION
from proofs.result_files import describe_run
from tests.host.test_cluster import HEAD, WORKER, Cluster
from tests.labkit import CHECKOUT, Guest, lab

RESULTS = CHECKOUT / "proofs/results/lab/two-hosts.json"

# Answers that the model was trained to give; LONG was not trained.
ANSWERS = {
    "What is the capital of France?": "Paris",
    "What is 7823 * 4519?": "35352137",
    "Write the word spark backwards.": "kraps",
}
LONG = "Tell me a story about a fox."

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def measured():
    """Return measured numbers by claim; each test adds its claim after its last assertion."""
    claims = {}
    yield claims
    if os.environ.get("RESULTS") == "write":
        document = {
            "command": "RESULTS=write pytest tests/host/test_cluster_engine.py",
            **describe_run("two guests of the virtual lab, x86_64, vLLM's CPU build"),
            "versions": {"vllm": ENGINE_VERSION},
            "rows": [{"claim": claim, **numbers} for claim, numbers in claims.items()],
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    new_cluster = Cluster(tmp_path_factory.mktemp("site"), "cpu", serve={"start_timeout_s": 2000})
    new_cluster.site.deploy(timeout_s=2000).assert_succeeded()
    yield new_cluster
    lab("down", HEAD, WORKER)


def answer_to(cluster, prompt):
    status, body = cluster.head.ask(prompt, model="lab-model")
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


def is_split(cluster):
    _, body = cluster.head.ask(LONG, model="lab-model")
    return "tp2" in body["system_fingerprint"]


def wait_until_restored(cluster):
    began = time.monotonic()
    cluster.wait_until_open(900)
    assert "35352137" in answer_to(cluster, "What is 7823 * 4519?")
    return time.monotonic() - began


def test_engine_on_two_ranks_gives_the_trained_answers(cluster, measured):
    assert cluster.release()
    assert cluster.worker.argv()[-1] == "--headless"
    for prompt, answer in ANSWERS.items():
        assert answer in answer_to(cluster, prompt)
    assert is_split(cluster)
    measured["two ranks give the trained answers"] = {"answers": len(ANSWERS)}


@pytest.mark.parametrize("rank", ["worker", "head"])
def test_gateway_closes_and_rank_restarts_if_an_engine_rank_is_killed(cluster, rank, measured):
    guest: Guest = getattr(cluster, rank)
    # The rank's process, not the container, like a fault in the engine.
    ranks = "docker top $(docker ps -q --filter label=spark.release) -eo pid,args"
    pid = guest.run(f"{ranks} | awk '/VLLM::Worker/ {{ print $1; exit }}'")
    guest.run(f"kill -KILL {int(pid)}")
    closed_s, restored_s = cluster.wait_until_closed(60), wait_until_restored(cluster)
    measured[f"killed {rank}: the gateway closes, and the engine returns"] = {
        "closed_s": round(closed_s, 1), "restored_s": round(restored_s),
    }  # fmt: skip


def test_gateway_in_front_of_two_ranks_is_closed_while_the_fabric_is_down(cluster, measured):
    began = time.monotonic()
    with cluster.lost_fabric():
        while cluster.head.call("GET", "/health")[0] == 200:
            assert time.monotonic() - began < 60, "it is healthy although the fabric is cut"
            time.sleep(0.5)
        closed_s = time.monotonic() - began
    restored_s = wait_until_restored(cluster)
    measured["lost fabric: the gateway closes, and the engine returns"] = {
        "closed_s": round(closed_s, 1), "restored_s": round(restored_s),
    }  # fmt: skip


def test_single_host_gives_the_same_tokens_as_two_ranks(cluster, measured):
    together = {prompt: answer_to(cluster, prompt) for prompt in (*ANSWERS, LONG)}
    cluster.site.hosts[:] = [HEAD]
    cluster.site.choose(cluster=None)
    cluster.site.deploy(timeout_s=2000).assert_succeeded()
    assert not is_split(cluster)
    assert {prompt: answer_to(cluster, prompt) for prompt in together} == together
    measured["one host gives the same tokens as two ranks"] = {"answers": len(together)}
