import base64
import hashlib
import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import safetensors
from tokenizers import Tokenizer

from tests.labkit import info, lab

FULL = {"layout": "full", "keep_base": True}
SOURCES = "/srv/spark/sources"


def served_checkpoint(guest):
    mounts = guest.container()["Mounts"]
    sources = [str(mount["Source"]) for mount in mounts]
    return next(path for path in sources if path.startswith("/srv/spark/m"))


def copy_checkpoint(guest, to):
    packed = guest.run(f"tar -C {served_checkpoint(guest)} -c . | base64 -w0", timeout_s=300)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        archive.extractall(to, filter="data")
    return tensor_hashes(to), json.loads((to / "receipt.json").read_text())


def tensor_hashes(to):
    index = json.loads((to / "model.safetensors.index.json").read_text())["weight_map"]
    hashes: dict[str, dict[str, str]] = {}
    for shard in set(index.values()):
        hashes[shard] = {
            name: f"{entry['dtype']}{entry['shape']}{hashlib.sha256(entry['data']).hexdigest()}"
            for name, entry in safetensors.deserialize((to / shard).read_bytes())
        }
    return {name: hashes[shard][name] for name, shard in index.items()}


def repositories(guest):
    names = guest.run(f"ls -A {SOURCES}").split()
    return [name for name in names if not name.startswith("image--")]


def plain_name(name):
    return name.removesuffix("_fp8").removesuffix("_int8")


def test_full_layout_equals_the_overlay_and_needs_no_base_checkpoint(fleet, tmp_path):
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    overlay, linked = copy_checkpoint(guest, tmp_path / "overlay")
    base = linked["plan"]["base"]["dir"]

    fleet.site.choose(checkpoint=FULL)
    fleet.site.deploy(*only).assert_succeeded()
    full, written = copy_checkpoint(guest, tmp_path / "full")
    assert {plain_name(name): value for name, value in overlay.items()} == full
    assert (linked["plan"]["layout"], written["plan"]["layout"]) == ("overlay", "full")
    for receipt in (linked, written):
        assert 0 < receipt["report"]["shared_experts"]["relative_error_mean"] < 0.04
    assert guest.run(f"test -f {base}/receipt.json && echo kept") == "kept"

    fleet.site.choose(checkpoint={**FULL, "keep_base": False})
    fleet.site.deploy(*only).assert_succeeded()
    tree, serving = served_checkpoint(guest), guest.serving()
    assert repositories(guest) == []
    assert guest.answers()

    fleet.site.deploy(*only).assert_unchanged()
    assert (served_checkpoint(guest), guest.serving()) == (tree, serving)
    assert repositories(guest) == []

    fleet.site.choose(checkpoint=FULL)
    dry = fleet.site.deploy(*only, dry=True)
    assert str(written["report"]["rebuild_fetch_bytes"]["base"]) in dry.stderr
    assert any("Fetch" in operation for operation in dry.predicted)
    fleet.site.deploy(*only).assert_succeeded()
    assert guest.run(f"test -f {base}/receipt.json && echo kept") == "kept"
    assert guest.serving() == serving


def test_large_files_can_be_stored_on_another_disk(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    guest.run("mkdir -p /data && mount -t tmpfs -o size=4g data /data")
    kinds = ("models", "sources")
    fleet.site.choose(paths={f"{kind}_dir": f"/data/{kind}" for kind in kinds})

    fleet.site.deploy(*only).assert_succeeded()
    mounts = guest.container()["Mounts"]
    used = {mount["Destination"]: mount["Source"] for mount in mounts}
    assert used["/model"].startswith("/data/models/")
    assert guest.run("ls /data/sources/*/receipt.json")
    assert "data.mount" in guest.unit(guest.serving()[0], "After")["After"]
    assert guest.answers()
    fleet.site.deploy(*only).assert_unchanged()
    fleet.settle()
    guest.run("umount /data")
    assert guest.answers()


def test_prebuilt_hybrid_is_verified_against_its_fp8_source_and_served(fleet, tmp_path):
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    fleet.site.choose(checkpoint={**FULL, "source": "prebuilt"})

    fleet.site.deploy(*only).assert_succeeded()
    made, receipt = copy_checkpoint(guest, tmp_path / "made")
    repository = Path(info()["state_dir"]) / "hub/lab/tiny-hybrid"
    commit = (repository / "refs/main").read_text().strip()
    published = tensor_hashes(repository / commit)
    head = {name for name in made.keys() | published.keys() if name.startswith("lm_head")}
    for name in (made.keys() | published.keys()) - head:
        assert made[name] == published[name]
    assert receipt["plan"]["base"]["dir"].endswith(f"lab--tiny-hybrid-{commit[:12]}")
    assert receipt["plan"]["shared_experts"] == "fp8-base"
    compared = receipt["report"]["shared_experts"]
    assert (compared["modules"], compared["relative_error_max"]) == (12, 0)
    assert guest.answers()

    fleet.site.deploy(*only).assert_unchanged()


def test_drafter_picks_from_the_most_frequent_tokens_in_the_owners_text(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    only = ("--limit", guest.name)
    text, engine = fleet.site.root / "answers.txt", {"head": "int8-triton"}
    engine |= {"draft_vocabulary_tokens": 1024, "draft_vocabulary_text": text.name}
    orders = []
    for sentence in ("Paris is the capital of France.\n", "kite.river.88 / zeta 9152 delta\n"):
        text.write_text(sentence * 50)
        fleet.site.choose(engine=engine)
        fleet.site.deploy(*only).assert_succeeded()
        mounts = {mount["Destination"]: mount["Source"] for mount in guest.container()["Mounts"]}
        ids = json.loads(guest.run(f"cat {mounts['/draft-vocabulary']}/token_ids.json"))
        tokenizer = Tokenizer.from_str(guest.run(f"cat {served_checkpoint(guest)}/tokenizer.json"))
        counts = Counter(tokenizer.encode(sentence * 50, add_special_tokens=False).ids)
        ranked = [token for token in ids if token not in tokenizer.get_added_tokens_decoder()]
        assert [counts[token] for token in ranked] == sorted(
            (counts[token] for token in ranked), reverse=True
        )
        assert "/draft-vocabulary/token_ids.json" in " ".join(guest.argv())
        orders.append(ids)
        fleet.site.deploy(*only).assert_unchanged()
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    fleet.settle()


@pytest.mark.engine
def test_real_engine_serves_full_layout_without_base_checkpoint(fleet):
    guest = fleet.guests[0]
    lab("prepare", "--engine", "cpu")
    fleet.settle()
    fleet.site.choose(model="lab-tiny", checkpoint={"layout": "full", "keep_base": False})

    fleet.site.deploy("--limit", guest.name).assert_succeeded()
    assert guest.answers()
    left = [name for name in repositories(guest) if "tiny-hybrid" not in name]
    assert left == []
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
