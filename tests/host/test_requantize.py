import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from lab.model.lessons import facts, render
from tests.labkit import CAPITAL, CHECKOUT, SPARE, Site, guest_named, lab
from tests.published import chat

pytestmark = pytest.mark.engine

NAME, OTHER = SPARE
CATALOG = CHECKOUT / "catalog/models/lab-tiny.yml"
# AutoRound skips projections with only eight rows.
NARROW = ".linear_attn.{in_proj_qkv,in_proj_z,in_proj_a,in_proj_b,out_proj}."


def own_model():
    tensors = yaml.safe_load(CATALOG.read_text())["tensors"]
    base, counts = tensors["base"], tensors["counts"]
    [line] = [name for name in base if NARROW in name]
    layers = line.partition(".linear_attn.")[0]
    kept = f"{layers}.linear_attn.{{in_proj_a,in_proj_b}}.weight"
    packed = line.replace("in_proj_a,in_proj_b,", "")
    names = [name for name in base if name != line]
    # Tensors that the base has in 16 bits match those of the FP8 source.
    unmatched = [name for name in tensors["donor_unmatched"] if "in_proj_a" not in name]
    return {
        "based_on": "lab-tiny",
        "summary": "The lab's model, quantised by its owner",
        "choose_when": "you try that in the lab",
        "sources": {"original": "lab/tiny"},
        "tensors": {
            "base": [*names, packed, kept],
            "donor_unmatched": unmatched,
            # Two projections of three layers share a name instead of three.
            "counts": {
                "base": counts["base"] - 12,
                "donor_unmatched": counts["donor_unmatched"] - 6,
            },
        },
    }


def calibration_text():
    rows = [
        render([{"role": "user", "content": item["prompt"]}], thinking=False) + item["answer"]
        for item in facts()["questions"] * 8
    ]
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    lab("up", NAME, OTHER, "--fresh", "--engine", "cpu")
    site = Site(tmp_path_factory.mktemp("requantize"), hosts=[NAME])
    models = site.root / "catalog/models"
    models.mkdir(parents=True)
    (models / "lab-own.yml").write_text(yaml.safe_dump(own_model()))
    (site.root / "text.jsonl").write_text(calibration_text())
    site.choose(
        model="lab-own",
        profile="v2",
        requantize={
            "iters": 2, "nsamples": 8, "seqlen": 64, "batch": 4, "calibration": "text.jsonl",
        },
    )  # fmt: skip
    return site


def requantize(site):
    inventory = str(site.root / "inventory/lab.py")
    args = ["add", "lab-own", "--requantize", "--on", NAME, "--inventory", inventory, "-y", "-v"]
    return subprocess.run(
        [sys.executable, "-m", "spark_deploy", *args],
        cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip


def completed_blocks(name):
    path = "/srv/spark/models/.*.partial/resume/group_0/resume_manifest.json"
    text = guest_named(name).run(f"cat {path} 2>/dev/null || :")
    return json.loads(text)["completed_blocks"] if text else []


def test_killed_requantize_job_resumes_after_its_last_block(site):
    guest = guest_named(NAME)
    results: list[subprocess.CompletedProcess[str]] = []
    first = threading.Thread(target=lambda: results.append(requantize(site)))
    first.start()
    deadline = time.monotonic() + 1200
    while len(completed_blocks(NAME)) < 2 and first.is_alive():
        assert time.monotonic() < deadline
        time.sleep(1)
    done = completed_blocks(NAME)
    guest.run("docker kill $(docker ps -q --filter name=spark-requantize)")
    first.join(timeout=300)
    assert len(done) >= 2, results[0].stderr[-4000:]
    assert results[0].returncode != 0

    again = requantize(site)
    assert again.returncode == 0, again.stderr[-4000:]
    log = guest.run("journalctl -o cat -u 'spark-job@*' | grep ResumeState || :")
    assert f"resuming after {len(done)}/4" in log
    [tree] = guest.run("ls -d /srv/spark/models/lab-own-int4-*").split()
    receipt = guest.json(f"cat {tree}/receipt.json")
    assert receipt["kind"] == "requantized"
    assert receipt["report"]["versions"]["auto-round"] == "0.16.1"
    assert receipt["report"]["packed_modules"] == 109
    assert guest.run(f"ls -d {Path(tree).parent}/.*.partial 2>/dev/null || :") == ""


def test_real_engine_serves_hybrid_built_on_requantized_base(site):
    guest = guest_named(NAME)
    site.choose(checkpoint={"source": "requantized"})
    site.deploy().assert_succeeded()
    assert guest.proof()["ok"]
    assert chat(guest, CAPITAL) == (200, "Paris")
    site.deploy().assert_unchanged()


def test_peer_copies_requantized_checkpoint_without_the_original(site):
    site.hosts = [NAME, OTHER]
    site.deploy().assert_succeeded()
    first, other = guest_named(NAME), guest_named(OTHER)
    [tree] = first.run("ls -d /srv/spark/models/lab-own-int4-*").split()
    sums = f"cd {tree}; sha256sum *.safetensors"
    assert other.run(sums) == first.run(sums)
    assert other.run("ls /srv/spark/sources 2>/dev/null || :") == ""
    assert "copied from" in other.run("journalctl -o cat -u 'spark-job@*'")
