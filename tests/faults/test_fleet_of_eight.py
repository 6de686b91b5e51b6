"""Eight hosts behind a slow line: traffic, duration, and whether clients notice.

`tc` limits the line from hub and registry to all hosts together, and a network ten times as fast to
each host. With `SPARK_LINE_RESULT` results and plots are written to that folder.
"""

import json
import os
import platform
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.bench import report
from tests.faults.test_peer_downloads import shared_blobs
from tests.faults.transfers import FROM_HUB, HubLog, RegistryLog, checkpoint_sums, limit_rate
from tests.labkit import Site, guest_named, info, lab

NAMES = os.environ.get(
    "SPARK_EIGHT_GUESTS", "lab-20 lab-21 lab-22 lab-23 lab-24 lab-25 lab-26 lab-27"
).split()
LINE, NETWORK = "4mbit", "40mbit"
FROM_REGISTRY = ("match", "ip", "src", "10.77.0.1", "match", "ip", "sport", "5000", "0xffff")
FROM_PEERS = ("match", "ip", "sport", "8010", "0xffff")
DELETE_SOURCES = "rm -rf /srv/spark/sources/*--tiny-int4-*"
FETCH_TIMES = (
    "journalctl -q -o short-unix _PID=1 | grep -E '(Starting|Finished) spark-job@' | "
    'grep -F "$(basename $(dirname $(grep -l \'"fetch"\' /var/lib/spark/jobs/*/job.json)))" | '
    "tail -2 | cut -d' ' -f1"
)

pytestmark = pytest.mark.timeout(3600)


class Eight:
    def __init__(self, site):
        self.site = site
        self.guests = [guest_named(name) for name in NAMES]
        self.result: dict[str, Any] = {}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    lab("up", *NAMES, "--fresh", "--engine", "stub", timeout_s=2400)
    site = Site(tmp_path_factory.mktemp("site"), hosts=list(NAMES))
    published = {
        role: f"{image['repository']}:{image['tag']}"
        for role, name in (("engine", "vllm-cpu"), ("stub_engine", "stub-engine"))
        if (image := info()["images"].get(name))
    }
    site.choose(model="lab-stub", profile="base", images=published)
    eight = Eight(site)
    yield eight
    write_eight_hosts(eight.result)
    lab("down", *NAMES)


@contextmanager
def slow_line(guests):
    line = [
        (*source, "match", "ip", "dst", guest.ip)
        for guest in guests
        for source in (FROM_HUB, FROM_REGISTRY)
    ]
    with ExitStack() as stack:
        stack.enter_context(limit_rate("br-lab", LINE, *line))
        for guest in guests:
            stack.enter_context(limit_rate(f"veth-{guest.name}", NETWORK, FROM_PEERS))
        yield


class Client:
    def __init__(self, guests):
        self._guests, self._stop = guests, threading.Event()
        self._model = guests[0].names()[0]
        self.answers: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._send_requests)

    def _send_requests(self):
        while not self._stop.is_set():
            for guest in self._guests:
                status, body = guest.ask(model=self._model)
                right = status == 200 and "Paris" in str(body)
                self.answers["right" if right else f"{status} {body}"[:200]] += 1
            self._stop.wait(1)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def fetch_over_line(eight, count, *, share=True):
    """Fetch the model again on some hosts; return bytes, and seconds of the jobs by systemd."""
    guests = eight.guests[:count]
    eight.site.hosts[:] = NAMES[:count]
    eight.site.choose(fleet={"share": share})
    for guest in guests:
        guest.run(DELETE_SOURCES)
    hub = HubLog()
    with slow_line(guests):
        run = eight.site.deploy(timeout_s=1500)
    assert run.exit_code == 0, run.stderr[-4000:]
    times = [tuple(map(float, guest.run(FETCH_TIMES).split())) for guest in guests]
    return {
        "hosts": count,
        "share": share,
        "hub_sent_bytes": sum(hub.bytes_to(guest) for guest in guests),
        "seconds": round(max(end for _, end in times) - min(begin for begin, _ in times), 1),
    }


