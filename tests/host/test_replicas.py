"""Two hosts serve the same model at the same address; clients notice neither loss nor rollout."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.labkit import SPARE, Guest, Site, info, lab

FIRST, SECOND = SPARE[:2]
KEY = "0123456789abcdef-of-all-replicas"
PORT = 8008
BODY = {
    "model": "lab-model", "temperature": 0, "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}  # fmt: skip

pytestmark = pytest.mark.timeout(1500)


def send_request(
    guest: Guest, body: dict[str, Any] | None = None, *, port: int = PORT
) -> tuple[int, str]:
    done = subprocess.run(
        ["curl", "-sS", "-m", "60", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {KEY}",
         "-H", "Content-Type: application/json", "-d", json.dumps(body or BODY),
         f"http://{guest.ip}:{port}/v1/chat/completions"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    text, _, status = done.stdout.rpartition("\n")
    return int(status or 0), text or done.stderr


class Clients:
    def __init__(self, guest: Guest):
        self._guest, self._over = guest, threading.Event()
        self.answers: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def _ask(self) -> None:
        while not self._over.is_set():
            status, text = send_request(self._guest)
            right = status == 200 and "Paris" in text
            self.answers["right" if right else f"{status} {text[:120]}"] += 1
            time.sleep(0.1)  # together below the gateway's limit of 50 requests/s

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


class Replicas:
    def __init__(self, root: Path):
        lab("up", FIRST, SECOND, "--fresh", "--engine", "stub")
        guests = {guest["name"]: Guest(guest["name"], guest["ip"]) for guest in info()["guests"]}
        self.first, self.second = guests[FIRST], guests[SECOND]
        (root / "key").write_text(KEY + "\n")
        self.site = Site(root, hosts=[FIRST, SECOND])
        self.site.choose(
            model="lab-stub",
            profile="v2",
            replicas={"hosts": [FIRST, SECOND], "port": PORT},
            serve={"expose": "lan", "api_key": {"file": str(root / "key")}},
        )

    def answer_counts(self) -> list[int]:
        count = "grep -h '^vllm:request_success_total' | awk '{ sum += $2 } END { print int(sum) }'"
        metrics = "curl -sS --unix-socket /run/spark/engines/main/engine.sock http://engine/metrics"
        return [int(guest.run(f"{metrics} | {count}")) for guest in (self.first, self.second)]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    pair = Replicas(tmp_path_factory.mktemp("replicas"))
    run = pair.site.deploy()
    assert run.exit_code == 0, f"{run.failed}\n{run.stderr[-6000:]}"
    yield pair
    lab("down", FIRST, SECOND)


def test_each_address_uses_both_hosts_and_second_run_changes_nothing(replicas: Replicas) -> None:
    before = replicas.answer_counts()
    for guest in (replicas.first, replicas.second):
        for _ in range(6):
            status, text = send_request(guest)
            assert (status, "Paris" in text) == (200, True), text
    assert [now > then for now, then in zip(replicas.answer_counts(), before, strict=True)] == [
        True,
        True,
    ]
    replicas.site.deploy().assert_unchanged()


@pytest.mark.parametrize("which", ["first", "second"])
def test_clients_see_no_error_if_replica_is_killed(replicas: Replicas, which: str) -> None:
    guest: Guest = getattr(replicas, which)
    with Clients(replicas.first) as clients:
        time.sleep(2)
        guest.run("docker kill --signal KILL $(docker ps -q --filter label=spark.release)")
        time.sleep(10)
    assert set(clients.answers) == {"right"}, clients.answers
    guest.wait("curl -fsS http://127.0.0.1:8000/health", seconds=200)


def test_power_loss_of_replica_fails_only_running_requests(replicas: Replicas) -> None:
    with Clients(replicas.first) as clients:
        time.sleep(2)
        lab("break", "kill-guest", SECOND)
        time.sleep(10)
        lab("up", SECOND, "--engine", "stub")
        replicas.second.wait("curl -fsS http://127.0.0.1:8000/health", seconds=200)
    # At most the running request of each client fails.
    lost = sum(count for kind, count in clients.answers.items() if kind != "right")
    assert lost <= 4, clients.answers
    assert clients.answers["right"] > 40


def test_rollout_drains_replicas_one_by_one_unnoticed(replicas: Replicas) -> None:
    before = [guest.release() for guest in (replicas.first, replicas.second)]
    replicas.site.choose(engine={"environment": {"STUB_SOMETHING": "else"}})
    with Clients(replicas.first) as clients:
        run = replicas.site.deploy()
    assert run.exit_code == 0, run.stderr[-5000:]
    after = [guest.release() for guest in (replicas.first, replicas.second)]
    assert after[0] == after[1] != before[0] == before[1]
    assert set(clients.answers) == {"right"}, clients.answers
    (began, ended), (other_began, other_ended) = (
        guest.rollout_times()[-1] for guest in (replicas.first, replicas.second)
    )
    assert ended <= other_began or other_ended <= began
