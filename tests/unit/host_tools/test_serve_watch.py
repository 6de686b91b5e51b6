"""Stalled engines are told apart from busy, starting and dead engines."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import pytest
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_host.engine.client import Metrics
from spark_host.system import host as system
from spark_host.watch import sensors, watchdog
from spark_host.watch.watchdog import StallDetector
from stub_host import RELEASE, Host

STALL_S = 120


@pytest.fixture
def judge(host: Host) -> StallDetector:
    release = host.release(watch={"stall_s": STALL_S, "interval_s": 10, "hot_celsius": None})
    return StallDetector(system.load_release(release.name, host.paths).watch)


def seen(*, running: int = 1, prompt: int = 0, generated: int = 0, usage: float = 0.1) -> Metrics:
    return Metrics.parse(
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
    )


def test_growing_cache_usage_is_no_stall(
    judge: StallDetector,
) -> None:
    for look in range(60):  # ten minutes, and no counter of tokens moves
        said = judge.stalled(seen(usage=0.1 + look / 1000), now_s=look * 10.0)
        assert said is None


def test_engine_without_progress_stalls_after_the_limit(judge: StallDetector) -> None:
    verdicts = [judge.stalled(seen(usage=0.4), now_s=look * 10.0) for look in range(13)]
    assert verdicts[:12] == [None] * 12
    assert verdicts[12] == "1 requests are running, but no token was read or written for 120 s"


@pytest.mark.parametrize("moving", ["prompt", "generated"])
def test_each_token_counter_is_progress(judge: StallDetector, moving: str) -> None:
    for look in range(60):
        assert judge.stalled(seen(**{moving: look}), now_s=look * 10.0) is None


def test_idle_engine_never_stalls(judge: StallDetector) -> None:
    for look in range(60):
        assert judge.stalled(seen(running=0), now_s=look * 10.0) is None


class SeenEnoughError(Exception):
    """Ends the loop of a watch."""


@pytest.fixture
def acts(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    done: list[tuple[str, str]] = []

    def act(release: Release, kind: str, reason: str, held: int | None, paths: Paths) -> None:
        done.append((kind, reason))
        raise SeenEnoughError

    monkeypatch.setattr(watchdog, "kill_engine", act)
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.1)
    monkeypatch.setattr(watchdog, "_follow_addresses", lambda *_: None)
    monkeypatch.setattr(sensors, "read", lambda: None)
    return done


def looks(monkeypatch: pytest.MonkeyPatch, most: int) -> list[float]:
    at: list[float] = []

    def available() -> int:
        if len(at) == most:
            raise SeenEnoughError
        at.append(time.monotonic())
        return 1 << 40

    monkeypatch.setattr(watchdog, "available_bytes", available)
    return at


@pytest.fixture
def listener(host: Host) -> Iterator[socket.socket]:
    path = host.paths.engine_socket(host.release().service)
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(64)
        yield listening


def test_silent_engine_stalls_after_the_limit(
    host: Host,
    listener: socket.socket,
    acts: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = looks(monkeypatch, most=100)

    with pytest.raises(SeenEnoughError):
        watchdog.run(RELEASE, host.paths)

    [(kind, reason)] = acts
    found = re.fullmatch(r"the engine listens, but gave no answer for (\d+) s", reason)
    assert found, reason
    assert (kind, int(found[1]) >= 1) == ("stalled", True)  # stall_s of this release is 1
    assert len(looked) >= 3


def test_engine_with_a_full_queue_stalls(
    host: Host,
    listener: socket.socket,
    acts: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener.listen(0)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(listener.getsockname())
        looks(monkeypatch, most=100)
        with pytest.raises(SeenEnoughError):
            watchdog.run(RELEASE, host.paths)

    assert [kind for kind, _ in acts] == ["stalled"]


def test_absent_engine_is_left_to_systemd(
    host: Host, acts: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(watch={"stall_s": 0, "interval_s": 0.001, "hot_celsius": None})
    looks(monkeypatch, most=50)

    with pytest.raises(SeenEnoughError):
        watchdog.run(RELEASE, host.paths)

    assert acts == []


def test_an_answer_resets_the_silence(judge: StallDetector) -> None:
    for look in range(60):
        assert judge.silent(now_s=look * 100.0) is None
        judge.answered()


def test_delayed_watchdog_does_not_blame_the_engine(judge: StallDetector) -> None:
    assert judge.silent(now_s=0) is None
    assert judge.silent(now_s=10_000) is None
    assert judge.silent(now_s=10_010) is not None
