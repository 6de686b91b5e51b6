"""Eight hosts, one line to the internet: what crosses it, how long it takes, who notices.

`tc` scales everything down together: the line from hub and registry for all hosts, and a network
ten times as fast to each host. `SPARK_EIGHT_GUESTS` names other guests; with `SPARK_LINE_RESULT` a
folder, figures and a plot are written there.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.bench import report
from tests.faults.lending import FROM_HUB, Pulled, Sent, slow
from tests.labkit import Guest, Site, guest_named, info, lab

NAMES = os.environ.get(
    "SPARK_EIGHT_GUESTS", "lab-20 lab-21 lab-22 lab-23 lab-24 lab-25 lab-26 lab-27"
).split()
LINE, NETWORK = "4mbit", "40mbit"
FROM_REGISTRY = ("match", "ip", "src", "10.77.0.1", "match", "ip", "sport", "5000", "0xffff")
FROM_PEERS = ("match", "ip", "sport", "8010", "0xffff")
CAPITAL = "What is the capital of France?"
FETCHED = (
    "journalctl -q -o short-unix _PID=1 | grep -E '(Starting|Finished) spark-job@' | "
    'grep -F "$(basename $(dirname $(grep -l \'"fetch"\' /var/lib/spark/jobs/*/job.json)))" | '
    "tail -2 | cut -d' ' -f1"
)

pytestmark = pytest.mark.timeout(3600)


class Eight:
    """The hosts, and what is written down of them at the end."""

    def __init__(self, site: Site):
        self.site = site
        self.guests = [guest_named(name) for name in NAMES]
        self.result: dict[str, Any] = {}


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eight]:
    lab("up", *NAMES, "--fresh", "--engine", "stub", timeout_s=2400)
    site = Site(tmp_path_factory.mktemp("site"), hosts=list(NAMES))
    # Other runs publish their own stand-in under the same name.
    published = {
        role: f"{made['repository']}:{made['tag']}"
        for role, name in (("engine", "vllm-cpu"), ("stub_engine", "stub-engine"))
        if (made := info()["images"].get(name))
    }
    site.choose(model="lab-stub", profile="base", images=published)
    made = Eight(site)
    yield made
    if "SPARK_LINE_RESULT" in os.environ:
        write_result(Path(os.environ["SPARK_LINE_RESULT"]), made.result)
    for name in NAMES:
        lab("down", name)


@contextmanager
def shaped(guests: Sequence[Guest]) -> Iterator[None]:
    """Make one slow line of what hub and registry send, and a faster network to each host."""
    line = [
        (*source, "match", "ip", "dst", guest.ip)
        for guest in guests
        for source in (FROM_HUB, FROM_REGISTRY)
    ]
    with ExitStack() as stack:
        stack.enter_context(slow("br-lab", LINE, *line))
        for guest in guests:
            stack.enter_context(slow(f"veth-{guest.name}", NETWORK, FROM_PEERS))
        yield


class Asking:
    """Somebody who asks each of some hosts every second."""

    def __init__(self, guests: Sequence[Guest]):
        self._guests, self._over = guests, threading.Event()
        self._model = guests[0].names()[0]
        self.seen: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._over.is_set():
            for guest in self._guests:
                right = guest.ask(CAPITAL, model=self._model)
                told = "right" if right[0] == 200 and "Paris" in str(right[1]) else str(right)[:200]
                self.seen[told] += 1
            self._over.wait(1)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def tree(guest: Guest) -> str:
    return guest.run("cd /srv/spark/sources/*--tiny-int4-*; find . -type f ! -name receipt.json "
                     "-print0 | sort -z | xargs -0 sha256sum")  # fmt: skip


def fetched(eight: Eight, count: int) -> dict[str, Any]:
    """Have hosts fetch the model anew over the line; return bytes and seconds by systemd's word."""
    guests = eight.guests[:count]
    eight.site.hosts[:] = NAMES[:count]
    for guest in guests:
        guest.run("rm -rf /srv/spark/sources/*--tiny-int4-*")
    sent = Sent()
    with shaped(guests):
        run = eight.site.deploy(timeout_s=1500)
    assert run.exit_code == 0, run.stderr[-4000:]
    times = [tuple(map(float, guest.run(FETCHED).split())) for guest in guests]
    return {
        "hosts": count,
        "hub_sent_bytes": sum(sent.bytes_to(guest) for guest in guests),
        "seconds": round(max(end for _, end in times) - min(begin for begin, _ in times), 1),
    }


