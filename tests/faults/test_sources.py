"""Trouble with hub or disk is one clear line, loses nothing, and heals by running again."""

from __future__ import annotations

import json
import re

import pytest

from tests.faults.hold import JOBS, Hold, next_runs
from tests.host.conftest import Fleet
from tests.labkit import STATE, Guest, lab

WEIGHTS = "model-*.safetensors"
ACCESS_LOG = STATE / "run" / "hub-access.jsonl"
# Preflight's own words, with the lab's reserve.
NO_ROOM = (
    r"disk /\S*: 0\.0 GiB free, \d+\.\d GiB to be written and 1\.0 GiB kept free "
    r"\(for [^)]*/srv/spark/[^)]*\).*\n.*fix: free \d+\.\d GiB"
)
JOBS_BY_TIME = "find /var/lib/spark/jobs -printf '%p %s %T@\\n' | sort"


# Asked once more after a moment, so that a test need not wait through all the pauses.
HASTY = {"downloads": {"tries": 2, "retry_pause_s": 0.2}}


def kept(guest: Guest) -> str:
    """Return every finished file of ours: inode, size, time, name and content."""
    files = (
        "find /srv/spark/models /srv/spark/sources /etc/spark /var/lib/spark/proofs "
        "/var/lib/spark/good -path '*/.*' -prune -o -type f"
    )
    return guest.run(
        f"{files} -printf '%i %s %T@ %p\\n' | sort; {files} -print0 | sort -z | xargs -0 sha256sum"
    )


def unfinished(guest: Guest) -> dict[str, str]:
    """Return the files with content that wait in hidden folders, by inode."""
    lines = guest.run(
        "find /srv/spark/models /srv/spark/sources -path '*/.*.partial/*' -type f -size +0 "
        "-printf '%i %p\\n'"
    ).splitlines()
    return dict(line.split(" ", 1) for line in lines)


def forget_sources(guest: Guest) -> None:
    """Take the fetched trees away; the tree that is served was made from them and stays."""
    guest.run("find /srv/spark/sources -mindepth 1 -delete")


def forget_artefacts(guest: Guest) -> None:
    """Take the trees away; what serves goes on with the files it has open."""
    guest.run("rm -rf /srv/spark/models/* /srv/spark/sources/*")


def asked_for(guest: Guest, begun: int) -> list[str]:
    """Return the paths the guest asked the hub for since its log was ``begun`` bytes long."""
    with ACCESS_LOG.open() as lines:
        lines.seek(begun)
        asked = [json.loads(line) for line in lines]
    return [line["path"] for line in asked if line["client"] == guest.ip]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (["hub-down"], "10.77.0.1:8082"),
        (["hub-wrong-hash", "--match", WEIGHTS], "sha256"),
        (["hub-truncate", "--match", WEIGHTS], "bytes early; fix: check the network"),
    ],
    ids=["hub down", "wrong bytes", "cut short"],
)
def test_the_hub_misbehaves(fleet: Fleet, fault: list[str], said: str) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest, **HASTY)
    before = guest.serving()
    forget_sources(guest)
    had = kept(guest)

    lab("break", *fault)
    try:
        run = fleet.site.deploy("--limit", guest.name)
    finally:
        lab("break", fault[0], "--heal")

    assert run.exit_code != 0
    errors = [line for line in run.stderr.splitlines() if "error:" in line]
    assert any(said in line for line in errors), run.stderr[-3000:]
    assert "Traceback" not in run.stderr
    assert guest.serving() == before
    assert kept(guest) == had
    received = unfinished(guest) if fault[0] == "hub-truncate" else {}
    assert received or fault[0] != "hub-truncate"

    healed = fleet.site.deploy("--limit", guest.name)
    assert healed.exit_code == 0, healed.stderr[-3000:]
    # What had come was gone on with: the same files have their names now.
    names = guest.run("find /srv/spark/sources -type f -printf '%i '").split()
    assert set(received) <= set(names), received
    assert set(had.splitlines()) <= set(kept(guest).splitlines())
    fleet.site.deploy("--limit", guest.name).must_have_changed_nothing()


