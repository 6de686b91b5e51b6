"""Synthetic sources with real names, written without our own code, and runs of the builder."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from builder_shards import (
    BLOCK,
    Bytes,
    Raw,
    bf16_tensor,
    bf16_values,
    fp8_pair,
    read_shard,
    write_shard,
)

from tests import forked

ROOT = Path(__file__).parents[3]
LAYERS, EXPERTS, HIDDEN, WIDTH, VOCABULARY = 4, 2, 256, 128, 320
BASE_COMMIT, DONOR_COMMIT = "b" * 40, "d" * 40
SHARED = "model.language_model.layers.{0..3}.mlp.shared_expert"
SWAP = f"{SHARED}.{{gate,up,down}}_proj"
DONOR_SHAPES = [
    {"modules": f"{SHARED}.{{gate,up}}_proj", "weight": [WIDTH, HIDDEN], "scale": [1, 2]},
    {"modules": f"{SHARED}.down_proj", "weight": [HIDDEN, WIDTH], "scale": [2, 1]},
]


def _matrix(random, shape, scale=0.02):
    raw = np.frombuffer(random.bytes(int(np.prod(shape)) * 8), "<u2").reshape(*shape, 4)
    return ((raw.sum(axis=-1, dtype=np.int64) - 131070) * np.float32(scale / 37837)).astype("<f4")


def _int4(random, outputs, inputs):
    groups = inputs // 128
    return {
        "qweight": Raw("I32", (inputs // 8, outputs), random.bytes(inputs // 8 * outputs * 4)),
        "qzeros": Raw("I32", (groups, outputs // 8), b"\x77" * (groups * outputs // 2)),
        "scales": Raw("F16", (groups, outputs), np.full((groups, outputs), 0.01, "<f2").tobytes()),
    }


def language_tensors(random):
    base, linear = {}, {}
    for layer in range(LAYERS):
        prefix = f"model.language_model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            base[f"{prefix}.{norm}.weight"] = bf16_tensor(np.ones(HIDDEN, np.float32))
        base[f"{prefix}.mlp.gate.weight"] = bf16_tensor(_matrix(random, (EXPERTS, HIDDEN)))
        base[f"{prefix}.mlp.shared_expert_gate.weight"] = bf16_tensor(_matrix(random, (1, HIDDEN)))
        for expert in range(EXPERTS):
            for part, (rows, columns) in _mlp_shapes().items():
                for suffix, raw in _int4(random, rows, columns).items():
                    base[f"{prefix}.mlp.experts.{expert}.{part}.{suffix}"] = raw
        for part, shape in _mlp_shapes().items():
            name = f"{prefix}.mlp.shared_expert.{part}"
            linear[name] = _matrix(random, shape)
            base[f"{name}.weight"] = bf16_tensor(linear[name])
        for part in ("q_proj", "o_proj"):
            name = f"{prefix}.self_attn.{part}"
            linear[name] = _matrix(random, (HIDDEN, HIDDEN))
            for suffix, raw in _int4(random, HIDDEN, HIDDEN).items():
                base[f"{name}.{suffix}"] = raw
    base["model.language_model.embed_tokens.weight"] = bf16_tensor(
        _matrix(random, (VOCABULARY, HIDDEN))
    )
    base["model.language_model.norm.weight"] = bf16_tensor(np.ones(HIDDEN, np.float32))
    base["lm_head.weight"] = bf16_tensor(_matrix(random, (VOCABULARY, HIDDEN)))
    return base, linear


def _mlp_shapes():
    return {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


def mtp_originals(random):
    tensors = {
        f"mtp.{n}.weight": np.ones(HIDDEN, np.float32) for n in ("norm", "pre_fc_norm_hidden")
    }
    tensors["mtp.fc.weight"] = _matrix(random, (HIDDEN, 2 * HIDDEN))
    for expert in range(EXPERTS):
        for part, shape in _mlp_shapes().items():
            tensors[f"mtp.layers.0.mlp.experts.{expert}.{part}.weight"] = _matrix(random, shape)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = _matrix(random, (HIDDEN, HIDDEN))
    return tensors


MTP_IN_FP8 = (".mlp.", ".self_attn.")


@cache
def _repositories(seed):
    random = Bytes(seed)
    base, linear = language_tensors(random)
    originals = mtp_originals(random)
    donor = {"lm_head.weight": base["lm_head.weight"]}
    for name, values in linear.items():
        plain = bf16_values(bf16_tensor(values))
        donor[f"{name}.weight"], donor[f"{name}.weight_scale_inv"] = fp8_pair(plain)
    for name, values in originals.items():
        donor[name] = bf16_tensor(values)
        if any(part in name for part in MTP_IN_FP8):
            scale = name.replace(".weight", ".weight_scale_inv")
            donor[name], donor[scale] = fp8_pair(bf16_values(donor[name]))
    mtp = {name: bf16_tensor(values) for name, values in originals.items()}
    return base, mtp, donor


# Far below the real size, so that small shards have many pieces.
PIECE_BYTES = 50_000


@dataclass
class Workshop:
    """A base, a donor and plans over them, in a temporary directory."""

    root: Path
    seed: int = 1
    write_shard: Callable = write_shard
    base: dict = field(default_factory=dict)
    donor: dict = field(default_factory=dict)
    mtp: dict = field(default_factory=dict)

    def __post_init__(self):
        self.base, self.mtp, self.donor = (dict(part) for part in _repositories(self.seed))

    @property
    def base_dir(self):
        return self.root / "base"

    @property
    def donor_dir(self):
        return self.root / "donor"

    @property
    def out(self):
        return self.root / "models" / "tiny-hybrid"

    @property
    def modules(self):
        return sorted(
            name.removesuffix(".weight")
            for name in self.base
            if ".shared_expert." in name and name.endswith(".weight")
        )

    def write_base(self, shard_count=3, *, index_mtp=True, receipt=True):
        names = list(self.base)
        shards = {}
        for number in range(shard_count):
            name = f"model-{number + 1:05}-of-{shard_count:05}.safetensors"
            shards[name] = {name: self.base[name] for name in names[number::shard_count]}
        if self.mtp:
            shards["model_extra_tensors.safetensors"] = dict(self.mtp)
        self._write_tree(
            self.base_dir, shards, lambda name: index_mtp or not name.startswith("mtp.")
        )
        config = {
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False,
            "text_config": {"num_hidden_layers": LAYERS, "tie_word_embeddings": False},
            "quantization_config": {
                "quant_method": "auto-round",
                "bits": 4,
                "group_size": 128,
                "sym": True,
                "packing_format": "auto_round:auto_gptq",
                "block_name_to_quantize": "model.language_model.layers",
                "extra_config": {
                    module: {"bits": 16, "data_type": "float"} for module in self.modules
                },
            },
        }
        (self.base_dir / "config.json").write_text(json.dumps(config))
        (self.base_dir / "tokenizer.json").write_text('{"version": "1.0"}')
        if receipt:
            self.write_receipt()

    def publish_base(self, hub, name, revision):
        """Move the base to a hub; return its directory and a function that sets the file list."""
        self.write_base(receipt=False)
        tree = hub.root / name / "resolve" / BASE_COMMIT
        tree.parent.mkdir(parents=True)
        self.base_dir.rename(tree)
        listing = hub.root / "api/models" / name / "revision" / revision
        listing.parent.mkdir(parents=True)

        def set_listing(siblings):
            listing.write_text(json.dumps({"sha": BASE_COMMIT, "siblings": siblings}))

        set_listing([{"rfilename": path.name} for path in tree.iterdir()])
        return tree, set_listing

    def write_receipt(self, *, piece_bytes=PIECE_BYTES):
        document = {
            "schema_version": 1,
            "kind": "source",
            "digest": "5" * 64,
            "name": "lab/tiny",
            "commit": BASE_COMMIT,
            "files": file_entries(self.base_dir, stamps=True, piece_bytes=piece_bytes),
            "tool_version": "0",
            "written_at": "2026-01-01T00:00:00Z",
        }
        (self.base_dir / "receipt.json").write_text(json.dumps(document))

    def write_donor(self, directory=None, shard_count=2):
        names = list(self.donor)
        shards = {
            f"model-{n + 1:05}-of-{shard_count:05}.safetensors": {
                name: self.donor[name] for name in names[n::shard_count]
            }
            for n in range(shard_count)
        }
        self._write_tree(directory or self.donor_dir, shards, lambda name: True)

    def _write_tree(self, directory, shards, indexed):
        directory.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        for shard, tensors in shards.items():
            self.write_shard(directory / shard, tensors)
            weight_map.update({name: shard for name in tensors if indexed(name)})
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def plan(self, **changes):
        partners = {*self.base, *(f"{module}.weight_scale_inv" for module in self.modules)}
        self.out.parent.mkdir(exist_ok=True)
        outside = (
            name for name in self.donor if ".mlp.experts." not in name and name not in partners
        )
        mtp = (name for name in self.donor if name.startswith("mtp.") and "scale" not in name)
        return {
            "schema_version": 1,
            "digest": "1" * 64,
            "name": "tiny",
            "base": {"dir": str(self.base_dir), "revision": BASE_COMMIT},
            "donor": {"dir": str(self.donor_dir)},
            "swap": [SWAP],
            "block_shape": [BLOCK, BLOCK],
            "base_tensors": sorted(self.base),
            "donor_unmatched": sorted(outside),
            "donor_shapes": DONOR_SHAPES,
            "mtp_tensors": sorted(mtp),
            "shared_experts": "fp8-donor",
            "head": "keep",
            "layout": "overlay",
            "out": str(self.out),
            "extra": {},
            **changes,
        }

    def write_plan(self, **changes):
        path = self.root / "plan.json"
        path.write_text(json.dumps(self.plan(**changes)))
        return path

    def write_sources(self, **changes):
        if not self.base_dir.exists():
            self.write_base()
        if "donor" not in changes and not self.donor_dir.exists():
            self.write_donor()

    def build(self, check=True, **changes):
        self.write_sources(**changes)
        return run_tool("build", self.write_plan(**changes), check=check)

    def result(self):
        return tree_tensors(self.out)

    def read(self, name):
        return json.loads((self.out / name).read_text())

    def quantization(self):
        return self.read("config.json")["quantization_config"]

    def index(self):
        return self.read("model.safetensors.index.json")["weight_map"]

    def change_base_config(self, change):
        self.write_sources()
        path = self.base_dir / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
        self.write_receipt()

    def base_hashes(self):
        return {entry["path"]: entry["sha256"] for entry in file_entries(self.base_dir)}


def changed(document, path, value):
    """Return a copy with a value at a path; None removes the key."""
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copy


def tree_tensors(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {shard: read_shard(directory / shard) for shard in set(index.values())}
    return {name: shards[shard][name] for name, shard in index.items()}


def file_entries(directory, *, stamps=False, piece_bytes=None):
    entries = []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "receipt.json":
            data = path.read_bytes()
            entry = {
                "path": str(path.relative_to(directory)),
                "size_bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            if stamps:
                entry["modified_ns"], entry["inode"] = path.stat().st_mtime_ns, path.stat().st_ino
            if piece_bytes:
                entry["pieces"] = piece_lines(data, piece_bytes)
            entries.append(entry)
    return entries


def piece_lines(data, piece_bytes):
    pieces = [data[offset : offset + piece_bytes] for offset in range(0, len(data), piece_bytes)]
    return [f"{len(piece)}:{hashlib.sha256(piece).hexdigest()}" for piece in pieces]


def tool_environment():
    homes = (str(ROOT / "files" / home) for home in ("contract", "checkpoint"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(homes)}


def run_tool(*arguments, check=True, fault=None, env=os.environ):
    words = ("tests.unit.checkpoint.builder_zygote", json.dumps(fault), *arguments)
    done = forked.run(
        words if fault else ("spark_checkpoint", *arguments),
        cwd=ROOT, env=env, ready=forked.BUILDER,
    )  # fmt: skip
    if "Traceback" in done.stderr or (check and done.returncode != 0):
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
