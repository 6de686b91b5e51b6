"""Quantize on a host: input of AutoRound's container, and checks of the output.

Docker is a script that copies a prepared checkpoint; AutoRound itself runs in the lab
(tests/host/test_requantize.py).
"""

import dataclasses
import hashlib
import json
import os
import shutil
import stat
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from builder_hub import Hub, fetch_order
from builder_trees import run_tool
from spark_checkpoint import ValidationError, autoround_job
from spark_checkpoint.directory import read_checkpoint
from spark_checkpoint.headers import Header, Tensor
from spark_checkpoint.requantize import (
    check_packable,
    check_prerequisites,
    packed_modules,
    skip_reason,
)
from spark_contract.builder_api import RequantizePlan
from spark_contract.documents import parse
from spark_contract.fetching import partial_dir, partial_tree

from lab.model import original, repository, rounding, vocabulary
from lab.model.safetensors import Tensors, write_model
from lab.model.shape import TINY
from spark_deploy.config.catalog.model import HybridModel
from tests.host.test_requantize import own_model
from tests.host.test_requantize_drafter import small_drafter
from tests.unit.planning.plans import shipped_catalog

pytestmark = pytest.mark.slow

BASE = own_model()["tensors"]["base"]
MTP = shipped_catalog().model("lab-tiny").tensors.mtp
SMALL_MTP = small_drafter()["tensors"]["mtp"]
EXPERTS = "mtp.layers.0.mlp.experts"
NARROW = ("in_proj_a.weight", "in_proj_b.weight")
DOCKER = """#!/bin/sh
echo "$@" >> {root}/calls
[ "$1" = run ] || exit 0
for word in "$@"; do case $word in
  type=bind,source=*,target=/work) work=${{word#type=bind,source=}}; work=${{work%,target=/work}};;
esac; done
. {root}/docker-script
"""
COMPLETE = """
cp -r {root}/ready $work/made/tree
echo '{{"tree": "tree", "versions": {{"auto-round": "0"}}}}' > $work/done.json
"""


@cache
def weights_and_tokenizer():
    return original.random_weights(TINY, 3), vocabulary.train(TINY.vocabulary)


def is_packed(name, packs_drafter=False):
    if packs_drafter and name.startswith("mtp.layers."):
        return ".experts." in name or (".self_attn." in name and name.endswith("_proj.weight"))
    return original.is_int4(name) and not name.endswith(NARROW)


@cache
def packed_tensors(packs_drafter):
    tensors = {}
    for name, weight in weights_and_tokenizer()[0].items():
        if is_packed(name, packs_drafter):
            module = name.removesuffix(".weight")
            parts = rounding.int4(weight).items()
            tensors |= {f"{module}.{part}": tensor for part, tensor in parts}
        elif name.endswith(NARROW):
            tensors[name] = rounding.bf16(weight)
        else:
            tensors |= repository.int4_tensors({name: weight})
    return tensors


