"""Hub and disk failures print a single error, lose no data, and are repaired by the next run."""

from __future__ import annotations

import json
import re

import pytest

from tests.faults.pause import JOBS, Pause, assert_repaired
from tests.host.conftest import Fleet
from tests.labkit import STATE, Guest, lab

WEIGHTS = "model-*.safetensors"
ACCESS_LOG = STATE / "run" / "hub-access.jsonl"
NO_ROOM = r"disk /\S*: 0\.0 GiB free.*/srv/spark/.*\n.*fix: free \d+\.\d GiB"
JOBS_BY_TIME = "find /var/lib/spark/jobs -printf '%p %s %T@\\n' | sort"
FEW_RETRIES = {"downloads": {"outage_s": 0}}


def finished_files(guest: Guest) -> str:
    files = (
        "find /srv/spark/models /srv/spark/sources /etc/spark /var/lib/spark/proofs "
        "/var/lib/spark/good -path '*/.*' -prune -o -type f"
    )
    return guest.run(
        f"{files} -printf '%i %s %T@ %p\\n' | sort; {files} -print0 | sort -z | xargs -0 sha256sum"
    )


def partial_files(guest: Guest) -> dict[str, str]:
    lines = guest.run(
        "find /srv/spark/models /srv/spark/sources -path '*/.*.partial/*' -type f -size +0 "
        "-printf '%i %p\\n'"
    ).splitlines()
    return dict(line.split(" ", 1) for line in lines)


def delete_sources(guest: Guest) -> None:
    guest.run("find /srv/spark/sources -mindepth 1 -delete")


def delete_checkpoints(guest: Guest) -> None:
    guest.run("rm -rf /srv/spark/models/* /srv/spark/sources/*")


def requested_paths(guest: Guest, log_start: int) -> list[str]:
    with ACCESS_LOG.open() as lines:
        lines.seek(log_start)
        requests = [json.loads(line) for line in lines]
    return [line["path"] for line in requests if line["client"] == guest.ip]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (["hub-down"], "10.77.0.1:8082"),
        (["hub-wrong-hash", "--match", WEIGHTS], "sha256"),
        (["hub-truncate", "--match", WEIGHTS], "bytes early"),
    ],
    ids=["hub down", "wrong bytes", "cut short"],
)
def test_reports_faulty_hub_and_next_run_continues(
    fleet: Fleet, fault: list[str], error: str
) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest, **FEW_RETRIES)
    before = guest.serving()
    delete_sources(guest)
    before_files = finished_files(guest)

    lab("break", *fault)
    try:
        run = fleet.site.deploy("--limit", guest.name)
    finally:
        lab("break", fault[0], "--heal")

    assert run.exit_code != 0
    errors = [line for line in run.stderr.splitlines() if "error:" in line]
    assert any(error in line for line in errors), run.stderr[-3000:]
    assert "Traceback" not in run.stderr
    assert guest.serving() == before
    assert finished_files(guest) == before_files
    received = partial_files(guest) if fault[0] == "hub-truncate" else {}
    assert received or fault[0] != "hub-truncate"

    fleet.site.deploy("--limit", guest.name).assert_succeeded()
    # The next run continued the partial files: they have the same inodes.
    names = guest.run("find /srv/spark/sources -type f -printf '%i '").split()
    assert set(received) <= set(names), received
    assert set(before_files.splitlines()) <= set(finished_files(guest).splitlines())
    fleet.site.deploy("--limit", guest.name).assert_unchanged()


