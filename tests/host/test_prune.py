"""Pruning frees what nothing kept needs, and other pairs are ready before anybody wants them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.host.conftest import Fleet
from tests.labkit import Guest
from tests.runs import Run
from tests.traces import footprint

PRUNE = "deploys/prune.py"
READY = {"model": "lab-stub", "profile": "v2"}
# An image that an earlier version of ours built, with the record of the job that built it; and one
# that somebody else made.
OLD_IMAGE = "spark-vllm:0123456789ab"
IMAGES = (
    "d=$(mktemp -d); cd $d; head -c 30000000 /dev/urandom > layer; "
    "printf 'FROM scratch\\nCOPY layer /\\n' > Dockerfile; "
    f"docker build -q -t {OLD_IMAGE} --label spark.digest={'0' * 64} .; "
    "head -c 1000 /dev/urandom > layer; docker build -q -t somebody/else:1 .; rm -r $d"
)


def prune(fleet: Fleet, guest: Guest, *, dry: bool = False) -> Run:
    return fleet.site.deploy("--limit", guest.name, dry=dry, deploy=PRUNE)


def releases(guest: Guest) -> set[str]:
    return set(guest.run("ls /etc/spark/releases").split())


def trees(guest: Guest) -> list[str]:
    return guest.run("ls -d /srv/spark/models/* /srv/spark/sources/* 2>/dev/null || :").split()


def jobs_run(guest: Guest) -> str:
    """Return how often a job of ours ever did something, by the journal."""
    return guest.run("journalctl -o cat -u 'spark-job@*' | wc -l")


@pytest.fixture
def strangers(fleet: Fleet) -> Iterator[None]:
    """Have an old image of ours, and things of somebody else beside ours."""
    guest = fleet.guests[0]
    guest.run(IMAGES)
    guest.run("mkdir -p /srv/spark/models/mine && echo mine > /srv/spark/models/mine/file")
    yield
    guest.run("docker rmi somebody/else:1; rm -r /srv/spark/models/mine")


def with_base_alone(fleet: Fleet) -> tuple[Guest, str]:
    """Serve a profile that needs no tree of ours, after one that does; return guest and release."""
    fleet.settle()
    guest = fleet.guests[0]
    fleet.site.choose(profile="base", releases={"keep": 0})
    assert fleet.site.deploy("--limit", guest.name).exit_code == 0
    return guest, guest.release()


@pytest.mark.usefixtures("strangers")
def test_a_dry_prune_says_each_thing_with_its_bytes_and_a_prune_removes_just_that(
    fleet: Fleet,
) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    first = guest.release()
    for profile in ("agent", "v2-tq", "base"):
        fleet.site.choose(profile=profile, releases={"keep": 1})
        assert fleet.site.deploy("--limit", guest.name).exit_code == 0
    here, before = releases(guest), footprint(guest)
    kept = {guest.release(), *guest.json("cat /var/lib/spark/good/main.json")["previous"][:1]}

    dry = prune(fleet, guest, dry=True)

    assert dry.exit_code == 0, dry.stderr[-3000:]
    assert dry.predicted == ["Prune | Remove what no kept release needs"]
    assert footprint(guest) == before
    gone = set(re.findall(r"remove .* release (\S+)", dry.stderr))
    assert gone == here - kept
    assert first in gone
    [size_mb] = re.findall(rf"remove +(\S+) MB  image {OLD_IMAGE}", dry.stderr)
    # 30 MB of noise; docker's other store counts what it packed and what it unpacked.
    assert 20 < float(size_mb) < 80
    # The way back needs the tree, the plan needs its source: neither goes.
    assert not re.search(r"remove .* (tree|source) ", dry.stderr), dry.stderr
    assert "/srv/spark/models/mine: unmanaged" in dry.stderr

    there = trees(guest)
    run = prune(fleet, guest)

    assert run.exit_code == 0, run.stderr[-3000:]
    assert (releases(guest), trees(guest)) == (kept, there)
    assert guest.run(f"docker images -q {OLD_IMAGE}") == ""
    assert guest.run("docker images -q somebody/else:1") != ""
    assert guest.ask("What is the capital of France?")[0] == 200
    again = prune(fleet, guest)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    after = fleet.site.deploy("--limit", guest.name)
    assert (after.exit_code, after.changed) == (0, []), after.stderr[-3000:]


def test_a_tree_that_nothing_needs_any_more_gives_its_bytes_back(fleet: Fleet) -> None:
    guest, serving = with_base_alone(fleet)
    tree = guest.run("ls -d /srv/spark/models/lab-*")
    free = int(guest.run("df --output=avail -B1 /srv/spark | tail -1"))

    dry = prune(fleet, guest, dry=True)
    run = prune(fleet, guest)

    assert f"tree {tree}" in dry.stderr
    assert run.exit_code == 0, run.stderr[-3000:]
    assert releases(guest) == {serving}
    assert guest.run("ls -A /srv/spark/models") == ""
    assert int(guest.run("sync; df --output=avail -B1 /srv/spark | tail -1")) > free
    after = fleet.site.deploy("--limit", guest.name)
    assert (after.exit_code, after.changed) == (0, []), after.stderr[-3000:]
    # What was removed is made again when somebody wants it.
    fleet.settle()
    assert guest.ask("What is the capital of France?")[0] == 200


def test_a_pair_is_made_ready_beside_what_serves_and_the_switch_to_it_waits_for_nothing(
    fleet: Fleet,
) -> None:
    guest, serving = with_base_alone(fleet)
    assert prune(fleet, guest).exit_code == 0
    before = guest.run(f"systemctl show -p InvocationID spark-serve@{serving}")
    fleet.site.choose(keep_ready=[READY])

    made = fleet.site.deploy("--limit", guest.name)

    assert made.exit_code == 0, made.stderr[-3000:]
    assert "Ready | Wait for the other pairs" in made.changed
    assert not [name for name in made.changed if name.startswith("Serve")]
    assert guest.run(f"systemctl show -p InvocationID spark-serve@{serving}") == before
    again = fleet.site.deploy("--limit", guest.name)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    _, told = fleet.site.tool("status", "--limit", guest.name)
    assert "lab-stub with v2: a rollout needs no download and no build" in told
    # Nothing serves it and nothing went back to it, and still it stays.
    kept = prune(fleet, guest)
    assert (kept.exit_code, kept.changed) == (0, []), kept.stderr[-3000:]

    ran, receipts = jobs_run(guest), guest.run("stat -c '%n %Y %i' /srv/spark/*/*/receipt.json")
    fleet.site.choose(profile="v2")
    switch = fleet.site.deploy("--limit", guest.name)

    assert switch.exit_code == 0, switch.stderr[-3000:]
    assert f"Serve | Serve the release on {guest.name}" in switch.changed
    assert guest.release() != serving
    assert jobs_run(guest) == ran
    assert guest.run("stat -c '%n %Y %i' /srv/spark/*/*/receipt.json") == receipts
    fleet.settle()
    fleet.site.deploy().must_have_changed_nothing()
