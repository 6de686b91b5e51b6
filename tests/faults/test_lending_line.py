"""How long hosts take that share one slow line, and what crosses it: lending, and each for itself.

Four guests of the lab; `SPARK_LINE_GUESTS` names others. With `SPARK_LINE_RESULT` a folder, the
figures and a plot are written there.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.bench import report
from tests.faults.lending import FROM_HUB, Sent, slow
from tests.labkit import Guest, Site, guest_named, lab

NAMES = os.environ.get("SPARK_LINE_GUESTS", "lab-23 lab-24 lab-25 lab-26").split()
LINE = "4mbit"
JOB_TIMES = (
    "journalctl -q -o short-unix _PID=1 | grep -E '(Starting|Finished) spark-job@' | "
    "tail -2 | cut -d' ' -f1"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    lab("up", *NAMES, "--fresh", "--engine", "stub")
    made = Site(tmp_path_factory.mktemp("site"), hosts=list(NAMES))
    made.choose(model="lab-stub", profile="base")
    first = made.deploy()
    assert first.exit_code == 0, first.stderr[-4000:]
    yield made
    for name in NAMES:
        lab("down", name)


def fetched(site: Site, count: int, *, share: bool) -> dict[str, Any]:
    """Have hosts fetch a tree anew over one line; return bytes and seconds."""
    guests = [guest_named(name) for name in NAMES[:count]]
    site.hosts[:] = NAMES[:count]
    site.choose(fleet={"share": share})
    for guest in guests:
        guest.run("rm -rf /srv/spark/sources/*")
    sent = Sent()
    lines = [(*FROM_HUB, "match", "ip", "dst", guest.ip) for guest in guests]
    with slow("br-lab", LINE, *lines):
        run = site.deploy()
    assert run.exit_code == 0, run.stderr[-4000:]
    times = [times_of(guest) for guest in guests]
    return {
        "hosts": count,
        "share": share,
        "hub_sent_bytes": [sent.bytes_to(guest) for guest in guests],
        "seconds": round(max(end for _, end in times) - min(begin for begin, _ in times), 1),
    }


def times_of(guest: Guest) -> tuple[float, float]:
    """Return when the last fetch of a guest began and ended, by systemd's word."""
    began, ended = guest.run(JOB_TIMES).split()
    return float(began), float(ended)


def test_one_copy_crosses_the_line_however_many_hosts_there_are(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for count in (1, 2, 4):
        for share in (True, False):
            found.append(fetched(site, count, share=share))
            with capsys.disabled():
                sys.stdout.write(f"\n{found[-1]}")
    of = {(one["hosts"], one["share"]): one for one in found}
    copy = of[1, True]["hub_sent_bytes"][0]
    for count in (2, 4):
        assert sum(of[count, True]["hub_sent_bytes"]) == pytest.approx(copy, rel=0.01)
        assert sum(of[count, False]["hub_sent_bytes"]) == count * copy
        assert of[count, True]["seconds"] < of[1, True]["seconds"] * 1.3
    if "SPARK_LINE_RESULT" in os.environ:
        write_result(Path(os.environ["SPARK_LINE_RESULT"]), found)


def write_result(folder: Path, found: list[dict[str, Any]]) -> None:
    result = {
        "benchmark": "lending",
        "command": "SPARK_LINE_RESULT=proofs/results python -m pytest "
        "tests/faults/test_lending_line.py",
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "load": os.getloadavg()[0]},
        "stands_in": "guests of the virtual lab on one machine; not a DGX Spark",
        "line": f"{LINE} for all hosts together from the lab's hub; between hosts as fast as it is",
        "runs": found,
    }
    (folder / "lending.json").write_text(json.dumps(result, indent=2) + "\n")
    counts = sorted({one["hosts"] for one in found})
    seconds = {(one["hosts"], one["share"]): one["seconds"] for one in found}
    groups = [(f"{n} hosts", [seconds[n, True], seconds[n, False]]) for n in counts]
    title = "Seconds until every host has the tree: lending, and each for itself"
    picture = report.draw_bars(groups, title)
    (folder / "lending.svg").write_text(picture + "\n")
