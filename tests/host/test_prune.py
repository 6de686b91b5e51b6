import re

import pytest

from tests.traces import footprint

PRUNE = "deploys/prune.py"
READY = {"model": "lab-stub", "profile": "v2"}
OLD_IMAGE = "spark-vllm:0123456789ab"
IMAGES = (
    "d=$(mktemp -d); cd $d; head -c 30000000 /dev/urandom > layer; "
    "printf 'FROM scratch\\nCOPY layer /\\n' > Dockerfile; "
    f"docker build -q -t {OLD_IMAGE} --label spark.digest={'0' * 64} .; "
    "head -c 1000 /dev/urandom > layer; docker build -q -t foreign/image:1 .; rm -r $d"
)


def prune(fleet, guest, *, dry=False):
    return fleet.site.deploy("--limit", guest.name, dry=dry, deploy=PRUNE)


def releases(guest):
    return set(guest.run("ls /etc/spark/releases").split())


def trees(guest):
    return guest.run("ls -d /srv/spark/models/* /srv/spark/sources/* 2>/dev/null || :").split()


def job_traces(guest):
    receipts = "stat -c '%n %Y %i' /srv/spark/*/*/receipt.json"
    return guest.run(f"{receipts}; journalctl -o cat -u 'spark-job@*' | wc -l")


@pytest.fixture
def foreign_image_and_model(fleet):
    guest = fleet.guests[0]
    guest.run(IMAGES)
    guest.run("mkdir -p /srv/spark/models/mine && echo mine > /srv/spark/models/mine/file")
    yield
    guest.run("docker rmi foreign/image:1; rm -r /srv/spark/models/mine")


def serve_base_profile(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    fleet.site.choose(profile="base", releases={"keep": 0})
    fleet.site.deploy("--limit", guest.name).assert_succeeded()
    return guest, guest.release()


@pytest.mark.usefixtures("foreign_image_and_model")
def test_prune_removes_items_listed_by_dry_run(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    first = guest.release()
    for profile in ("agent", "v2-tq", "base"):
        fleet.site.choose(profile=profile, releases={"keep": 1})
        fleet.site.deploy("--limit", guest.name).assert_succeeded()
    existing, before = releases(guest), footprint(guest)
    kept = {guest.release(), *guest.json("cat /var/lib/spark/good/main.json")["previous"][:1]}

    dry = prune(fleet, guest, dry=True).assert_succeeded()
    assert dry.predicted == ["Prune | Remove artifacts that no kept release needs"]
    assert footprint(guest) == before
    removed = set(re.findall(r"remove .* release (\S+)", dry.stderr))
    assert removed == existing - kept
    assert first in removed
    assert re.search(rf"remove .* image {OLD_IMAGE}", dry.stderr)
    removed_trees = re.findall(r"remove .* (?:tree|source) +(\S+)", dry.stderr)
    assert all("/image--" in path for path in removed_trees), dry.stderr

    needed_trees = sorted(set(trees(guest)) - set(removed_trees))
    prune(fleet, guest).assert_succeeded()
    assert (releases(guest), sorted(trees(guest))) == (kept, needed_trees)
    assert guest.run(f"docker images -q {OLD_IMAGE}") == ""
    assert guest.run("docker images -q foreign/image:1") != ""
    assert guest.answers()
    prune(fleet, guest).assert_unchanged()
    fleet.site.deploy("--limit", guest.name).assert_unchanged()


def test_prune_removes_unneeded_checkpoint(fleet):
    guest, serving = serve_base_profile(fleet)
    tree = guest.run("ls -d /srv/spark/models/lab-*")
    free = int(guest.run("df --output=avail -B1 /srv/spark | tail -1"))

    dry = prune(fleet, guest, dry=True)
    run = prune(fleet, guest)

    assert f"tree {tree}" in dry.stderr
    assert run.exit_code == 0, run.stderr[-3000:]
    assert releases(guest) == {serving}
    assert guest.run("ls -A /srv/spark/models") == ""
    assert int(guest.run("sync; df --output=avail -B1 /srv/spark | tail -1")) > free
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
    fleet.settle()
    assert guest.answers()


def test_rollout_of_a_model_kept_ready_downloads_and_builds_nothing(fleet):
    guest, serving = serve_base_profile(fleet)
    prune(fleet, guest).assert_succeeded()
    before = guest.invocation()
    fleet.site.choose(keep_ready=[READY])

    prepared = fleet.site.deploy("--limit", guest.name).assert_succeeded()
    assert "Ready | Wait for the other models" in prepared.changed
    assert not [name for name in prepared.changed if name.startswith("Serve")]
    assert guest.invocation() == before
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
    prune(fleet, guest).assert_unchanged()

    before = job_traces(guest)
    fleet.site.choose(profile="v2")
    switch = fleet.site.deploy("--limit", guest.name).assert_succeeded()
    assert f"Serve | Serve the release on {guest.name}" in switch.changed
    assert guest.release() != serving
    assert job_traces(guest) == before
    fleet.settle()
    fleet.site.deploy().assert_unchanged()