class Bench:
    """A 16-bit checkpoint, the container's INT4 result, and the order."""

    def __init__(self, root):
        self.root, self.out = root, root / "models" / "tiny-int4-123456789012"
        self.weights, tokenizer = weights_and_tokenizer()
        repository.write_plain(root / "published", TINY, self.weights, tokenizer)
        repository.write_int4(root / "ready", TINY, self.weights, tokenizer, "")
        self.change_result(lambda tensors: None)
        for name in ("models", "sources", "bin", "packages"):
            (root / name).mkdir()
        docker = root / "bin" / "docker"
        docker.write_text(DOCKER.format(root=root))
        docker.chmod(0o755)
        (root / "text.jsonl").write_text('{"text": "a"}\n')
        proof = {"schema_version": 1, "key": {}, "docker_arguments": ["--gpus=all"], "gpu": "x"}
        (root / "gpu.json").write_text(json.dumps(proof))
        self.set_docker_script("cp $work/order.json {root}/order.json" + COMPLETE)

    def set_docker_script(self, script):
        (self.root / "docker-script").write_text(script.format(root=self.root))

    def run(self, *options, **changes):
        published, source = self.root / "published", self.root / "sources/tiny-cccccccccccc"
        order = {
            "schema_version": 1, "digest": "1" * 64, "name": "tiny",
            "original": fetch_order(published, source, [], look_in=[str(published)]),
            "base_tensors": BASE, "mtp_tensors": MTP, "layers": TINY.layers,
            "image": "engine:1", "packages": str(self.root / "packages"),
            "calibration": str(self.root / "text.jsonl"), "gpu": str(self.root / "gpu.json"),
            "iters": 1, "nsamples": 2, "seqlen": 16, "batch": 1, "memory_bytes": 1,
            "work_bytes": 1000, "out": str(self.out), **changes,
        }  # fmt: skip
        path = self.root / "requantize.json"
        path.write_text(json.dumps(order))
        env = {**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}
        return run_tool("requantize", path, *options, check=False, env=env)

    def refused(self, **changes):
        done = self.run(**changes)
        assert done.returncode == 3, done.stderr
        assert not self.out.exists()
        return done.stderr

    def read(self, name):
        return json.loads((self.out / name).read_text())

    def order(self):
        return json.loads((self.root / "order.json").read_text())

    def fuse_experts(self):
        parts = ("gate", "up", "down")
        experts = [[self.weights[f"{EXPERTS}.{n}.{part}_proj.weight"] for part in parts]
                   for n in range(TINY.experts)]  # fmt: skip
        weights = {
            name: weight for name, weight in self.weights.items() if not name.startswith(EXPERTS)
        }
        weights[f"{EXPERTS}.gate_up_proj"] = np.stack(
            [np.concatenate(expert[:2]) for expert in experts]
        )
        weights[f"{EXPERTS}.down_proj"] = np.stack([expert[2] for expert in experts])
        shutil.rmtree(self.root / "published")
        repository.write_plain(self.root / "published", TINY, weights, weights_and_tokenizer()[1])

    def calls(self):
        log = self.root / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def change_result(self, change, packs_drafter=False):
        tensors: Tensors = dict(packed_tensors(packs_drafter))
        change(tensors)
        for shard in (self.root / "ready").glob("*.safetensors*"):
            shard.unlink()
        write_model(self.root / "ready", tensors, {}, 2_000_000)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.mark.slow
def test_second_quantization_changes_nothing(bench):
    assert bench.run().returncode == 0
    receipt = bench.read("receipt.json")
    assert (receipt["kind"], receipt["digest"]) == ("requantized", "1" * 64)
    packed = {name.removesuffix(".weight") for name in bench.weights if is_packed(name)}
    assert set(bench.order()["int4"]) == packed
    assert receipt["report"]["packed_modules"] == len(packed)
    assert 0.05 < receipt["report"]["error"]["worst"] < 0.2
    present = {path.name for path in bench.out.iterdir() if path.name != "receipt.json"}
    assert {file["path"] for file in receipt["files"]} == present
    assert {path.stat().st_nlink for path in bench.out.iterdir()} == {1}
    assert run_tool("verify", bench.out, "--full").returncode == 0
    assert [path.name for path in bench.out.parent.iterdir()] == [bench.out.name]
    blocks = bench.read("config.json")["quantization_config"]["block_name_to_quantize"]
    assert blocks == "model.language_model.layers"
    [run] = [line for line in bench.calls() if line.startswith("run ")]
    assert "--network none" in run
    assert "--gpus=all" in run
    assert bench.run().returncode == 0
    assert len(bench.calls()) == 2


def test_packs_listed_drafter_modules(bench):
    bench.change_result(lambda tensors: None, packs_drafter=True)
    assert bench.run(mtp_tensors=SMALL_MTP).returncode == 0
    drafter = {name.removesuffix(".weight") for name in bench.weights if name.startswith("mtp.")}
    packed = {name for name in drafter if is_packed(f"{name}.weight", packs_drafter=True)}
    assert len(packed) == 28
    assert {name for name in bench.order()["int4"] if name.startswith("mtp.")} == packed
    kept = {name for name in drafter - packed if "norm" not in name}
    assert set(bench.order()["drafter_kept"]) == kept
    assert bench.read("receipt.json")["report"]["packed_modules"] == 109 + 28
    quantization = bench.read("config.json")["quantization_config"]
    assert quantization["block_name_to_quantize"] == "model.language_model.layers,mtp.layers"
    assert quantization["extra_config"]["mtp.layers.0.mlp.shared_expert.up_proj"]["bits"] == 16
    repeated = bench.read("quantization_config.json")
    assert repeated["block_name_to_quantize"] == quantization["block_name_to_quantize"]


