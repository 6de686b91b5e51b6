import threading
from typing import Any

import pytest
from spark_host.check import speed
from spark_host.records import boot, versions
from spark_host.rollout import steps
from spark_host.rollout.record import Record
from spark_host.system.host import read_events
from stub_host import check, stored_proof

OLD, NEW = f"main-{'a' * 12}", f"main-{'b' * 12}"
BENCH = {"limit_s": 0.3, "worse_percent": 15}
VERSIONS = {"kernel": "6.17", "driver": "580.142", "docker": "28.5.1", "toolkit": "1.19.0"}


def release_with_bench(host, name="main-0123456789ab", **changes):
    bench = {"check__bench": BENCH, "check__timeout_s": 5, "engine__max_sequences": 3}
    return host.release(name, **bench, **changes)


def serve_with_bench(host):
    release = release_with_bench(host)
    host.started(release, STUB_PIECE_S="0.0005")
    return release


def measure(host, release, monkeypatch, *, dies=False, **parts):
    monkeypatch.setattr(versions, "read", lambda: {**VERSIONS, **parts})
    check(host, release, "full")
    if dies:
        host.engines[0].kill()
        host.engines[0].wait()
    record = Record(release, host.here)
    steps.measure_speed(release, steps.this_host(host.paths), record)
    return record.data


def test_measures_speed_within_the_time_limit(host):
    release = serve_with_bench(host)
    bench = speed.measure(release, host.paths, 0.5, print)
    assert bench["rounds"] >= 1
    assert bench["seconds"] < 20
    assert 0 < bench["one_stream_tokens_per_s"]["median"] < 2000
    assert bench["all_streams_tokens_per_s"]["median"] > bench["one_stream_tokens_per_s"]["median"]
    assert 0 < bench["first_token_s"]["median"] < bench["seconds"]


@pytest.mark.slow
def test_busy_engine_is_not_measured(host):
    release = release_with_bench(host)
    engine = host.started(release, STUB_PIECE_S="0.0005")
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "max_tokens": 3000}
    client = threading.Thread(target=lambda: engine.ask("/v1/chat/completions", body, 20))
    client.start()
    with pytest.raises(speed.NotMeasuredError, match="serving other requests"):
        speed.measure(release, host.paths, 0.5, print)
    client.join()


def test_missing_engine_is_not_measured(host):
    with pytest.raises(speed.NotMeasuredError, match="no process is listening"):
        speed.measure(release_with_bench(host), host.paths, 0.5, print)


STREAM, FIRST = "one_stream_tokens_per_s", "first_token_s"


@pytest.mark.parametrize(
    ("key", "before", "now", "worse"),
    [
        (STREAM, (50, 51, 52), (30, 31, 32), "one stream: now 31.0 tokens/s, before 51.0 tokens/s"),
        (STREAM, (50, 51, 52), (45, 46, 47), None),
        (STREAM, (30, 51, 52), (29, 35, 40), None),
        (STREAM, (50, 51, 52), (70, 71, 72), None),
        (FIRST, (0.4, 0.5), (0.9, 1.0), "first token of a long prompt: now 1.00 s, before 0.50 s"),
    ],
)  # fmt: skip
def test_only_slowdowns_beyond_noise_are_reported(key, before, now, worse):
    def spread(values):
        return {"min": values[0], "median": values[len(values) // 2], "max": values[-1]}

    result = speed.compare({key: spread(now)}, {key: spread(before)}, 15)
    assert [item["text"] for item in result] == ([worse] if worse else [])


@pytest.mark.parametrize(
    ("changes", "parts", "hints"),
    [
        ({}, {"docker": "29.2.1"}, ["`apt-get install --allow-downgrades docker-ce=5:28.5.1-1`"]),
        (
            {}, {"kernel": "6.17", "driver": "580.142"},
            ["grub-reboot", "driver 580.126 and the matching kernel"],
        ),
        ({"release": NEW}, {}, [f"`spark-host rollback main` to serve {OLD} again"]),
    ],
)  # fmt: skip
def test_every_changed_package_gets_a_revert_hint(changes, parts, hints):
    before: dict[str, Any] = {
        "release": OLD,
        "versions": {"kernel": "6.14", "driver": "580.126", "docker": "28.5.1", "toolkit": "1.18"},
        "packages": {"docker": "docker-ce=5:28.5.1-1", "toolkit": "nvidia-container-toolkit=1.18"},
    }
    now = {**before, **changes, "versions": {**before["versions"], **parts}}
    lines = versions.revert_hints("main", before, now)
    assert len(lines) == len(hints)
    assert all(hint in line for hint, line in zip(hints, lines, strict=True))


def test_speed_is_measured_once_per_combination_of_versions(host, monkeypatch):
    release = serve_with_bench(host)
    assert list(measure(host, release, monkeypatch).times_s) == ["bench"]
    assert list(measure(host, release, monkeypatch).times_s) == []
    check(host, release, "quick", run="run-2")
    assert not boot.is_bench_due(release, stored_proof(host, release))
    assert list(measure(host, release, monkeypatch, driver="580.159").times_s) == ["bench"]


@pytest.mark.slow
def test_slowdown_after_upgrade_is_reported_with_a_revert_hint(host, monkeypatch):
    release = serve_with_bench(host)
    monkeypatch.setattr(versions, "read_packages", lambda: {"docker": "docker-ce=5:28.5.1-1"})
    measure(host, release, monkeypatch)
    host.engines.pop().kill()
    host.started(release, STUB_PIECE_S="0.004")
    lines = "\n".join(measure(host, release, monkeypatch, docker="29.2.1").bench)
    assert "clearly slower after docker 28.5.1 -> 29.2.1: one stream: " in lines
    assert "to revert: run `apt-get install --allow-downgrades docker-ce=5:28.5.1-1`" in lines
    assert {event.kind for event in read_events("main", host.paths)} == {"slower"}
    bench = stored_proof(host, release).bench
    assert bench["versions"]["docker"] == "29.2.1"
    assert "before" not in bench["before"], "the proof must not grow with each measurement"


@pytest.mark.slow
def test_new_image_is_compared_with_the_previous_release(host, monkeypatch):
    def with_base(base, name):
        image = {"tag": f"spark-vllm:{base}", "digest_label": None, "plugin": "1" * 12}
        return release_with_bench(host, name, image={**image, "base": f"vllm@sha256:{base}"})

    old = with_base("a", OLD)
    host.started(old, STUB_PIECE_S="0.0005")
    measure(host, old, monkeypatch)
    boot.record_known_good(old, host.here)
    new = with_base("b", NEW)
    measure(host, new, monkeypatch)
    stored = stored_proof(host, new)
    assert stored.bench["changed"] == ["image vllm@sha256:a -> vllm@sha256:b"]
    assert stored.versions["plugin"] == "1" * 12
    boot.record_known_good(new, host.here)
    other_profile = release_with_bench(host, f"main-{'c' * 12}", profile="v2-tq")
    assert boot.read_earlier_bench(other_profile, host.here) is None


def test_package_versions_are_printed_in_apt_format(monkeypatch):
    monkeypatch.setattr(versions, "_PROGRAMS", {"shell": "dpkg", "none": "no-such-program"})
    packages = versions.read_packages()
    assert list(packages) == ["shell"]
    assert packages["shell"].startswith("dpkg=1")


def test_failed_speed_measurement_does_not_fail_the_rollout(host, monkeypatch):
    release = serve_with_bench(host)
    assert "the speed was not measured" in measure(host, release, monkeypatch, dies=True).bench[0]
    assert stored_proof(host, release).ok
