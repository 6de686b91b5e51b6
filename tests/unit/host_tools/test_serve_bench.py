"""The speed is measured once per versions; a clear loss is reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from spark_contract.release import Release
from spark_host.check import runner, speed
from spark_host.records import boot, proof, versions
from spark_host.rollout import steps
from spark_host.watch import watchdog
from stub_host import Host, release_data

BENCH = {"limit_s": 0.3, "worse_percent": 15}
NOW = {"kernel": "6.17", "driver": "580.142", "docker": "28.5.1", "toolkit": "1.19.0"}


class Record:
    def __init__(self) -> None:
        self.data: dict[str, Any] = {"phases": []}

    def set(self, **values: Any) -> None:
        self.data.update(values)

    def report(self, text: str) -> None:
        self.data["told"] = text

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.data["phases"].append(name)
        yield


def released(host: Host, name: str = "main-0123456789ab", **changes: Any) -> Release:
    check = {**release_data()["check"], "bench": BENCH, "timeout_s": 5}
    release = host.release(name, check=check, **changes)
    return replace(release, engine=replace(release.engine, max_sequences=3))


def prove(host: Host, release: Release, monkeypatch: pytest.MonkeyPatch, **parts: str) -> Record:
    """Check a release fully under these versions, then do the last step of a change."""
    monkeypatch.setattr(versions, "read", lambda: {**NOW, **parts})
    runner.check(release, host.here, "full", print, invocation_id="run-1")
    record = Record()
    steps.measure_speed(release, steps.this_host(host.paths), record)
    return record


def test_measures_speed_within_the_time_limit(host: Host) -> None:
    release = released(host)
    host.started(release, STUB_PIECE_S="0.0005")
    found = speed.measure(release, host.paths, 0.5, print)
    assert found["rounds"] >= 1
    assert found["seconds"] < 3
    # A token every 0.5 ms, plus overhead.
    assert 300 < found["one_stream_tokens_per_s"]["median"] < 2000
    assert found["all_streams_tokens_per_s"]["median"] > found["one_stream_tokens_per_s"]["median"]
    assert 0 < found["first_token_s"]["median"] < 0.5


def test_busy_engine_is_not_measured(host: Host) -> None:
    release = released(host)
    engine = host.started(release, STUB_PIECE_S="0.0005")
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "max_tokens": 3000}
    stranger = threading.Thread(target=lambda: engine.ask("/v1/chat/completions", body, 20))
    stranger.start()
    with pytest.raises(speed.NotMeasuredError, match="served other requests"):
        speed.measure(release, host.paths, 0.5, print)
    stranger.join()


def test_silent_engine_is_not_measured(host: Host) -> None:
    with pytest.raises(speed.NotMeasuredError, match="nothing listens"):
        speed.measure(released(host), host.paths, 0.5, print)


def spread(*values: float) -> dict[str, float]:
    ordered = sorted(values)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ((50, 51, 52), (30, 31, 32), ["one stream: 31.0 tokens/s, 51.0 tokens/s before"]),
        ((50, 51, 52), (45, 46, 47), []),  # worse, but by less than the limit
        ((30, 51, 52), (29, 35, 40), []),  # the rounds overlap: noise
        ((50, 51, 52), (70, 71, 72), []),
    ],
)
def test_only_slowdowns_beyond_noise_are_reported(
    before: tuple[float, ...], now: tuple[float, ...], worse: list[str]
) -> None:
    key = "one_stream_tokens_per_s"
    found = speed.compare({key: spread(*now)}, {key: spread(*before)}, 15)
    assert [item["text"] for item in found] == worse


def test_later_first_token_is_a_slowdown() -> None:
    key = "first_token_s"
    found = speed.compare({key: spread(0.9, 1.0)}, {key: spread(0.4, 0.5)}, 15)
    assert [item["text"] for item in found] == [
        "first token of a long prompt: 1.00 s, 0.50 s before"
    ]


def test_each_changed_part_has_a_rollback_hint() -> None:
    before = {
        "release": "main-aaaaaaaaaaaa",
        "versions": {"kernel": "6.14", "driver": "580.126", "docker": "28.5.1", "toolkit": "1.18"},
        "packages": {"docker": "docker-ce=5:28.5.1-1", "toolkit": "nvidia-container-toolkit=1.18"},
    }
    now = {**before, "versions": {**before["versions"], "docker": "29.2.1"}}  # type: ignore[dict-item]
    assert versions.rollback_hints("main", before, now) == [
        "`apt-get install --allow-downgrades docker-ce=5:28.5.1-1`, then deploy again"
    ]
    now = {**before, "versions": {**before["versions"], "kernel": "6.17", "driver": "580.142"}}  # type: ignore[dict-item]
    kernel, driver = versions.rollback_hints("main", before, now)
    assert "grub-reboot" in kernel
    assert "6.14" in kernel
    assert "driver 580.126 only together with its kernel" in driver
    now = {**before, "release": "main-bbbbbbbbbbbb"}
    assert versions.rollback_hints("main", before, now) == [
        "`spark-host rollback main` serves main-aaaaaaaaaaaa again"
    ]


def test_speed_is_measured_once_per_versions(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    release = released(host)
    host.started(release, STUB_PIECE_S="0.0005")
    assert prove(host, release, monkeypatch).data["phases"] == ["bench"]
    assert prove(host, release, monkeypatch).data["phases"] == []
    # A quick check of a later run does not forget it.
    runner.check(release, host.here, "quick", print, invocation_id="run-2")
    assert not proof.bench_due(release, proof.read(release.name, host.here))
    assert prove(host, release, monkeypatch, driver="580.159").data["phases"] == ["bench"]


@pytest.mark.slow
def test_slowdown_after_upgrade_is_reported_with_rollback_hint(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = released(host)
    host.started(release, STUB_PIECE_S="0.0005")
    monkeypatch.setattr(versions, "packages", lambda: {"docker": "docker-ce=5:28.5.1-1"})
    prove(host, release, monkeypatch)
    host.engines.pop().kill()
    host.started(release, STUB_PIECE_S="0.004")
    record = prove(host, release, monkeypatch, docker="29.2.1")
    told = "\n".join(record.data["bench"])
    assert "clearly slower after docker 28.5.1 -> 29.2.1: one stream: " in told
    assert "to go back: `apt-get install --allow-downgrades docker-ce=5:28.5.1-1`" in told
    events = watchdog.events("main", host.paths)
    assert {event.kind for event in events} == {"slower"}
    kept = proof.read(release.name, host.here).bench
    assert kept["versions"]["docker"] == "29.2.1"
    assert "before" not in kept["before"]  # no chain of all proofs that ever were


def test_new_image_is_compared_with_the_previous_release(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = released(
        host,
        image={
            "tag": "spark-vllm:a",
            "digest_label": None,
            "base": "vllm@sha256:a",
            "plugin": "1" * 12,
        },
    )
    host.started(old, STUB_PIECE_S="0.0005")
    prove(host, old, monkeypatch)
    boot.record_good(old, host.here)
    new = released(
        host,
        "main-bbbbbbbbbbbb",
        image={
            "tag": "spark-vllm:b",
            "digest_label": None,
            "base": "vllm@sha256:b",
            "plugin": "1" * 12,
        },
    )
    prove(host, new, monkeypatch)
    kept = proof.read(new.name, host.here)
    assert kept.bench["changed"] == ["image vllm@sha256:a -> vllm@sha256:b"]
    assert kept.versions["plugin"] == "1" * 12
    other = released(host, "main-cccccccccccc", profile="v2-tq")
    boot.record_good(new, host.here)
    assert proof.bench_before(other, host.here) is None


def test_packages_are_in_apt_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_PROGRAMS", {"shell": "dpkg", "none": "no-such-program"})
    found = versions.packages()
    assert list(found) == ["shell"]
    assert found["shell"].startswith("dpkg=1")


def test_failed_measurement_keeps_the_rollout(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    release = released(host)
    host.started(release)
    monkeypatch.setattr(versions, "read", lambda: NOW)
    runner.check(release, host.here, "full", print, invocation_id="run-1")
    host.engines[0].kill()
    host.engines[0].wait()
    record = Record()
    steps.measure_speed(release, steps.this_host(host.paths), record)
    assert "no speed was measured" in record.data["bench"][0]
    assert proof.read(release.name, host.here).ok
