"""Two hosts that serve the same behind one address: lost, changed, and nobody notices.

Clients are curl on the lab's machine, which the network's address answers.
"""

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


def asked(guest: Guest, body: dict[str, Any] | None = None, *, port: int = PORT) -> tuple[int, str]:
    """Ask a guest from outside; return the status and the text."""
    done = subprocess.run(
        ["curl", "-sS", "-m", "60", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {KEY}",
         "-H", "Content-Type: application/json", "-d", json.dumps(body or BODY),
         f"http://{guest.ip}:{port}/v1/chat/completions"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    text, _, status = done.stdout.rpartition("\n")
    return int(status or 0), text or done.stderr


class Clients:
    """Four who ask one after the other until told to stop."""

    def __init__(self, guest: Guest):
        self._guest, self._over = guest, threading.Event()
        self.seen: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def _ask(self) -> None:
        while not self._over.is_set():
            status, text = asked(self._guest)
            right = status == 200 and "Paris" in text
            self.seen["right" if right else f"{status} {text[:120]}"] += 1
            time.sleep(0.1)  # together below the gateway's limit of 50 requests/s

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


class Two:
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

    def answered(self) -> list[int]:
        """Return how many answers each engine has given, by its own counter."""
        count = "grep -h '^vllm:request_success_total' | awk '{ sum += $2 } END { print int(sum) }'"
        ask = "curl -sS --unix-socket /run/spark/engines/main/engine.sock http://engine/metrics"
        return [int(guest.run(f"{ask} | {count}")) for guest in (self.first, self.second)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    made = Two(tmp_path_factory.mktemp("two"))
    run = made.site.deploy()
    assert run.exit_code == 0, f"{run.failed}\n{run.stderr[-6000:]}"
    yield made
    lab("down", FIRST, SECOND)


def test_either_address_answers_by_both_hosts_and_the_second_run_changes_nothing(two: Two) -> None:
    before = two.answered()
    for guest in (two.first, two.second):
        for _ in range(6):
            status, text = asked(guest)
            assert (status, "Paris" in text) == (200, True), text
    assert [now > then for now, then in zip(two.answered(), before, strict=True)] == [True, True]
    two.site.deploy().must_have_changed_nothing()


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_replica_that_is_killed_is_no_error_for_clients(two: Two, which: str) -> None:
    guest: Guest = getattr(two, which)
    with Clients(two.first) as clients:
        time.sleep(2)
        guest.run("docker kill --signal KILL $(docker ps -q --filter label=spark.release)")
        time.sleep(10)
    assert set(clients.seen) == {"right"}, clients.seen
    guest.wait("curl -fsS http://127.0.0.1:8000/health", seconds=200)


def test_a_replica_without_power_costs_at_most_what_was_under_way_there(two: Two) -> None:
    with Clients(two.first) as clients:
        time.sleep(2)
        lab("break", "kill-guest", SECOND)
        time.sleep(10)
        lab("up", SECOND, "--engine", "stub")
        two.second.wait("curl -fsS http://127.0.0.1:8000/health", seconds=200)
    # What was under way there is lost, of each client one; nothing that was asked afterwards.
    lost = sum(count for what, count in clients.seen.items() if what != "right")
    assert lost <= 4, clients.seen
    assert clients.seen["right"] > 40


def test_a_change_drains_one_after_the_other_and_no_client_notices(two: Two) -> None:
    before = [guest.release() for guest in (two.first, two.second)]
    two.site.choose(engine={"environment": {"STUB_SOMETHING": "else"}})
    with Clients(two.first) as clients:
        run = two.site.deploy()
    assert run.exit_code == 0, run.stderr[-5000:]
    after = [guest.release() for guest in (two.first, two.second)]
    assert after[0] == after[1] != before[0] == before[1]
    assert set(clients.seen) == {"right"}, clients.seen
    (began, ended), (other_began, other_ended) = (
        guest.changes()[-1] for guest in (two.first, two.second)
    )
    assert ended <= other_began or other_ended <= began
