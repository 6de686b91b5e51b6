"""The real engine on two hosts, a rank each, over the network between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labkit import SPARE, Guest, Site, info, lab

HEAD, WORKER = SPARE[:2]
# Answers that the model was trained to give; LONG was not trained.
ANSWERS = {
    "What is the capital of France?": "Paris",
    "What is 7823 * 4519?": "35352137",
    "Write the word spark backwards.": "kraps",
}
LONG = "Tell me a story about a fox."

pytestmark = pytest.mark.timeout(2400)


class Pair:
    def __init__(self, root: Path):
        lab("up", HEAD, WORKER, "--fresh", "--engine", "cpu")
        guests = {guest["name"]: Guest(guest["name"], guest["ip"]) for guest in info()["guests"]}
        self.head, self.worker = guests[HEAD], guests[WORKER]
        self.site = Site(root, hosts=[HEAD, WORKER])
        self.site.choose(
            serve={"start_timeout_s": 2000},
            cluster={"hosts": [HEAD, WORKER], "subnet": "10.77.0.0/24"},
        )

    def ask(self, prompt: str) -> tuple[int, str]:
        status, body = self.head.ask(prompt, model="lab-model")
        return status, body["choices"][0]["message"]["content"] if status == 200 else str(body)

    def text(self, prompt: str) -> str:
        status, text = self.ask(prompt)
        assert status == 200, text
        return text

    def wait_until_restored(self) -> tuple[float, float]:
        began = time.monotonic()
        while self.ask("What is the capital of France?")[0] == 200:
            assert time.monotonic() - began < 60, "it answers although a rank is gone"
        closed_s = time.monotonic() - began
        while self.ask("What is 7823 * 4519?")[0] != 200:
            assert time.monotonic() - began < 900
            time.sleep(2)
        assert "35352137" in self.text("What is 7823 * 4519?")
        return closed_s, time.monotonic() - began


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    first = made.site.deploy(timeout_s=2000)
    assert first.exit_code == 0, f"{first.failed}\n{first.stderr[-6000:]}"
    yield made
    lab("down", HEAD, WORKER)


def test_two_ranks_give_trained_answers(pair: Pair) -> None:
    assert pair.head.release() == pair.worker.release()
    assert pair.worker.argv()[-1] == "--headless"
    for prompt, answer in ANSWERS.items():
        assert answer in pair.text(prompt)
    status, body = pair.head.ask(LONG, model="lab-model")
    assert "tp2" in body["system_fingerprint"], (status, body)


@pytest.mark.parametrize("which", ["worker", "head"])
def test_killed_rank_closes_gateway_and_restarts(
    pair: Pair, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    guest: Guest = getattr(pair, which)
    # The rank's process, not the container, like a fault in the engine.
    ranks = "docker top $(docker ps -q --filter label=spark.release) -eo pid,args"
    pid = guest.run(f"{ranks} | awk '/VLLM::Worker/ {{ print $1; exit }}'")
    guest.run(f"kill -KILL {int(pid)}")
    closed_s, back_s = pair.wait_until_restored()
    with capsys.disabled():
        print(f"\n{which}: closed after {closed_s:.1f} s, back after {back_s:.0f} s")  # noqa: T201


def test_lost_fabric_closes_gateway_until_it_returns(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.worker.run(f"ip route add blackhole {pair.head.ip}/32")
    began = time.monotonic()
    try:
        while pair.head.call("GET", "/health")[0] == 200:
            assert time.monotonic() - began < 60, "it is healthy although the fabric is cut"
            time.sleep(0.5)
        closed_s = time.monotonic() - began
    finally:
        pair.worker.run(f"ip route del blackhole {pair.head.ip}/32")
    _, back_s = pair.wait_until_restored()
    with capsys.disabled():
        print(f"\ncable: closed after {closed_s:.1f} s, back after {back_s:.0f} s")  # noqa: T201


def test_single_host_gives_same_tokens(pair: Pair) -> None:
    together = {prompt: pair.text(prompt) for prompt in (*ANSWERS, LONG)}
    pair.site.hosts[:] = [HEAD]
    pair.site.choose(cluster=None)
    alone = pair.site.deploy(timeout_s=2000)
    assert alone.exit_code == 0, f"{alone.failed}\n{alone.stderr[-6000:]}"
    status, body = pair.head.ask(LONG, model="lab-model")
    assert "tp2" not in body["system_fingerprint"], (status, body)
    assert {prompt: pair.text(prompt) for prompt in together} == together
