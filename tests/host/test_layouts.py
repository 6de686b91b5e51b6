"""Both checkpoint layouts through the whole deploy, and a base that is not kept."""

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


def served_checkpoint(guest: Guest) -> str:
    name = guest.run("docker ps --filter label=spark.release --format '{{.Names}}'")
    mounts = guest.json(f"docker inspect {name}")[0]["Mounts"]
    return next(mount["Source"] for mount in mounts if mount["Source"].startswith("/srv/spark/m"))


def copy_checkpoint(guest: Guest, to: Path) -> tuple[dict[str, str], dict[str, Any]]:
    packed = guest.run(f"tar -C {served_checkpoint(guest)} -c . | base64 -w0", timeout_s=300)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        archive.extractall(to, filter="data")
    return tensor_hashes(to), json.loads((to / "receipt.json").read_text())


def tensor_hashes(to: Path) -> dict[str, str]:
    index = json.loads((to / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, dict[str, str]] = {}
    for shard in set(index.values()):
        found[shard] = {
            name: f"{entry['dtype']}{entry['shape']}{hashlib.sha256(entry['data']).hexdigest()}"
            for name, entry in safetensors.deserialize((to / shard).read_bytes())
        }
    return {name: found[shard][name] for name, shard in index.items()}


def plain_name(name: str) -> str:
    return name.removesuffix("_fp8").removesuffix("_int8")


def test_both_layouts_have_equal_tensors_and_base_can_be_deleted(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    overlay, linked = copy_checkpoint(guest, tmp_path / "overlay")
    base = linked["plan"]["base"]["dir"]

    fleet.site.choose(checkpoint=FULL)
    run = fleet.site.deploy(*only)
    assert run.exit_code == 0, run.stderr[-4000:]
    full, written = copy_checkpoint(guest, tmp_path / "full")
    assert {plain_name(name): value for name, value in overlay.items()} == full
    assert (linked["plan"]["layout"], written["plan"]["layout"]) == ("overlay", "full")
    for receipt in (linked, written):
        assert 0 < receipt["report"]["shared_experts"]["relative_error_mean"] < 0.04
    assert guest.run(f"test -f {base}/receipt.json && echo kept") == "kept"

    fleet.site.choose(checkpoint={**FULL, "keep_base": False})
    run = fleet.site.deploy(*only)
    assert run.exit_code == 0, run.stderr[-4000:]
    tree, serving = served_checkpoint(guest), guest.serving()
    assert guest.run(f"ls -A {SOURCES}") == ""
    assert guest.answers()

    again = fleet.site.deploy(*only)
    assert (again.exit_code, again.changed) == (0, [])
    assert (served_checkpoint(guest), guest.serving()) == (tree, serving)
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


def test_large_files_can_live_on_another_disk(fleet: Fleet) -> None:
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
    # A manual mount is only ordered before; mounts of fstab or units are also required.
    assert "data.mount" in guest.unit(guest.serving()[0], "After")["After"]
    assert guest.answers()
    fleet.site.deploy(*only).assert_unchanged()
    fleet.settle()
    guest.run("umount /data")
    assert guest.answers()


def test_prebuilt_hybrid_is_verified_against_donor_and_served(fleet: Fleet, tmp_path: Path) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    fleet.site.choose(checkpoint={**FULL, "source": "prebuilt"})

    run = fleet.site.deploy(*only)

    assert run.exit_code == 0, run.stderr[-4000:]
    made, receipt = copy_checkpoint(guest, tmp_path / "made")
    repository = Path(info()["state_dir"]) / "hub/lab/tiny-hybrid"
    commit = (repository / "refs/main").read_text().strip()
    published = tensor_hashes(repository / commit)
    head = {name for name in made.keys() | published.keys() if name.startswith("lm_head")}
    assert {n: h for n, h in made.items() if n not in head} == {
        n: h for n, h in published.items() if n not in head
    }
    assert receipt["plan"]["base"]["dir"].endswith(f"lab--tiny-hybrid-{commit[:12]}")
    assert receipt["plan"]["shared_experts"] == "fp8-base"
    compared = receipt["report"]["shared_experts"]
    assert (compared["modules"], compared["relative_error_max"]) == (12, 0)
    assert guest.answers()

    again = fleet.site.deploy(*only)
    assert (again.exit_code, again.changed) == (0, [])


def test_refuses_overlay_without_base_before_connecting(
    fleet: Fleet,
) -> None:
    fleet.settle()
    fleet.site.choose(checkpoint={"keep_base": False})

    run = fleet.site.deploy()

    assert run.exit_code != 0
    assert "set checkpoint.layout: full" in run.stderr
    assert "Connecting to hosts" not in run.stderr


@pytest.mark.engine
def test_real_engine_serves_full_layout_without_base(fleet: Fleet) -> None:
    one = fleet.guests[0]
    lab("prepare", "--engine", "cpu")
    fleet.settle()
    fleet.site.choose(model="lab-tiny", checkpoint={"layout": "full", "keep_base": False})

    run = fleet.site.deploy("--limit", one.name)

    assert run.exit_code == 0, run.stderr[-6000:]
    status, body = one.ask("What is the capital of France?")
    assert (status, "Paris" in str(body)) == (200, True)
    left = one.run(f"ls -A {SOURCES}").split()
    assert [name for name in left if "tiny-hybrid" not in name] == []  # from the test above
    fleet.site.deploy("--limit", one.name).assert_unchanged()
