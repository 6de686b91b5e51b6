"""Quantising on a host: what is let into AutoRound's container, and what is taken from it.

Docker is a script here, which has a ready tree beside it and behaves as told; AutoRound itself runs
in the lab (tests/host/test_requantize.py).
"""

import dataclasses
import json
import os
import shutil
import stat
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builder_hub import fetch_order

from lab.model import original, repository, rounding, vocabulary
from lab.model.safetensors import Tensors, write_model
from lab.model.shape import TINY
from tests import forked
from tests.host.test_requantize import own_model
from tests.host.test_requantize_drafter import small_drafter
from tests.unit.planning.plans import shipped_catalog

ROOT = Path(__file__).parents[3]
BASE = own_model()["tensors"]["base"]
MTP = shipped_catalog().model("lab-tiny").tensors.mtp
SMALL_MTP = small_drafter()["tensors"]["mtp"]
# Eight rows, which AutoRound leaves as they are.
NARROW = ("in_proj_a.weight", "in_proj_b.weight")
DOCKER = """#!/bin/sh
echo "$@" >> {root}/asked
[ "$1" = run ] || exit 0
for word in "$@"; do case $word in
  type=bind,source=*,target=/work) work=${{word#type=bind,source=}}; work=${{work%,target=/work}};;
esac; done
. {root}/behave
"""
WHOLE = """
cp -r {root}/ready $work/made/tree
echo '{{"tree": "tree", "versions": {{"auto-round": "0"}}}}' > $work/done.json
"""
HALF = """
mkdir -p $work/resume/group_0 $work/made/tree
: > $work/made/tree/model-shard-00001.safetensors
echo '{{"completed_blocks": ["a", "b"]}}' > $work/resume/group_0/resume_manifest.json
exit 137
"""


@cache
def drawn():
    """Return weights and a tokenizer, made once: nobody changes them."""
    return original.random_weights(TINY, 3), vocabulary.train(TINY.vocabulary)


def is_packed(name, drafter=False):
    """Whether AutoRound packs a weight by the sets of an owner's model."""
    if drafter and name.startswith("mtp.layers."):
        return ".experts." in name or (".self_attn." in name and name.endswith("_proj.weight"))
    return original.is_int4(name) and not name.endswith(NARROW)


@cache
def packed_tree(drafter):
    """Return the tensors of the tree that a container makes, made once: nobody changes them."""
    tensors = {}
    for name, one in drawn()[0].items():
        if is_packed(name, drafter):
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": said for part, said in rounding.int4(one).items()}
        elif name.endswith(NARROW):
            tensors[name] = rounding.bf16(one)
        else:
            tensors |= repository.int4_tensors({name: one})
    return tensors


