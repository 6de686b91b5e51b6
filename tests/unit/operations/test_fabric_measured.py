"""A measurement tells both ends one word, judges what came of it, and changes nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from spark_contract.errors import ERROR

from spark_deploy.hosts import fabric
from spark_deploy.plan.types import Way
from tests.unit.operations.test_operations import FakeHost, on, shown

WAY = Way("fab0", "roce0", 9000, 200000, "spark-2", "192.168.100.12", 9000)


class End(FakeHost):
    """A host on the cable; ``rdma`` is the output of its ib_write_bw, ``None``: not installed."""

    def __init__(self, said: str = "", wrong: str = "", rdma: str | None = None):
        super().__init__()
        self.data = {"_sudo": True}
        self.said, self.wrong, self.rdma = said, wrong, rdma
        self.asked: list[tuple[str, str]] = []
        self.rdma_commands: list[str] = []

    def run_shell_command(self, command: Any, **words: Any) -> tuple[bool, SimpleNamespace]:
        script = command.get_raw_value()
        if "ib_write_bw" in script:
            self.rdma_commands.append(script)
            return self.rdma is not None, SimpleNamespace(stdout=self.rdma or "", stderr="")
        self.asked.append((script, words["_stdin"]))
        return not self.wrong, SimpleNamespace(stdout=self.said, stderr=self.wrong)


def found(gbit_per_s: float) -> str:
    return json.dumps(
        {"schema_version": 1, "arrived_bytes": int(gbit_per_s * 125e6), "took_s": 1.0}
    )


def measured(
    monkeypatch: pytest.MonkeyPatch,
    sender: End,
    listener: End,
    *,
    executing: bool = True,
    reached: str = "yes",
) -> list[str]:
    answers, ends = {WAY.address: reached}, {"spark-1": sender, "spark-2": listener}
    monkeypatch.setattr(fabric, "read_fact", lambda fact, **_: answers)
    with on(sender, executing) as state:
        state.inventory.get_host = ends.__getitem__
        return [shown(command) for command in fabric.measure_links._inner([WAY])]


def test_both_ends_get_one_word_that_no_process_list_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, listener = End(found(88)), End()
    assert measured(monkeypatch, sender, listener) == []
    [(sends, order)], [(listens, same)] = sender.asked, listener.asked
    token = json.loads(order)["token"]
    assert order == same
    assert len(token) == 32
    assert token not in sends + listens
    assert json.loads(order)["most_bytes"] <= 10**9
    assert "DynamicUser=yes" in listens
    assert "RuntimeMaxSec=" in listens
    assert "fab0 to spark-2 (192.168.100.12): 88.0 Gb/s over TCP" in "\n".join(sender.logs)


def test_every_measurement_has_a_word_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = End(found(88))
    for _ in range(2):
        measured(monkeypatch, sender, End())
    first, second = (json.loads(order)["token"] for _, order in sender.asked)
    assert first != second


def test_a_dry_run_says_what_would_be_sent_and_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, listener = End(found(88)), End()
    assert measured(monkeypatch, sender, listener, executing=False) == []
    assert not sender.asked + listener.asked
    assert "1000 MB and 2.5 s at most" in "\n".join(sender.logs)


@pytest.mark.parametrize(
    ("sender", "listener", "reached", "told"),
    [
        (End(found(0.9)), End(), "yes", "0.9 Gb/s to spark-2 over a link of 200"),
        (End(found(0)), End(), "yes", "no packet of full size gets to spark-2"),
        (End(found(88)), End(), "no", "no packet of 9000 bytes comes back"),
        (End(wrong="x"), End(wrong=f"{ERROR}fab0:20000: cannot listen; fix: run again"),
         "yes", "cannot listen"),
        (End(wrong=f"{ERROR}fab0: no connection; fix: look"), End(), "yes", "no connection"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_way_ends_the_run_in_words(
    monkeypatch: pytest.MonkeyPatch, sender: End, listener: End, reached: str, told: str
) -> None:
    [refused] = measured(monkeypatch, sender, listener, reached=reached)
    assert told in refused


def test_a_port_that_looks_degraded_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = End(found(13.2))
    assert measured(monkeypatch, sender, End()) == []
    assert "warning: " in "\n".join(sender.logs)


PERFTEST = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      35300            0.00               RATE   		     0.176505
---------------------------------------------------------------------------------------
"""


def test_rdma_is_measured_after_the_token_proved_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = End(found(20), rdma=PERFTEST.replace("RATE", "92.54"))
    listener = End(rdma="")
    assert measured(monkeypatch, sender, listener) == []
    assert "92.5 Gb/s RDMA" in "\n".join(sender.logs)
    assert "degraded" not in "\n".join(sender.logs)  # although TCP alone is doubtful
    _, listens = listener.rdma_commands
    assert "--bind_source_ip 192.168.100.12" in listens
    assert "DynamicUser=yes" in listens
    _, sends = sender.rdma_commands
    assert "192.168.100.12 && exit" in sends


def test_a_port_that_is_slow_over_rdma_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = End(found(88), rdma=PERFTEST.replace("RATE", "13.10"))
    assert measured(monkeypatch, sender, End(rdma="")) == []
    assert "13.1 Gb/s to spark-2" in "\n".join(sender.logs)


@pytest.mark.parametrize(
    ("here", "there", "logged"),
    [
        (None, "", "install perftest"),
        ("", None, "install perftest"),
        ("x", "", "ib_write_bw failed"),
    ],
)
def test_without_perftest_tcp_alone_is_judged(
    monkeypatch: pytest.MonkeyPatch, here: str | None, there: str | None, logged: str
) -> None:
    sender = End(found(88), rdma=here)
    assert measured(monkeypatch, sender, End(rdma=there)) == []
    assert logged in "\n".join(sender.logs)