def test_requantize_job_lists_16_bit_drafter_modules(tmp_path):
    config = tmp_path / "config.json"
    listed = {"lm_head": {"bits": 16}}
    config.write_text(json.dumps({"quantization_config": {"extra_config": listed}}))
    autoround_job.configure_drafter(config, ["mtp.fc"])
    per_module = json.loads(config.read_text())["quantization_config"]["extra_config"]
    assert per_module == {**listed, "mtp.fc": {"bits": 16, "data_type": "float"}}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def swap_experts(expert):
    def change(tensors):
        for part in ("qweight", "scales", "qzeros"):
            a, b = f"{expert}.gate_proj.{part}", f"{expert}.up_proj.{part}"
            tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


def flip_bit(tensors):
    name = "model.language_model.layers.2.mlp.gate.weight"
    data = tensors[name].data
    tensors[name] = dataclasses.replace(tensors[name], data=bytes([data[0] ^ 1]) + data[1:])


EXPERT = "model.language_model.layers.1.mlp.experts.3"


@pytest.mark.parametrize(
    ("change", "packs_drafter", "problem"),
    [
        (swap_experts(EXPERT), False, "weights differ from the original model's by 14"),
        pytest.param(swap_experts(f"{EXPERTS}.3"), True, f"{EXPERTS}.3", marks=pytest.mark.slow),
        (flip_bit, False, "differs from the original"),
        (lambda tensors: tensors.pop("mtp.fc.weight"), False, "missing 1"),
    ],
)
def test_rejects_results_that_do_not_match_the_original(bench, change, packs_drafter, problem):
    bench.change_result(change, packs_drafter)
    assert problem in bench.refused(mtp_tensors=SMALL_MTP if packs_drafter else MTP)


@pytest.mark.parametrize(
    ("wrong", "source"),
    [("5.up_proj", "5.gate_proj"), ("1.down_proj", "0.down_proj"), ("3.gate_proj", "0.gate_proj")],
)
def test_rejects_16_bit_experts_that_differ_from_the_fused_tensor(bench, wrong, source):
    bench.fuse_experts()
    wrong, source = (f"{EXPERTS}.{name}.weight" for name in (wrong, source))
    bench.change_result(lambda tensors: tensors.update({wrong: tensors[source]}))
    assert wrong in bench.refused()


def test_requantize_splits_and_packs_fused_experts(bench):
    bench.fuse_experts()
    bench.change_result(lambda tensors: None, packs_drafter=True)
    surplus = f"{EXPERTS}.{TINY.experts}.up_proj"
    message = bench.refused(mtp_tensors=[*SMALL_MTP, f"{surplus}.{{qweight,qzeros,scales}}"])
    assert f"{surplus}: the original lacks this weight" in message
    assert bench.run(mtp_tensors=SMALL_MTP).returncode == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"memory_bytes": 1 << 60}, "bytes of memory"),
        ({"work_bytes": 1 << 60}, "are free"),
        ({"packages": "/missing"}, "/missing"),
        ({"mtp_tensors": [*MTP, "mtp.fc.{qweight,qzeros,scales}"]}, "mtp.fc: must be packed"),
    ],
)
def test_requantize_checks_prerequisites_before_starting_the_container(bench, changes, problem):
    assert problem in bench.refused(**changes)
    assert not any(line.startswith("run ") for line in bench.calls())


