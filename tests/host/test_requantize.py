"""An INT4 tree of one's own: real AutoRound in the real engine's container, killed and finished.

It is the base of a hybrid that the real engine serves, and another host takes it from the first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.model.lessons import facts, render
from tests.labkit import CHECKOUT, SPARE, Site, guest_named, lab

pytestmark = pytest.mark.engine

NAME, OTHER = SPARE
CATALOG = CHECKOUT / "catalog/models/lab-tiny.yml"
# Eight rows are too few for AutoRound, which leaves such a projection as it is.
NARROW = ".linear_attn.{in_proj_qkv,in_proj_z,in_proj_a,in_proj_b,out_proj}."


def own_model() -> dict[str, Any]:
    """Return what an owner writes: the model's file with a 16-bit repository and other sets."""
    tensors = yaml.safe_load(CATALOG.read_text())["tensors"]
    base, counts = tensors["base"], tensors["counts"]
    [line] = [one for one in base if NARROW in one]
    layers = line.partition(".linear_attn.")[0]
    kept = f"{layers}.linear_attn.{{in_proj_a,in_proj_b}}.weight"
    packed = line.replace("in_proj_a,in_proj_b,", "")
    names = [one for one in base if one != line]
    # What the base has in 16 bits is the donor's partner there.
    unmatched = [one for one in tensors["donor_unmatched"] if "in_proj_a" not in one]
    return {
        "based_on": "lab-tiny",
        "summary": "The lab's model, quantised by its owner",
        "choose_when": "you try that in the lab",
        "sources": {"original": "lab/tiny"},
        "tensors": {
            "base": [*names, packed, kept],
            "donor_unmatched": unmatched,
            # Two projections of three layers: one name each, not three, and partners in the donor.
            "counts": {
                "base": counts["base"] - 12,
                "donor_unmatched": counts["donor_unmatched"] - 6,
            },
        },
    }


def texts() -> str:
    """Return the questions that the model was trained on, with their answers."""
    asked = facts()["questions"] * 8
    rows = [
        render([{"role": "user", "content": one["prompt"]}], thinking=False) + one["answer"]
        for one in asked
    ]
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    lab("up", NAME, OTHER, "--fresh", "--engine", "cpu")
    made = Site(tmp_path_factory.mktemp("requantize"), hosts=[NAME])
    models = made.root / "catalog/models"
    models.mkdir(parents=True)
    (models / "lab-own.yml").write_text(yaml.safe_dump(own_model()))
    (made.root / "text.jsonl").write_text(texts())
    made.choose(
        model="lab-own",
        profile="v2",
        requantize={
            "iters": 2, "nsamples": 8, "seqlen": 64, "batch": 4, "calibration": "text.jsonl",
        },
    )  # fmt: skip
    return made


def requantize(site: Site) -> subprocess.CompletedProcess[str]:
    inventory = str(site.root / "inventory/lab.py")
    words = ["add", "lab-own", "--requantize", "--on", NAME, "--inventory", inventory, "-y", "-v"]
    return subprocess.run(
        [sys.executable, "-m", "spark_deploy", *words],
        cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip


def notes(name: str) -> list[str]:
    """Return the blocks that AutoRound says are done, of a tree under way."""
    path = "/srv/spark/models/.*.partial/resume/group_0/resume_manifest.json"
    told = guest_named(name).run(f"cat {path} 2>/dev/null || :")
    return json.loads(told)["completed_blocks"] if told else []


def test_a_killed_job_goes_on_with_the_block_it_was_at_and_its_tree_is_proven(site: Site) -> None:
    guest = guest_named(NAME)
    ended: list[subprocess.CompletedProcess[str]] = []
    first = threading.Thread(target=lambda: ended.append(requantize(site)))
    first.start()
    deadline = time.monotonic() + 1200
    while len(notes(NAME)) < 2 and first.is_alive():
        assert time.monotonic() < deadline
        time.sleep(1)
    done = notes(NAME)
    guest.run("docker kill $(docker ps -q --filter name=spark-requantize)")
    first.join(timeout=300)
    assert len(done) >= 2, ended[0].stderr[-4000:]
    assert ended[0].returncode != 0
    assert "of 4 blocks are done" in ended[0].stderr + ended[0].stdout

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


def test_a_hybrid_on_top_of_it_is_served_by_the_real_engine(site: Site) -> None:
    guest = guest_named(NAME)
    site.choose(checkpoint={"requantized": True})
    run = site.deploy()
    assert run.exit_code == 0, run.stderr[-6000:]
    proof = guest.json(f"cat /var/lib/spark/proofs/{guest.release()}.json")
    assert proof["ok"], proof
    status, body = guest.call(
        "POST", "/v1/chat/completions",
        {
            "model": guest.names()[0], "temperature": 0, "max_tokens": 32,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )  # fmt: skip
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Paris")
    site.deploy().must_have_changed_nothing()


def test_another_host_copies_the_tree_and_nothing_of_the_original(site: Site) -> None:
    site.hosts = [NAME, OTHER]
    run = site.deploy()
    assert run.exit_code == 0, run.stderr[-6000:]
    first, other = guest_named(NAME), guest_named(OTHER)
    [tree] = first.run("ls -d /srv/spark/models/lab-own-int4-*").split()
    sums = f"cd {tree}; sha256sum *.safetensors"
    assert other.run(sums) == first.run(sums)
    assert other.run("ls /srv/spark/sources 2>/dev/null || :") == ""
    assert "copied from" in other.run("journalctl -o cat -u 'spark-job@*'")