def test_eight_new_hosts_download_only_one_copy_in_total(eight):
    hub, registry = HubLog(), RegistryLog()
    run = eight.site.deploy(timeout_s=2400).assert_succeeded()
    first = eight.guests[0]
    listed = first.run("find /srv/spark/sources/*--tiny-int4-* -size +100k -printf '%s\\n'")
    model_bytes = sum(map(int, listed.split()))
    hub_bytes = sum(hub.bytes_to(guest) for guest in eight.guests)
    blobs = shared_blobs(first)
    sent = [registry.bytes_to(guest) for guest in eight.guests]
    registry_bytes = sum(sizes.get(name, 0) for sizes in sent for name in blobs)
    assert hub_bytes == pytest.approx(model_bytes, rel=0.01)
    assert registry_bytes == pytest.approx(sum(blobs.values()), rel=0.01)
    assert len({checkpoint_sums(guest) for guest in eight.guests}) == 1
    eight.result["first_deploy"] = {
        "hosts": 8, "model_bytes": model_bytes, "hub_sent_bytes": hub_bytes,
        "image_bytes": sum(blobs.values()), "registry_sent_bytes": registry_bytes,
        "seconds": round(run.seconds, 1),
    }  # fmt: skip
    eight.site.deploy(timeout_s=1200).assert_unchanged()


def test_deploying_eight_hosts_takes_little_longer_than_one(eight, capsys):
    single, all_hosts = runs = [fetch_over_line(eight, count) for count in (1, 8)]
    with capsys.disabled():
        sys.stdout.write(f"\n{runs}\n")
    assert all_hosts["hub_sent_bytes"] == pytest.approx(single["hub_sent_bytes"], rel=0.01)
    over_network_s = single["hub_sent_bytes"] * 8 / 40e6
    eight.result["line"] = {
        "rate": LINE, "network": NETWORK, "runs": runs,
        "one_copy_over_the_network_s": round(over_network_s, 1),
    }  # fmt: skip
    assert all_hosts["seconds"] <= single["seconds"] * 1.3 + over_network_s


def test_hub_traffic_grows_with_host_count_only_if_peer_downloads_are_off(eight, capsys):
    runs = {}
    for count in (1, 2, 4):
        for share in (True, False):
            runs[count, share] = fetch_over_line(eight, count, share=share)
            with capsys.disabled():
                sys.stdout.write(f"\n{runs[count, share]}")
    eight.site.choose(fleet={"share": True})
    copy_bytes = runs[1, True]["hub_sent_bytes"]
    for count in (2, 4):
        assert runs[count, True]["hub_sent_bytes"] == pytest.approx(copy_bytes, rel=0.01)
        assert runs[count, False]["hub_sent_bytes"] == count * copy_bytes
        assert runs[count, True]["seconds"] < runs[1, True]["seconds"] * 1.3
    write_result(
        "lending",
        {"benchmark": "lending", "line": LINE, "runs": list(runs.values())},
        [(f"{count} hosts", [runs[count, share]["seconds"] for share in (True, False)])
         for count in (1, 2, 4)],
        "Seconds until every host has the checkpoint: with and without sharing",
    )  # fmt: skip


def test_reinstalled_host_downloads_from_peers_while_they_serve(eight):
    eight.site.hosts[:] = NAMES
    *seven, last = eight.guests
    began = time.monotonic()
    with Client(seven) as client:
        lab("up", last.name, "--fresh", "--engine", "stub")
        site = Site(eight.site.root / "rebuilt", hosts=list(NAMES))  # with the new host key
        site.choose(**eight.site.choices)
        hub, registry = HubLog(), RegistryLog()
        run = site.deploy(timeout_s=1500)
    assert run.exit_code == 0, run.stderr[-5000:]
    assert hub.bytes_to(last) == 0
    assert not shared_blobs(eight.guests[0]).keys() & registry.bytes_to(last).keys()
    assert last.answers()
    assert set(client.answers) == {"right"}, client.answers
    eight.result["rebuilt"] = {
        "seconds": round(time.monotonic() - began, 1), "hub_sent_bytes": 0,
        "asked_of_the_seven": client.answers["right"],
    }  # fmt: skip


def write_eight_hosts(result):
    bars = []
    if line := result.get("line"):
        bars = [(f"{run['hosts']} hosts", [run["seconds"]]) for run in line["runs"]]
        bars.append(("one copy over the network", [line["one_copy_over_the_network_s"]]))
    title = f"Seconds until every host has the model, line {LINE}"
    write_result("eight-hosts", {"benchmark": "eight hosts", **result}, bars, title)


def write_result(name, result, bars, title):
    if "SPARK_LINE_RESULT" not in os.environ:
        return
    folder = Path(os.environ["SPARK_LINE_RESULT"])
    document = {
        "command": "SPARK_LINE_RESULT=proofs/results python -m pytest "
        "tests/faults/test_fleet_of_eight.py",
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "load": os.getloadavg()[0]},
        "stands_in": "guests of the virtual lab on one machine; not a DGX Spark",
        **result,
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    if bars:
        (folder / f"{name}.svg").write_text(report.draw_bars(bars, title) + "\n")
