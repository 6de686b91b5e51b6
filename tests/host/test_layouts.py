"""Both layouts of the checkpoint through the whole deploy, and the base that is not kept."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import safetensors

from tests.host.conftest import Fleet
from tests.labkit import Guest, info, lab

FULL = {"layout": "full", "keep_base": True}
SOURCES = "/srv/spark/sources"


def tree_of(guest: Guest) -> str:
    """Return the directory that the serving engine's container has mounted."""
    name = guest.run("docker ps --filter label=spark.release --format '{{.Names}}'")
    mounts = guest.json(f"docker inspect {name}")[0]["Mounts"]
    return next(mount["Source"] for mount in mounts if mount["Source"].startswith("/srv/spark/m"))


def tensors_of(guest: Guest, to: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Copy the served tree; return a hash for every name of its index, and its receipt."""
    packed = guest.run(f"tar -C {tree_of(guest)} -c . | base64 -w0", timeout_s=300)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        archive.extractall(to, filter="data")
    return hashes_of(to), json.loads((to / "receipt.json").read_text())


def hashes_of(to: Path) -> dict[str, str]:
    """Return a hash for every name of a tree's index."""
    index = json.loads((to / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, dict[str, str]] = {}
    for shard in set(index.values()):
        found[shard] = {
            name: f"{entry['dtype']}{entry['shape']}{hashlib.sha256(entry['data']).hexdigest()}"
            for name, entry in safetensors.deserialize((to / shard).read_bytes())
        }
    return {name: found[shard][name] for name, shard in index.items()}


def plain_name(name: str) -> str:
    """Return what a tensor of an overlay is called in a full tree."""
    return name.removesuffix("_fp8").removesuffix("_int8")


def test_a_host_builds_both_layouts_alike_and_can_let_the_base_go(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    overlay, linked = tensors_of(guest, tmp_path / "overlay")
    base = linked["plan"]["base"]["dir"]

    fleet.site.choose(checkpoint=FULL)
    run = fleet.site.deploy(*only)
    assert run.exit_code == 0, run.stderr[-4000:]
    full, written = tensors_of(guest, tmp_path / "full")
    assert {plain_name(name): value for name, value in overlay.items()} == full
    assert (linked["plan"]["layout"], written["plan"]["layout"]) == ("overlay", "full")
    for receipt in (linked, written):
        assert 0 < receipt["report"]["shared_experts"]["relative_error_mean"] < 0.04
    assert guest.run(f"test -f {base}/receipt.json && echo kept") == "kept"

    fleet.site.choose(checkpoint={**FULL, "keep_base": False})
    run = fleet.site.deploy(*only)
    assert run.exit_code == 0, run.stderr[-4000:]
    tree, serving = tree_of(guest), guest.serving()
    assert guest.run(f"ls -A {SOURCES}") == ""
    assert guest.ask("What is the capital of France?")[0] == 200

    again = fleet.site.deploy(*only)
    assert (again.exit_code, again.changed) == (0, [])
    assert (tree_of(guest), guest.serving()) == (tree, serving)
    assert guest.run(f"ls -A {SOURCES}") == ""

    fleet.site.choose(checkpoint=FULL)
    told = fleet.site.deploy(*only, dry=True)
    fetched = written["report"]["rebuild_fetch_bytes"]["base"]
    assert f"not on this host, {fetched} bytes to fetch" in told.stderr
    assert any("Fetch" in operation for operation in told.predicted)
    back = fleet.site.deploy(*only)
    assert back.exit_code == 0, back.stderr[-4000:]
    assert guest.run(f"test -f {base}/receipt.json && echo kept") == "kept"
    assert guest.serving() == serving


def test_all_that_is_large_can_live_on_another_disk(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    guest.run("mkdir -p /data && mount -t tmpfs -o size=4g data /data")
    kinds = ("models", "sources", "cache")
    fleet.site.choose(paths={f"{kind}_dir": f"/data/{kind}" for kind in kinds})

    run = fleet.site.deploy(*only)

    assert run.exit_code == 0, run.stderr[-4000:]
    name = guest.run("docker ps --filter label=spark.release --format '{{.Names}}'")
    mounts = guest.json(f"docker inspect {name}")[0]["Mounts"]
    used = {mount["Destination"]: mount["Source"] for mount in mounts}
    assert used["/model"].startswith("/data/models/")
    assert used["/root/.cache"].startswith("/data/cache/")
    assert guest.run("ls /data/sources/*/receipt.json")
    # Mounted by hand, so only waited for; a mount of fstab or of a unit is required as well.
    assert "data.mount" in guest.unit(guest.serving()[0], "After")["After"]
    assert guest.ask("What is the capital of France?")[0] == 200
    fleet.site.deploy(*only).must_have_changed_nothing()
    fleet.settle()
    guest.run("umount /data")
    assert guest.ask("What is the capital of France?")[0] == 200


def test_a_hybrid_made_by_others_is_proven_by_the_donor_and_served(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    fleet.site.choose(checkpoint={**FULL, "prebuilt": True})

    run = fleet.site.deploy(*only)

    assert run.exit_code == 0, run.stderr[-4000:]
    made, receipt = tensors_of(guest, tmp_path / "made")
    repository = Path(info()["state_dir"]) / "hub/lab/tiny-hybrid"
    commit = (repository / "refs/main").read_text().strip()
    theirs = hashes_of(repository / commit)
    head = {name for name in made.keys() | theirs.keys() if name.startswith("lm_head")}
    assert {n: h for n, h in made.items() if n not in head} == {
        n: h for n, h in theirs.items() if n not in head
    }
    assert receipt["plan"]["base"]["dir"].endswith(f"lab--tiny-hybrid-{commit[:12]}")
    assert receipt["plan"]["shared_experts"] == "fp8-base"
    compared = receipt["report"]["shared_experts"]
    assert (compared["modules"], compared["relative_error_max"]) == (12, 0)
    assert guest.ask("What is the capital of France?")[0] == 200

    again = fleet.site.deploy(*only)
    assert (again.exit_code, again.changed) == (0, [])


def test_an_overlay_that_should_lose_its_base_is_refused_before_any_connection(
    fleet: Fleet,
) -> None:
    fleet.settle()
    fleet.site.choose(checkpoint={"keep_base": False})

    run = fleet.site.deploy()

    assert run.exit_code != 0
    assert "set checkpoint.layout: full" in run.stderr
    assert "Connecting to hosts" not in run.stderr


@pytest.mark.engine
def test_the_real_engine_serves_the_full_tree_without_its_base(fleet: Fleet) -> None:
    one = fleet.guests[0]
    lab("prepare", "--engine", "cpu")
    fleet.settle()
    fleet.site.choose(model="lab-tiny", checkpoint={"layout": "full", "keep_base": False})

    run = fleet.site.deploy("--limit", one.name)

    assert run.exit_code == 0, run.stderr[-6000:]
    status, body = one.ask("What is the capital of France?")
    assert (status, "Paris" in str(body)) == (200, True)
    left = one.run(f"ls -A {SOURCES}").split()
    assert [name for name in left if "tiny-hybrid" not in name] == []  # that one is a test's above
    fleet.site.deploy("--limit", one.name).must_have_changed_nothing()
