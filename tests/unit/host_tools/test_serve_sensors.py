"""Heat and a stuck power supply make an event each."""

from __future__ import annotations

import pytest
from spark_host.system import host as system
from spark_host.watch import sensors
from spark_host.watch.sensors import GpuAlarms, Reading, parse
from stub_host import Host

COOL = Reading(61, 2400, 70.0, 95)


@pytest.fixture
def thermometer(host: Host) -> GpuAlarms:
    release = host.release(watch={"stall_s": 1, "interval_s": 0.1, "hot_celsius": 90})
    return GpuAlarms(system.load_release(release.name, host.paths).watch)


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("67, 2418, 16.42, 0\n", Reading(67, 2418, 16.42, 0)),
        ("67, 2418, [N/A], [N/A]\n", Reading(67, 2418, None, None)),
        ("[N/A], [Unknown Error], [N/A], 3\n", Reading(None, None, None, 3)),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_parses_numbers_or_none(text: str, reading: Reading | None) -> None:
    assert parse(text) == reading


def test_no_sample_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert sensors.read() is None


def test_heat_makes_two_events(thermometer: GpuAlarms) -> None:
    kinds = []
    for celsius in (85, 91, 93, 89, 91, 84):
        kinds += thermometer.events(Reading(celsius, 2400, None, None))
    assert [kind for kind, _ in kinds] == ["hot", "cooled"]
    assert "the GPU is at 91 °C (limit 90 °C), clock 2400 MHz" in kinds[0][1]


def test_stuck_power_supply_makes_an_event(thermometer: GpuAlarms) -> None:
    stuck = Reading(55, 850, 22.0, 99)
    told = [thermometer.events(stuck) for _ in range(4)]
    assert [len(events) for events in told] == [0, 0, 1, 0]
    assert "unplug it" in told[2][0][1]
    assert "has power again" in thermometer.events(COOL)[0][1]


@pytest.mark.parametrize(
    "reading",
    [
        Reading(40, 208, 4.2, 0),  # idle: a low clock is right
        Reading(80, 2100, 50.0, 99),  # a clock cap
        Reading(55, None, 22.0, 99),
        Reading(None, 850, None, 99),
    ],
)
def test_idle_or_incomplete_samples_make_no_event(thermometer: GpuAlarms, reading: Reading) -> None:
    assert [event for _ in range(5) for event in thermometer.events(reading)] == []


def test_missing_sample_makes_no_event(thermometer: GpuAlarms) -> None:
    assert thermometer.events(None) == []
