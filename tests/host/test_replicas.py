import json
import re
import subprocess
import threading
import time
from collections import Counter

import pytest

from tests.labkit import SPARE, Guest, Site, guest_named, lab, rollouts_overlap

FIRST, SECOND = SPARE[:2]
KEY = "0123456789abcdef-of-all-replicas"
PORT = 8008
BODY = {
    "model": "lab-model", "temperature": 0, "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}  # fmt: skip

pytestmark = pytest.mark.timeout(1500)


def send_request(guest):
    result = subprocess.run(
        ["curl", "-sS", "-m", "60", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {KEY}",
         "-H", "Content-Type: application/json", "-d", json.dumps(BODY),
         f"http://{guest.ip}:{PORT}/v1/chat/completions"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    text, _, status = result.stdout.rpartition("\n")
    return int(status or 0), text or result.stderr


class Clients:
    def __init__(self, guest):
        self._guest, self._stop = guest, threading.Event()
        self.answers: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._send_requests) for _ in range(4)]

    def _send_requests(self):
        while not self._stop.is_set():
            status, text = send_request(self._guest)
            right = status == 200 and "Paris" in text
            self.answers["right" if right else f"{status} {text[:120]}"] += 1
            time.sleep(0.1)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Replicas:
    def __init__(self, root):
        lab("up", FIRST, SECOND, "--fresh", "--engine", "stub")
        self.first, self.second = self.guests = [guest_named(FIRST), guest_named(SECOND)]
        (root / "key").write_text(KEY + "\n")
        self.site = Site(root, hosts=[FIRST, SECOND])
        self.site.choose(
            model="lab-stub",
            profile="v2",
            replicas={"hosts": [FIRST, SECOND], "port": PORT},
            serve={"expose": "lan", "api_key": {"file": str(root / "key")}},
        )

    def answer_counts(self):
        successes = re.compile(r"^vllm:request_success_total\S* (\d+)", re.M)
        counts = [successes.findall(guest.metrics()) for guest in self.guests]
        return [sum(map(int, numbers)) for numbers in counts]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    new_replicas = Replicas(tmp_path_factory.mktemp("replicas"))
    new_replicas.site.deploy().assert_succeeded()
    yield new_replicas
    lab("down", FIRST, SECOND)


def test_replica_gateways_use_both_hosts_and_a_redeploy_changes_nothing(replicas):
    before = replicas.answer_counts()
    for guest in replicas.guests:
        for _ in range(6):
            status, text = send_request(guest)
            assert (status, "Paris" in text) == (200, True), text
    assert all(now > then for now, then in zip(replicas.answer_counts(), before, strict=True))
    replicas.site.deploy().assert_unchanged()


@pytest.mark.parametrize("replica", ["first", "second"])
def test_clients_get_no_error_if_a_replica_is_killed(replicas, replica):
    guest: Guest = getattr(replicas, replica)
    with Clients(replicas.first) as clients:
        time.sleep(2)
        guest.run("docker kill --signal KILL $(docker ps -q --filter label=spark.release)")
        time.sleep(10)
    assert set(clients.answers) == {"right"}, clients.answers
    guest.wait("curl -fsS http://127.0.0.1:8000/health", seconds=200)


def test_power_loss_of_a_replica_fails_only_its_in_flight_requests(replicas):
    with Clients(replicas.first) as clients:
        time.sleep(2)
        lab("break", "kill-guest", SECOND)
        time.sleep(10)
        lab("up", SECOND, "--engine", "stub")
        replicas.second.wait("curl -fsS http://127.0.0.1:8000/health", seconds=200)
    assert clients.answers.total() - clients.answers["right"] <= 4, clients.answers
    assert clients.answers["right"] > 40


def test_rollout_drains_replicas_one_by_one_without_client_errors(replicas):
    before = [guest.release() for guest in replicas.guests]
    replicas.site.choose(engine={"environment": {"STUB_SOMETHING": "else"}})
    with Clients(replicas.first) as clients:
        run = replicas.site.deploy()
    assert run.exit_code == 0, run.stderr[-5000:]
    after = [guest.release() for guest in replicas.guests]
    assert after[0] == after[1] != before[0] == before[1]
    assert set(clients.answers) == {"right"}, clients.answers
    assert not rollouts_overlap(replicas.guests)
