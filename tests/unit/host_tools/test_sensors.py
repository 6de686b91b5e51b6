import pytest
from spark_host.watch import sensors
from spark_host.watch.sensors import GpuAlarms, Reading


@pytest.fixture
def alarms(host):
    watch = {"stall_s": 1, "interval_s": 0.1, "hot_celsius": 90}
    return GpuAlarms(host.release(watch=watch).watch)


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
def test_parses_numbers_or_none(text, reading):
    assert sensors.parse(text) == reading


def test_no_sample_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert sensors.read() is None


def test_values_around_the_heat_limit_record_two_events(alarms):
    events = []
    for celsius in (85, 91, 93, 89, 91, 84):
        events += alarms.events(Reading(celsius, 2400, None, None))
    assert [kind for kind, _ in events] == ["hot", "cooled"]
    assert "the GPU is at 91 °C (limit 90 °C), clock 2400 MHz" in events[0][1]


def test_stuck_power_supply_records_an_event(alarms):
    events = [alarms.events(Reading(55, 850, 22.0, 99)) for _ in range(4)]
    assert [[kind for kind, _ in sample] for sample in events] == [[], [], ["power"], []]
    recovered = alarms.events(Reading(61, 2400, 70.0, 95))
    assert "are back to normal" in recovered[0][1]


@pytest.mark.parametrize(
    "reading",
    [
        Reading(40, 208, 4.2, 0),
        Reading(80, 2100, 50.0, 99),
        Reading(55, None, 22.0, 99),
        Reading(None, 850, None, 99),
        None,
    ],
)
def test_idle_or_incomplete_samples_record_no_event(alarms, reading):
    assert [event for _ in range(5) for event in alarms.events(reading)] == []