class Bench:
    """A 16-bit tree, the INT4 tree that a container would make of it, and the order."""

    def __init__(self, root):
        self.root, self.out = root, root / "models" / "tiny-int4-123456789012"
        self.weights, tokenizer = drawn()
        repository.write_plain(root / "published", TINY, self.weights, tokenizer)
        repository.write_int4(root / "ready", TINY, self.weights, tokenizer, "")
        self.rewrite(lambda tensors: None)
        for name in ("models", "sources", "bin", "packages"):
            (root / name).mkdir()
        docker = root / "bin" / "docker"
        docker.write_text(DOCKER.format(root=root))
        docker.chmod(0o755)
        (root / "text.jsonl").write_text('{"text": "a"}\n')
        proof = {"schema_version": 1, "key": {}, "docker_arguments": ["--gpus=all"], "gpu": "x"}
        (root / "gpu.json").write_text(json.dumps(proof))
        self.behave(WHOLE)

    def behave(self, script):
        (self.root / "behave").write_text(script.format(root=self.root))

    def order(self, **changes):
        published = self.root / "published"
        fetched = fetch_order(
            published, self.root / "sources/tiny-cccccccccccc", [], look_in=[str(published)]
        )
        return {
            "schema_version": 1, "digest": "1" * 64, "name": "tiny", "original": fetched,
            "base_tensors": BASE, "mtp_tensors": MTP, "layers": TINY.layers,
            "image": "engine:1", "packages": str(self.root / "packages"),
            "calibration": str(self.root / "text.jsonl"), "gpu": str(self.root / "gpu.json"),
            "iters": 1, "nsamples": 2, "seqlen": 16, "batch": 1, "memory_bytes": 1,
            "work_bytes": 1000, "out": str(self.out), **changes,
        }  # fmt: skip

    def run(self, **changes):
        path = self.root / "requantize.json"
        path.write_text(json.dumps(self.order(**changes)))
        return tool("requantize", path, path=self.root / "bin")

    def publish_in_one_tensor(self, experts):
        """Have the 16-bit repository hold a layer's experts as newer ones do."""
        weights = {n: one for n, one in self.weights.items() if not n.startswith(experts)}
        of = [[self.weights[f"{experts}.{n}.{part}_proj.weight"] for part in ("gate", "up", "down")]
              for n in range(TINY.experts)]  # fmt: skip
        weights[f"{experts}.gate_up_proj"] = np.stack([np.concatenate(one[:2]) for one in of])
        weights[f"{experts}.down_proj"] = np.stack([one[2] for one in of])
        shutil.rmtree(self.root / "published")
        repository.write_plain(self.root / "published", TINY, weights, drawn()[1])

    def asked(self):
        log = self.root / "asked"
        return log.read_text().splitlines() if log.exists() else []

    def rewrite(self, change, drafter=False):
        """Have the container make another tree: ``change`` edits its tensors."""
        tensors: Tensors = dict(packed_tree(drafter))
        change(tensors)
        for shard in (self.root / "ready").glob("*.safetensors*"):
            shard.unlink()
        write_model(self.root / "ready", tensors, {}, 2_000_000)


def tool(*arguments, path=None):
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else os.environ
    words = ("spark_checkpoint", *arguments)
    done = forked.run(words, cwd=ROOT, env=env, ready=forked.BUILDER)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_tree_is_made_proven_and_made_once(bench):
    made = bench.run()
    assert made.returncode == 0, made.stderr
    receipt = json.loads((bench.out / "receipt.json").read_text())
    assert (receipt["kind"], receipt["digest"]) == ("requantized", "1" * 64)
    assert receipt["report"]["packed_modules"] == sum(map(is_packed, bench.weights))
    assert 0.05 < receipt["report"]["error"]["worst"] < 0.2
    assert {file["path"] for file in receipt["files"]} == {
        path.name for path in bench.out.iterdir() if path.name != "receipt.json"
    }
    assert {path.stat().st_nlink for path in bench.out.iterdir()} == {1}
    assert tool("verify", bench.out, "--full").returncode == 0
    assert [path.name for path in bench.out.parent.iterdir()] == [bench.out.name]

    [run] = [line for line in bench.asked() if line.startswith("run ")]
    assert "--network none" in run
    assert "--gpus=all" in run
    assert bench.run().returncode == 0
    assert len(bench.asked()) == 2  # the removal of a leftover, and the one run


def test_the_container_is_told_exactly_which_modules_to_pack(bench):
    bench.behave("cp $work/order.json {root}/told" + WHOLE)
    assert bench.run().returncode == 0
    told = json.loads((bench.root / "told").read_text())["int4"]
    assert set(told) == {name.removesuffix(".weight") for name in bench.weights if is_packed(name)}


def test_a_drafter_in_int4_is_packed_but_for_what_its_sets_keep_and_held_against_its_weights(
    bench,
):
    bench.rewrite(lambda tensors: None, drafter=True)
    bench.behave("cp $work/order.json {root}/told" + WHOLE)
    made = bench.run(mtp_tensors=SMALL_MTP)
    assert made.returncode == 0, made.stderr
    told = json.loads((bench.root / "told").read_text())
    drafter = {name.removesuffix(".weight") for name in bench.weights if name.startswith("mtp.")}
    packed = {name for name in drafter if is_packed(f"{name}.weight", drafter=True)}
    assert len(packed) == 28
    assert {name for name in told["int4"] if name.startswith("mtp.")} == packed
    assert set(told["drafter_kept"]) == {n for n in drafter - packed if "norm" not in n}
    report = json.loads((bench.out / "receipt.json").read_text())["report"]
    assert report["packed_modules"] == 109 + 28
    said = json.loads((bench.out / "config.json").read_text())["quantization_config"]
    assert said["block_name_to_quantize"] == "model.language_model.layers,mtp.layers"
    assert said["extra_config"]["mtp.layers.0.mlp.shared_expert.up_proj"]["bits"] == 16
    beside = json.loads((bench.out / "quantization_config.json").read_text())
    assert beside["block_name_to_quantize"] == said["block_name_to_quantize"]


