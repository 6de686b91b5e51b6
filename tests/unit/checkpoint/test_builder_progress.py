"""Progress is lines of key=value that a poller can read, also while nothing moves."""

import re
import time

import pytest
from spark_checkpoint import progress
from spark_checkpoint.progress import Progress

LINE = re.compile(
    r"phase=[a-z-]+ bytes=\d+ total=(\d+|-) rate_bytes_per_s=\d+ eta_s=(\d+|-)"
)  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def pairs(line):
    return dict(word.split("=", 1) for word in line.split())


@pytest.mark.parametrize("layout", ["overlay", "full"])
def test_every_line_of_a_build_is_readable_and_no_phase_passes_its_total(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    out = workshop.build(layout=layout, head="int8-g128").stdout.splitlines()
    assert [line for line in out if not LINE.fullmatch(line)] == []
    lines = [pairs(line) for line in out]
    assert {"gates", "spot-check", "head", "write", "verify"} <= {line["phase"] for line in lines}
    assert lines[-1]["phase"] == "done"
    for line in lines:
        assert line["total"] == "-" or int(line["bytes"]) <= int(line["total"])


def test_rate_and_time_left_follow_from_bytes_and_clock(clock, capsys):
    told = Progress()
    told.phase("write", 1000)
    told.add(200)
    clock[0] += 4
    told.show()
    assert capsys.readouterr().out.splitlines()[-1] == (
        "phase=write bytes=200 total=1000 rate_bytes_per_s=50 eta_s=16"
    )


def test_bytes_that_were_there_before_make_no_rate(clock):
    told = Progress()
    told.phase("fetch", 1000, done_bytes=500)
    told.skip(100)
    told.add(100)
    clock[0] += 2
    assert told.line() == "phase=fetch bytes=700 total=1000 rate_bytes_per_s=50 eta_s=6"


def test_what_is_not_known_yet_is_a_dash(clock):
    told = Progress()
    told.phase("gates")
    assert told.line() == "phase=gates bytes=0 total=- rate_bytes_per_s=0 eta_s=-"


def test_lines_go_on_while_nothing_moves(capsys):
    with Progress(interval_s=0.02) as told:
        told.phase("write", 10)
        time.sleep(0.3)
    assert capsys.readouterr().out.count("phase=write bytes=0 total=10") > 3
