"""Checkpoints of single proofs: steered drafts, true layer sizes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.model import original, repository, rounding, vocabulary
from lab.model.original import Floats
from lab.model.safetensors import write_file
from lab.model.shape import Shape
from proofs.trees.build import INDEX, SEED, WIDE, build, plan

EMBEDDING_RMS = 1.0
ODD_RMS = 2.0
TOP_LOGIT = 14.0


@dataclass(frozen=True)
class Steering:
    """A model with known tokens and a known acceptance rate.

    The target's next token is a permutation of the last token. Embeddings use the first half of the
    channels for ordinary tokens and the second half for *odd* tokens; the drafter's last norm drops
    the second half, so drafts after odd tokens are wrong. The layers stay random, so that states
    and caches affect every logit.
    """

    following: npt.NDArray[np.int64]
    odd: npt.NDArray[np.bool_]


def steer(shape: Shape, seed: int, odd_share: float) -> Steering:
    """Return a permutation with a single cycle and the tokens after which drafts are wrong."""
    source = np.random.default_rng(seed)
    cycle = source.permutation(shape.vocabulary)
    following = np.empty(shape.vocabulary, dtype=np.int64)
    following[cycle] = np.roll(cycle, -1)
    return Steering(following, source.random(shape.vocabulary) < odd_share)


def steered_weights(shape: Shape, seed: int, known: Steering) -> dict[str, Floats]:
    tensors = original.random_weights(shape, seed)
    source = np.random.default_rng(seed + 1)
    half = shape.hidden // 2
    embedding = np.zeros((shape.vocabulary, shape.hidden), dtype=np.float32)
    embedding[:, :half] = source.normal(0, EMBEDDING_RMS, (shape.vocabulary, half))
    odd = source.normal(0, ODD_RMS, (int(known.odd.sum()), half))
    embedding[known.odd, :half] = 0
    embedding[known.odd, half:] = odd
    rms = np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    head = np.empty_like(embedding)
    # A hidden state is normed before the head, so the top logit is about TOP_LOGIT everywhere.
    head[known.following] = embedding / rms * TOP_LOGIT / shape.hidden
    tensors["model.language_model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = head
    only_embedding = np.zeros((shape.hidden, 2 * shape.hidden), dtype=np.float32)
    only_embedding[:, : shape.hidden] = np.eye(shape.hidden)
    tensors["mtp.fc.weight"] = only_embedding
    dropped = np.zeros(shape.hidden, dtype=np.float32)
    dropped[half:] = -1
    tensors["mtp.norm.weight"] = dropped
    return tensors


def expected_tokens(known: Steering, last: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        last = int(known.following[last])
        tokens.append(last)
    return tokens


def expected_acceptance(known: Steering, tokens: list[int], drafts: int) -> tuple[int, int]:
    accepted = drafted = place = 0
    while place < len(tokens) - 1:
        right = 0
        while right < drafts and not known.odd[tokens[min(place + right, len(tokens) - 1)]]:
            right += 1
        accepted, drafted = accepted + right, drafted + drafts
        place += right + 1
    return accepted, drafted


STEERED = {"steered-0": 1.0, "steered-50": 0.5, "steered-95": 0.05}
HYBRID = {"layout": "overlay", "head": "int8-g128", "shared_experts": "fp8-donor"}
PLAIN_HEAD = {**HYBRID, "head": "keep"}
STEERED_SHAPE = replace(WIDE, expert_width=512)
"""On two GPUs, experts of 256 would have a single group of scales, which is refused."""
NARROW = replace(WIDE, expert_width=128)
LONG_POSITIONS = 262144
EXPERT_KINDS = 16
VOCABULARY_COPIES = 10
"""Rotated copies of the vocabulary; half a billion random numbers would take a minute."""
TRUE_35B = Shape(
    layers=2,
    attention_interval=2,
    hidden=2048,
    vocabulary=248320,
    experts=256,
    experts_per_token=8,
    # Wider than a group: at 128 vLLM 0.33 permutes the scales of gate and up wrongly.
    expert_width=256,
    shared_width=512,
    heads=16,
    kv_heads=2,
    head_dim=256,
    linear_key_heads=16,
    linear_value_heads=32,
    linear_head_dim=128,
)
"""A layer of each kind of the 35B in true size; only the experts are narrower."""
TRUE_SHARD_BYTES = 256_000_000
"""Small enough that replaced tensors share files with other tensors, as in the real base."""
TRUE_122B = replace(TRUE_35B, hidden=3072, shared_width=1024, heads=32, linear_value_heads=64)
MTP_BLOCKS = "model.language_model.layers,mtp.layers"


def make_steered(out: Path, work: Path) -> None:
    for name, odd_share in STEERED.items():
        known = steer(STEERED_SHAPE, SEED, odd_share)
        weights = steered_weights(STEERED_SHAPE, SEED, known)
        _hybrid(out, work, name, STEERED_SHAPE, weights, HYBRID)
    build(plan(out / f"{name}-base", out / f"{name}-donor", out / f"{name}-bf16", PLAIN_HEAD), work)


def make_narrow(out: Path, work: Path) -> None:
    _hybrid(out, work, "narrow", NARROW, original.random_weights(NARROW, SEED), HYBRID)


def make_long(out: Path, work: Path) -> None:
    shape = replace(WIDE, max_positions=LONG_POSITIONS)
    _hybrid(out, work, "long", shape, original.random_weights(shape, SEED), HYBRID)


def make_true(out: Path, work: Path, name: str, shape: Shape, *, int4_mtp: bool) -> None:
    small = replace(shape, experts=EXPERT_KINDS, vocabulary=shape.vocabulary // VOCABULARY_COPIES)
    few = original.random_weights(small, SEED)
    weights: dict[str, Floats] = {}
    routers = np.random.default_rng(SEED)
    for key, size in {**original.main_shapes(shape), **original.mtp_shapes(shape)}.items():
        if key.endswith("mlp.gate.weight"):
            weights[key] = routers.normal(0, 0.02, size).astype(np.float32)
        elif size[0] == shape.vocabulary:
            copies = [np.roll(few[key], 7 * turn, axis=1) for turn in range(VOCABULARY_COPIES)]
            weights[key] = np.concatenate(copies)
        else:
            weights[key] = few[_kind_of(key)]
    _hybrid(
        out, work, name, shape, weights, PLAIN_HEAD, int4_mtp=int4_mtp, shard_bytes=TRUE_SHARD_BYTES
    )


def _kind_of(name: str) -> str:
    before, separator, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    return f"{before}.experts.{int(number) % EXPERT_KINDS}.{rest}" if separator else name


def _hybrid(
    out: Path,
    work: Path,
    name: str,
    shape: Shape,
    weights: dict[str, Floats],
    variant: dict[str, str],
    *,
    int4_mtp: bool = False,
    shard_bytes: int = repository.SHARD_BYTES,
) -> None:
    tokenizer = vocabulary.train(1024)
    base, donor = out / f"{name}-base", out / f"{name}-donor"
    repository.write_int4(base, shape, weights, tokenizer, "random", shard_bytes)
    if int4_mtp:
        pack_drafter(base, weights)
    shared = {
        key: value
        for key, value in weights.items()
        if ".shared_expert." in key and not key.startswith("mtp.")
    }
    repository.write_fp8(donor, shape, shared, tokenizer, "random")
    build(plan(base, donor, out / name, variant), work)


def pack_drafter(base: Path, weights: dict[str, Floats]) -> None:
    """Put the drafter's experts and attention into INT4, as the 35B's base has them."""
    tensors = {}
    for key, values in weights.items():
        if not key.startswith("mtp."):
            continue
        module = key.removesuffix(".weight")
        if key.startswith("mtp.layers.") and original.is_projection(key) and "shared" not in key:
            parts = rounding.int4(values)
            tensors.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
        else:
            tensors[key] = rounding.bf16(values)
    write_file(base / repository.MTP_FILE, tensors)
    index = json.loads((base / INDEX).read_text())
    index["weight_map"] = {
        key: file for key, file in index["weight_map"].items() if not key.startswith("mtp.")
    } | dict.fromkeys(tensors, repository.MTP_FILE)
    (base / INDEX).write_text(json.dumps(index))
    describe_packed_drafter(base)


def describe_packed_drafter(base: Path) -> None:
    for path in (base / "config.json", base / "quantization_config.json"):
        content = json.loads(path.read_text())
        quantization = content.get("quantization_config", content)
        quantization["block_name_to_quantize"] = MTP_BLOCKS
        for part in ("gate_proj", "up_proj", "down_proj"):
            key = f"mtp.layers.0.mlp.shared_expert.{part}"
            quantization["extra_config"][key] = {"bits": 16, "data_type": "float"}
        quantization["extra_config"]["mtp.layers.0.mlp.shared_expert_gate"] = {
            "bits": 16,
            "data_type": "float",
        }
        path.write_text(json.dumps(content, indent=1))