def test_a_drafter_in_16_bits_is_none_of_the_packed_blocks(bench):
    assert bench.run().returncode == 0
    said = json.loads((bench.out / "config.json").read_text())["quantization_config"]
    assert said["block_name_to_quantize"] == "model.language_model.layers"


def test_a_drafter_whose_packed_experts_took_each_other_s_place_is_refused(bench):
    bench.rewrite(lambda tensors: swapped(tensors, "mtp.layers.0.mlp.experts.3"), drafter=True)
    refused = bench.run(mtp_tensors=SMALL_MTP)
    assert refused.returncode == 3
    assert "mtp.layers.0.mlp.experts.3" in refused.stderr
    assert "differs from the original's weight by 14" in refused.stderr
    assert not bench.out.exists()


def test_what_autoround_would_leave_in_16_bits_is_refused_before_hours_of_work(bench):
    refused = bench.run(mtp_tensors=[*MTP, "mtp.fc.{qweight,qzeros,scales}"])
    assert refused.returncode == 3
    assert "mtp.fc: must be packed, but AutoRound leaves it in 16 bits" in refused.stderr
    assert bench.asked() == []


def test_a_drafter_s_experts_are_held_against_the_one_tensor_they_lay_in(bench):
    experts = "mtp.layers.0.mlp.experts"
    bench.publish_in_one_tensor(experts)
    wrong, right = f"{experts}.5.up_proj.weight", f"{experts}.5.gate_proj.weight"
    bench.rewrite(lambda tensors: tensors.update({wrong: tensors[right]}))
    refused = bench.run()
    assert refused.returncode == 3
    assert wrong in refused.stderr
    assert "differs from the original" in refused.stderr


def swapped(tensors, expert="model.language_model.layers.1.mlp.experts.3"):
    one, other = f"{expert}.gate_proj", f"{expert}.up_proj"
    for part in ("qweight", "scales", "qzeros"):
        a, b = f"{one}.{part}", f"{other}.{part}"
        tensors[a], tensors[b] = tensors[b], tensors[a]


def touched(tensors):
    name = "model.language_model.layers.2.mlp.gate.weight"
    data = tensors[name].data
    tensors[name] = dataclasses.replace(tensors[name], data=bytes([data[0] ^ 1]) + data[1:])


def lost(tensors):
    del tensors["mtp.fc.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "differs from the original's weight by 14"),
        (touched, "differs from the original"),
        (lost, "missing 1"),
    ],
)
def test_a_tree_that_is_not_the_originals_rounded_is_refused(bench, change, said):
    bench.rewrite(change)
    refused = bench.run()
    assert refused.returncode == 3
    assert said in refused.stderr
    assert not bench.out.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_bytes": 1 << 60}, "bytes of memory"),
        ({"work_bytes": 1 << 60}, "are free"),
        ({"packages": "/nowhere"}, "is missing: AutoRound"),
    ],
)
def test_without_the_means_no_container_is_started(bench, changes, said):
    refused = bench.run(**changes)
    assert refused.returncode == 3
    assert said in refused.stderr
    assert not any(line.startswith("run ") for line in bench.asked())


def test_a_tree_that_is_quantised_already_is_refused(bench):
    config = json.loads((bench.root / "published/config.json").read_text())
    config["quantization_config"] = {"bits": 4}
    (bench.root / "published/config.json").write_text(json.dumps(config))
    refused = bench.run()
    assert refused.returncode == 3
    assert "is quantised already" in refused.stderr


def test_what_is_taken_is_roots_alone_to_write(bench):
    bench.behave("umask 0" + WHOLE + "chmod 666 $work/made/tree/*")
    assert bench.run().returncode == 0
    modes = {stat.S_IMODE(path.stat().st_mode) for path in bench.out.iterdir()}
    assert modes == {0o644}