def test_a_full_disk_is_refused_before_the_first_byte(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    # Hidden folders of unfinished work too: what is there afterwards came from this run.
    guest.run("find /srv/spark/models /srv/spark/sources -mindepth 1 -delete")
    jobs, begun = guest.run(JOBS_BY_TIME), ACCESS_LOG.stat().st_size
    since = guest.run("sleep 1; date +%s")

    lab("break", "disk-full", guest.name)
    try:
        run = fleet.site.deploy("--limit", guest.name)
        # A full disk may cost the journal its entries (it exits with 1 where none names such a
        # unit), so the jobs' own folders are asked too.
        journal = f"journalctl -q -o cat -u 'spark-job@*' --since @{since}"
        ran = guest.run(journal, check=False)
        jobs_after = guest.run(JOBS_BY_TIME)
        left = guest.run("find /srv/spark/models /srv/spark/sources -mindepth 1")
    finally:
        lab("break", "disk-full", guest.name, "--heal")

    assert run.exit_code != 0
    assert re.search(NO_ROOM, run.stderr), run.stderr[-3000:]
    assert "Traceback" not in run.stderr
    assert (ran, jobs_after, left) == ("", jobs, "")
    assert asked_for(guest, begun) == []
    assert guest.serving() == before
    assert fleet.site.deploy("--limit", guest.name).exit_code == 0


def test_a_disk_that_fills_up_in_the_middle_of_a_fetch(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    forget_sources(guest)
    had = kept(guest)
    process = fleet.site.start("--limit", guest.name)
    try:
        with Hold.job(guest, "fetch", JOBS["fetch"]) as hold:
            held = hold.wait()
            run = guest.unit(held["unit"], "InvocationID")["InvocationID"]
            lab("break", "disk-full", guest.name, "--value", "262144")
        said, _ = process.communicate(timeout=120)
    finally:
        lab("break", "disk-full", guest.name, "--heal")

    assert process.returncode != 0
    told_once_that_the_disk_is_full(said)
    log = guest.run(f"journalctl _SYSTEMD_INVOCATION_ID={run} -o cat")
    assert "phase=fetch" in log
    assert "Traceback" not in log
    assert guest.run(f"ls {held['proof']['receipt']} 2>/dev/null || :") == ""
    assert kept(guest) == had
    assert guest.serving() == guest.boots() == before
    assert guest.answers("What is the capital of France?", "Paris")
    next_runs(fleet)
    assert set(had.splitlines()) <= set(kept(guest).splitlines())


def test_a_disk_that_fills_up_in_the_middle_of_a_build(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    tree = guest.json(f"cat /etc/spark/releases/{guest.release()}/release.json")["tree"]["path"]
    guest.run(f"find /srv/spark/models -mindepth 1 -maxdepth 1 ! -path {tree} -exec rm -rf {{}} +")
    had = kept(guest)
    fleet.site.choose(profile="v2-native")  # has a tree of its own, every byte of it written
    process = fleet.site.start("--limit", guest.name)
    try:
        with Hold.job(guest, "checkpoint", JOBS["checkpoint"]) as hold:
            held = hold.wait()
            run = guest.unit(held["unit"], "InvocationID")["InvocationID"]
            lab("break", "disk-full", guest.name, "--value", "65536")
        said, _ = process.communicate(timeout=120)
        while_full = (kept(guest), guest.serving(), guest.boots())
        answered = guest.answers("What is the capital of France?", "Paris")
    finally:
        lab("break", "disk-full", guest.name, "--heal")

    assert process.returncode != 0
    told_once_that_the_disk_is_full(said)
    log = guest.run(f"journalctl _SYSTEMD_INVOCATION_ID={run} -o cat")
    assert "phase=write" in log
    assert "Traceback" not in log
    assert while_full == (had, before, before)
    assert answered
    assert guest.run(f"ls {held['proof']['receipt']} 2>/dev/null || :") == ""

    next_runs(fleet)

    assert guest.serving() != before
    assert guest.run(f"ls {held['proof']['receipt']}")
    assert unfinished(guest) == {}
    trees = [line for line in had.splitlines() if " /srv/spark/" in line]
    assert set(trees) <= set(kept(guest).splitlines())


def told_once_that_the_disk_is_full(said: str) -> None:
    """Insist on one clear line, however often it was shown, and on no traceback."""
    told = {line.partition("error: ")[2] for line in said.splitlines() if "No space left" in line}
    assert len(told) == 1, said[-4000:]
    assert "; fix: free space on this filesystem" in told.pop()
    assert "Traceback" not in said


def test_bytes_already_on_the_host_are_used(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    guest.run(
        "rm -rf /home/spark/.cache; mkdir -p /home/spark/.cache/huggingface/hub && "
        "cp -r /srv/spark/sources/* /home/spark/.cache/huggingface/hub/"
    )
    here = guest.json("cat /srv/spark/sources/*/receipt.json")
    hashes = [file["sha256"] for file in here["files"]]
    forget_artefacts(guest)
    begun = ACCESS_LOG.stat().st_size

    run = fleet.site.deploy("--limit", guest.name)
    # Nothing is found here by the tests that want a download.
    guest.run("rm -rf /home/spark/.cache")

    assert run.exit_code == 0, run.stderr[-3000:]
    assert guest.json("cat /srv/spark/sources/*/receipt.json")["digest"] == here["digest"]
    paths = asked_for(guest, begun)
    # The donor's ranges still come from the hub; of the files that were here it sends nothing.
    assert paths
    assert not [path for path in paths if here["name"] in path]
    assert not [path for path in paths if any(sha256 in path for sha256 in hashes)]
    fleet.site.deploy("--limit", guest.name).must_have_changed_nothing()