def test_eight_new_hosts_cost_one_copy_and_then_nothing_changes(eight: Eight) -> None:
    sent, pulled = Sent(), Pulled()
    run = eight.site.deploy(timeout_s=2400)
    assert run.exit_code == 0, f"{run.failed}\n{run.stderr[-6000:]}"
    first = eight.guests[0]
    one_copy = sum(int(size) for size in first.run(
        "find /srv/spark/sources/*--tiny-int4-* -size +100k -printf '%s\\n'").split())  # fmt: skip
    from_hub = sum(sent.bytes_to(guest) for guest in eight.guests)
    kept = first.run("cd /srv/spark/sources/image--*; stat -c '%s' sha256:*").split()
    blobs = first.run("cd /srv/spark/sources/image--*; ls sha256:*").split()
    of_image = sum(
        size for guest in eight.guests for name, size in pulled.by(guest).items() if name in blobs
    )
    assert from_hub == pytest.approx(one_copy, rel=0.01)
    assert of_image == pytest.approx(sum(map(int, kept)), rel=0.01)
    assert len({tree(guest) for guest in eight.guests}) == 1
    eight.result["first_deploy"] = {
        "hosts": 8, "model_bytes": one_copy, "hub_sent_bytes": from_hub,
        "image_bytes": sum(map(int, kept)), "registry_sent_bytes": of_image,
        "seconds": round(run.seconds, 1),
    }  # fmt: skip
    eight.site.deploy(timeout_s=1200).must_have_changed_nothing()


def test_eight_hosts_take_little_longer_than_one(
    eight: Eight, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [fetched(eight, count) for count in (1, 8)]
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")
    one, all_of_them = found
    assert all_of_them["hub_sent_bytes"] == pytest.approx(one["hub_sent_bytes"], rel=0.01)
    over_the_network_s = one["hub_sent_bytes"] * 8 / 40e6
    eight.result["line"] = {
        "rate": LINE, "network": NETWORK, "runs": found,
        "one_copy_over_the_network_s": round(over_the_network_s, 1),
    }  # fmt: skip
    assert all_of_them["seconds"] <= one["seconds"] * 1.3 + over_the_network_s


def test_a_peer_that_loses_its_power_in_the_middle_costs_the_others_little(eight: Eight) -> None:
    first, second, *others = eight.guests
    eight.site.hosts[:] = NAMES
    for guest in (second, *others):
        guest.run("rm -rf /srv/spark/sources/*--tiny-int4-*")
    sent = Sent()
    part = "find /srv/spark/sources -name '*.part' -size +300k | grep ."
    with ExitStack() as stack:
        for guest in others:
            stack.enter_context(slow(f"veth-{guest.name}", "8mbit", FROM_PEERS))
        process = eight.site.start()
        others[-1].wait(part, seconds=400)
        lab("break", "kill-guest", second.name)
        for guest in others:
            guest.wait("ls /srv/spark/sources/*--tiny-int4-*/receipt.json", seconds=300)
        process.communicate(timeout=900)
    lab("up", second.name, "--engine", "stub")
    assert {tree(guest) for guest in others} == {tree(first)}
    from_hub = sum(sent.bytes_to(guest) for guest in eight.guests)
    eight.result["killed_peer"] = {"hub_sent_bytes": from_hub}
    assert from_hub < eight.result["first_deploy"]["model_bytes"]
    run = eight.site.deploy(timeout_s=1500)
    assert run.exit_code == 0, run.stderr[-4000:]


def test_a_host_is_built_anew_from_its_peers_while_seven_serve(eight: Eight) -> None:
    eight.site.hosts[:] = NAMES
    *seven, last = eight.guests
    began = time.monotonic()
    with Asking(seven) as asking:
        lab("up", last.name, "--fresh", "--engine", "stub")
        anew = Site(eight.site.root / "anew", hosts=list(NAMES))  # knows the new host key
        anew.choose(**eight.site.choices)
        sent, pulled = Sent(), Pulled()
        run = anew.deploy(timeout_s=1500)
    assert run.exit_code == 0, run.stderr[-5000:]
    assert sent.bytes_to(last) == 0
    blobs = eight.guests[0].run("cd /srv/spark/sources/image--*; ls sha256:*").split()
    assert not set(blobs) & pulled.by(last).keys()
    assert last.answers(CAPITAL, "Paris")
    assert set(asking.seen) == {"right"}, asking.seen
    eight.result["rebuilt"] = {
        "seconds": round(time.monotonic() - began, 1), "hub_sent_bytes": 0,
        "asked_of_the_seven": asking.seen["right"],
    }  # fmt: skip


def write_result(folder: Path, found: dict[str, Any]) -> None:
    result = {
        "benchmark": "eight hosts",
        "command": "SPARK_LINE_RESULT=proofs/results python -m pytest "
        "tests/faults/test_fleet_of_eight.py",
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "load": os.getloadavg()[0]},
        "stands_in": "guests of the virtual lab on one machine; not a DGX Spark",
        **found,
    }
    (folder / "eight-hosts.json").write_text(json.dumps(result, indent=2) + "\n")
    if "line" not in found:
        return
    groups = [(f"{one['hosts']} hosts", [one["seconds"]]) for one in found["line"]["runs"]]
    groups.append(("one copy over the network", [found["line"]["one_copy_over_the_network_s"]]))
    picture = report.draw_bars(groups, f"Seconds until every host has the model, line {LINE}")
    (folder / "eight-hosts.svg").write_text(picture + "\n")
