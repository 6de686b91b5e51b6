import re
import time

import pytest
from builder_judge import LAYOUTS
from spark_checkpoint import progress
from spark_checkpoint.progress import Progress

LINE = re.compile(r"phase=[a-z-]+ bytes=\d+ total=(\d+|-) rate_bytes_per_s=\d+ eta_s=(\d+|-)")


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_progress_lines_are_parseable_and_never_exceed_total(workshop, layout):
    lines = workshop.build(layout=layout, head="int8-g128").stdout.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    rows = [dict(word.split("=", 1) for word in line.split()) for line in lines]
    assert {"check-sources", "spot-check", "head", "write", "verify"} <= {
        row["phase"] for row in rows
    }
    assert rows[-1]["phase"] == "done"
    for row in rows:
        assert row["total"] == "-" or int(row["bytes"]) <= int(row["total"])


def test_rate_and_remaining_time_exclude_bytes_from_earlier_runs(clock, capsys):
    tracker = Progress()
    tracker.start_phase("check-sources")
    assert tracker.line() == "phase=check-sources bytes=0 total=- rate_bytes_per_s=0 eta_s=-"
    tracker.start_phase("fetch", 1000, done_bytes=500)
    tracker.skip(100)
    tracker.add(100)
    clock[0] += 2
    tracker.print_line()
    line = "phase=fetch bytes=700 total=1000 rate_bytes_per_s=50 eta_s=6"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_prints_progress_lines_during_a_stall(capsys):
    with Progress(interval_s=0.02) as tracker:
        tracker.start_phase("write", 10)
        time.sleep(0.3)
    assert capsys.readouterr().out.count("phase=write bytes=0 total=10") > 3