def test_resumed_quantization_requires_space_only_for_the_rest_of_the_result(bench, monkeypatch):
    shard = "$work/made/tree/model-shard-0001"
    bench.set_docker_script(f"mkdir $work/made/tree; head -c 3000000 /dev/zero > {shard}; exit 1")
    assert bench.run(work_bytes=10_000_000).returncode == 4
    order = parse(RequantizePlan, (bench.root / "requantize.json").read_text())
    free = SimpleNamespace(f_bavail=8_000_000, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    check_prerequisites(order, partial_dir(bench.out))
    free.f_bavail = 7_000_000
    with pytest.raises(ValidationError, match="only 7000000 are free"):
        check_prerequisites(order, partial_dir(bench.out))


def test_rejects_quantized_original(bench):
    path = bench.root / "published/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"b": 4}}))
    assert "is already quantized" in bench.refused()


def test_only_root_can_write_to_result(bench):
    bench.set_docker_script("umask 0" + COMPLETE + "chmod 666 $work/made/tree/*")
    assert bench.run().returncode == 0
    modes = {stat.S_IMODE(path.stat().st_mode) for path in bench.out.iterdir()}
    assert modes == {0o644}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published") / "tree"
    repository.write_plain(root, TINY, *weights_and_tokenizer())
    return read_checkpoint(root)


def plan_of(*names):
    return SimpleNamespace(base_tensors=names, mtp_tensors=())


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("lm_head", "it is not in any layer of the language model or the drafter"),
        ("mtp.fc", "it is not in any layer of the language model or the drafter"),
        ("mtp.layers.0.mlp.gate", "it is a gate"),
        ("mtp.layers.0.self_attn.q_norm", "its shape is [64], expected a matrix"),
        (f"{EXPERTS}.8.gate_proj", "the original lacks this weight"),
        ("model.language_model.layers.0.linear_attn.in_proj_a", "its row count, 8,"),
    ],
)
def test_rejects_modules_that_autoround_would_skip(published, module, reason):
    with pytest.raises(ValidationError) as refusal:
        check_packable(plan_of(f"{module}.{{qweight,qzeros,scales}}"), published)
    assert refusal.value.where == module
    assert reason in refusal.value.what


def test_rejects_column_counts_that_are_not_a_multiple_of_the_group_size(published):
    module = "mtp.layers.0.self_attn.q_proj"
    tensor = Tensor("BF16", (32, 64), 0, 32 * 64 * 2)
    header = Header({f"{module}.weight": tensor}, {}, 0, tensor.end)
    narrow = published._replace(shards={"x": header}, owner={f"{module}.weight": "x"})
    with pytest.raises(ValidationError, match="its column count, 64,"):
        check_packable(plan_of(f"{module}.qweight"), narrow)


def test_packing_handles_the_tensor_names_of_every_16_bit_repository():
    models = [
        model for model in shipped_catalog().models.values() if isinstance(model, HybridModel)
    ]
    models = [model for model in models if model.sources.original]
    assert "qwen3.5-35b" in {model.name for model in models}
    for model in models:
        plan = plan_of(*model.tensors.base, *model.tensors.mtp)
        assert [module for module in packed_modules(plan) if skip_reason(module)] == [], model.name


def copy_from(peer, bench, tmp_path):
    """Quantize again with the peer's files as a source; return the finished process."""
    receipt = (peer.root / ("1" * 64) / "files/receipt.json").read_bytes()
    (tmp_path / "key").write_text("key\n")
    copies = {
        "schema_version": 1,
        "digest": "1" * 64,
        "trees": [{"url": peer.url, "receipt_sha256": hashlib.sha256(receipt).hexdigest()}],
        "key_file": str(tmp_path / "key"),
    }
    (tmp_path / "copy.json").write_text(json.dumps(copies))
    shutil.rmtree(bench.out)
    return bench.run("--or-copy", tmp_path / "copy.json")


def test_copies_from_a_peer_after_an_interrupted_copy(bench, tmp_path):
    bench.run()
    with Hub(tmp_path / "peer") as peer:
        shutil.copytree(bench.out, peer.root / ("1" * 64) / "files")
        interrupted = partial_tree(bench.out)
        interrupted.mkdir(parents=True)
        (interrupted / "config.json").write_text("{")
        done = copy_from(peer, bench, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "copied from" in done.stderr


@pytest.mark.gate
@pytest.mark.parametrize("name", ["chat_template.jinja", "modeling_evil.py", "x/config.json"])
def test_copies_only_data_files_from_a_peer(bench, tmp_path, name):
    bench.run()
    with Hub(tmp_path / "peer") as peer:
        tree = peer.root / ("1" * 64) / "files"
        shutil.copytree(bench.out, tree)
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("{}")
        receipt = json.loads((tree / "receipt.json").read_text())
        receipt["files"] = [file for file in receipt["files"] if file["path"] != name]
        sha256 = hashlib.sha256(b"{}").hexdigest()
        receipt["files"].append({"path": name, "size_bytes": 2, "sha256": sha256})
        (tree / "receipt.json").write_text(json.dumps(receipt))
        done = copy_from(peer, bench, tmp_path)
    assert done.returncode == 0, done.stderr
    is_data = name.endswith(".jinja")
    assert ("copied from" in done.stderr, (bench.out / name).exists()) == (is_data, is_data)
