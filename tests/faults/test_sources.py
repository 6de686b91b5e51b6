"""A full disk gives a single error and loses no data; the next run repairs it.

test_sweep_network.py tries failures of the hub.
"""

import json

import pytest

from tests.faults.pause import JOBS, Pause, assert_repaired
from tests.faults.test_half_built import delete_unserved_checkpoints, partial_files
from tests.labkit import STATE, lab

ACCESS_LOG = STATE / "run" / "hub-access.jsonl"


def finished_files(guest):
    files = (
        "find /srv/spark/models /srv/spark/sources /etc/spark /var/lib/spark/proofs "
        "/var/lib/spark/good -path '*/.*' -prune -o -type f"
    )
    return guest.run(
        f"{files} -printf '%i %s %T@ %p\\n' | sort; {files} -print0 | sort -z | xargs -0 sha256sum"
    )


def requested_paths(guest, log_start):
    with ACCESS_LOG.open() as lines:
        lines.seek(log_start)
        requests = [json.loads(line) for line in lines]
    return [line["path"] for line in requests if line["client"] == guest.ip]


@pytest.mark.parametrize(
    ("job", "phase", "free_bytes"), [("fetch", "fetch", 262144), ("checkpoint", "write", 65536)]
)
def test_job_that_filled_the_disk_keeps_finished_files_and_resumes(fleet, job, phase, free_bytes):
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    if job == "fetch":
        guest.run("find /srv/spark/sources -mindepth 1 -delete")
    else:
        delete_unserved_checkpoints(guest)
        fleet.site.choose(profile="v2-native")
    before_files = finished_files(guest)
    process = fleet.site.start("--limit", guest.name)
    try:
        with Pause.job(guest, job, JOBS[job]) as pause:
            paused = pause.wait()
            invocation = guest.unit(paused["unit"], "InvocationID")["InvocationID"]
            lab("break", "disk-full", guest.name, "--value", str(free_bytes))
        output, _ = process.communicate(timeout=120)
        while_full = (finished_files(guest), guest.serving(), guest.boots())
        answered = guest.answers()
    finally:
        lab("break", "disk-full", guest.name, "--heal")

    assert process.returncode != 0
    assert_one_full_disk_error(output)
    log = guest.run(f"journalctl _SYSTEMD_INVOCATION_ID={invocation} -o cat")
    assert f"phase={phase}" in log
    assert "Traceback" not in log
    assert while_full == (before_files, before, before)
    assert answered
    assert guest.run(f"ls {paused['proof']['receipt']} 2>/dev/null || :") == ""

    assert_repaired(fleet)

    assert guest.run(f"ls {paused['proof']['receipt']}")
    assert partial_files(guest) == []
    kept = [line for line in before_files.splitlines() if " /srv/spark/" in line]
    assert set(kept) <= set(finished_files(guest).splitlines())


def assert_one_full_disk_error(output):
    full = [line for line in output.splitlines() if "No space left" in line]
    errors = {line.partition("error: ")[2] for line in full}
    assert len(errors) == 1, output[-4000:]
    assert "; fix: " in errors.pop()
    assert "Traceback" not in output


def test_download_reuses_files_from_hugging_face_cache(fleet):
    guest = fleet.guests[0]
    fleet.settle(guest)
    guest.run(
        "rm -rf /home/spark/.cache; mkdir -p /home/spark/.cache/huggingface/hub && "
        "cp -r /srv/spark/sources/* /home/spark/.cache/huggingface/hub/"
    )
    receipt = guest.json("cat /srv/spark/sources/*/receipt.json")
    hashes = [file["sha256"] for file in receipt["files"]]
    guest.run("rm -rf /srv/spark/models/* /srv/spark/sources/*")
    log_start = ACCESS_LOG.stat().st_size

    run = fleet.site.deploy("--limit", guest.name)
    guest.run("rm -rf /home/spark/.cache")

    assert run.exit_code == 0, run.stderr[-3000:]
    assert guest.json("cat /srv/spark/sources/*/receipt.json")["digest"] == receipt["digest"]
    paths = requested_paths(guest, log_start)
    assert paths
    assert not [path for path in paths if receipt["name"] in path]
    assert not [path for path in paths if any(sha256 in path for sha256 in hashes)]
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