def test_refuses_full_disk_before_first_byte(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    guest.run("find /srv/spark/models /srv/spark/sources -mindepth 1 -delete")
    jobs, log_start = guest.run(JOBS_BY_TIME), ACCESS_LOG.stat().st_size
    since = guest.run("sleep 1; date +%s")

    lab("break", "disk-full", guest.name)
    try:
        run = fleet.site.deploy("--limit", guest.name)
        # A full disk may lose journal entries, so the jobs' folders are compared too.
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
    assert requested_paths(guest, log_start) == []
    assert guest.serving() == before
    fleet.site.deploy("--limit", guest.name).assert_succeeded()


def test_disk_filling_during_fetch(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    delete_sources(guest)
    before_files = finished_files(guest)
    process = fleet.site.start("--limit", guest.name)
    try:
        with Pause.job(guest, "fetch", JOBS["fetch"]) as pause:
            paused = pause.wait()
            run = guest.unit(paused["unit"], "InvocationID")["InvocationID"]
            lab("break", "disk-full", guest.name, "--value", "262144")
        output, _ = process.communicate(timeout=120)
    finally:
        lab("break", "disk-full", guest.name, "--heal")

    assert process.returncode != 0
    assert_one_full_disk_error(output)
    log = guest.run(f"journalctl _SYSTEMD_INVOCATION_ID={run} -o cat")
    assert "phase=fetch" in log
    assert "Traceback" not in log
    assert guest.run(f"ls {paused['proof']['receipt']} 2>/dev/null || :") == ""
    assert finished_files(guest) == before_files
    assert guest.serving() == guest.boots() == before
    assert guest.answers()
    assert_repaired(fleet)
    assert set(before_files.splitlines()) <= set(finished_files(guest).splitlines())


def test_disk_filling_during_build(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    tree = guest.json(f"cat /etc/spark/releases/{guest.release()}/release.json")["tree"]["path"]
    guest.run(f"find /srv/spark/models -mindepth 1 -maxdepth 1 ! -path {tree} -exec rm -rf {{}} +")
    before_files = finished_files(guest)
    fleet.site.choose(profile="v2-native")  # needs another checkpoint, written in full
    process = fleet.site.start("--limit", guest.name)
    try:
        with Pause.job(guest, "checkpoint", JOBS["checkpoint"]) as pause:
            paused = pause.wait()
            run = guest.unit(paused["unit"], "InvocationID")["InvocationID"]
            lab("break", "disk-full", guest.name, "--value", "65536")
        output, _ = process.communicate(timeout=120)
        while_full = (finished_files(guest), guest.serving(), guest.boots())
        answered = guest.answers()
    finally:
        lab("break", "disk-full", guest.name, "--heal")

    assert process.returncode != 0
    assert_one_full_disk_error(output)
    log = guest.run(f"journalctl _SYSTEMD_INVOCATION_ID={run} -o cat")
    assert "phase=write" in log
    assert "Traceback" not in log
    assert while_full == (before_files, before, before)
    assert answered
    assert guest.run(f"ls {paused['proof']['receipt']} 2>/dev/null || :") == ""

    assert_repaired(fleet)

    assert guest.serving() != before
    assert guest.run(f"ls {paused['proof']['receipt']}")
    assert partial_files(guest) == {}
    trees = [line for line in before_files.splitlines() if " /srv/spark/" in line]
    assert set(trees) <= set(finished_files(guest).splitlines())


def assert_one_full_disk_error(output: str) -> None:
    errors = {ln.partition("error: ")[2] for ln in output.splitlines() if "No space left" in ln}
    assert len(errors) == 1, output[-4000:]
    assert "; fix: " in errors.pop()
    assert "Traceback" not in output


def test_reuses_files_from_hugging_face_cache(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    guest.run(
        "rm -rf /home/spark/.cache; mkdir -p /home/spark/.cache/huggingface/hub && "
        "cp -r /srv/spark/sources/* /home/spark/.cache/huggingface/hub/"
    )
    receipt = guest.json("cat /srv/spark/sources/*/receipt.json")
    hashes = [file["sha256"] for file in receipt["files"]]
    delete_checkpoints(guest)
    log_start = ACCESS_LOG.stat().st_size

    run = fleet.site.deploy("--limit", guest.name)
    guest.run("rm -rf /home/spark/.cache")

    assert run.exit_code == 0, run.stderr[-3000:]
    assert guest.json("cat /srv/spark/sources/*/receipt.json")["digest"] == receipt["digest"]
    paths = requested_paths(guest, log_start)
    # Only the ranges of the FP8 source checkpoint still come from the hub.
    assert paths
    assert not [path for path in paths if receipt["name"] in path]
    assert not [path for path in paths if any(sha256 in path for sha256 in hashes)]
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
