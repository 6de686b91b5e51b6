"""AutoRound as `spark-deploy add --requantize` runs it, against plain rounding.

    python3 proofs/kernels/requantize.py --packages DIR --out RESULTS --work DIR

The model is the lab's trained one with every input channel of a layer rescaled by a factor of
its own and the weights behind it by the inverse: the same answers, and weights that lie on
nobody's grid. It is quantised by the script that runs in the engine's container, once to
nearest and once tuned on drills of the lab's lessons; "ours" is the plain rounding that the
lab's own repository is made by. All trees are dequantised and computed by transformers in BF16,
on other drills and questions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "files/contract"),
    str(ROOT / "files/checkpoint"),
    str(ROOT / "files/image"),
]

from spark_checkpoint.directory import read_checkpoint  # noqa: E402
from spark_checkpoint.requantize_checks import unpack_weight  # noqa: E402

from lab.model import lessons, original, repository, rounding, vocabulary, weights  # noqa: E402
from lab.model.original import LAYERS, Floats  # noqa: E402
from lab.model.safetensors import write_file, write_model  # noqa: E402
from lab.model.shape import TINY  # noqa: E402
from proofs import stages  # noqa: E402
from proofs.result_files import read_command  # noqa: E402

SCRIPT = ROOT / "files/checkpoint/spark_checkpoint/autoround_job.py"
NARROW = (".in_proj_a.weight", ".in_proj_b.weight")  # eight rows: AutoRound leaves them as they are
SETTINGS = {"nsamples": 32, "seqlen": 128, "batch": 8}
WAYS = {"nearest": 0, "tuned": 200}
READERS = {
    "input_layernorm": (
        ".linear_attn.in_proj_",
        ".self_attn.q_proj",
        ".self_attn.k_proj",
        ".self_attn.v_proj",
    ),
    "post_attention_layernorm": (".mlp.",),
}


CAVEATS = [
    "not a GB10, and seconds are of four small layers: no time of a Spark",
    "a model of 12 million weights says little of how a large one is rounded",
    "judged over all positions, prompts too: of its replies this model is so sure that rounding "
    "and damage hardly show; that, and how far damage has to be, were settled after a first run",
]


def off_grid(seed: int) -> dict[str, Floats]:
    """Return the lab's model with channels rescaled: it computes the same from other numbers."""
    rng = np.random.default_rng(seed)
    found = weights.read(TINY)
    for layer in range(TINY.layers):
        prefix = f"{LAYERS}.{layer}"
        for norm, readers in READERS.items():
            name = f"{prefix}.{norm}.weight"
            factors = np.exp(rng.normal(0, 0.3, found[name].size)).astype(np.float32)
            found[name] = (1 + found[name]) / factors - 1
            for reader in [one for one in found if one.startswith(prefix)]:
                inner = reader.endswith("down_proj.weight") or reader == name
                if not inner and any(part in reader for part in readers):
                    found[reader] = found[reader] * factors
        for up in [
            one for one in found if one.startswith(prefix) and one.endswith("up_proj.weight")
        ]:
            factors = np.exp(rng.normal(0, 0.3, found[up].shape[0])).astype(np.float32)
            down = up.replace("up_proj", "down_proj")
            found[up], found[down] = found[up] * factors[:, None], found[down] / factors
    return found


def drills(seed: int, count: int) -> list[lessons.Lesson]:
    rng = random.Random(seed)
    return [lessons.drill(rng) for _ in range(count)]


def quantised(iters: int, values: dict[str, Floats], work: Path, packages: Path) -> Path:
    if (work / "work/done.json").exists():
        return tree_in(work)
    (work / "work/made").mkdir(parents=True)
    (work / "work/resume").mkdir()
    (work / "packages").symlink_to(packages.resolve())
    (work / "model").symlink_to(work.parent / "16-bit")
    texts = [one.prompt + one.reply for one in drills(1, 1500)]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (work / "calibration.jsonl").write_text("".join(lines))
    packed = [n for n in values if original.is_int4(n) and not n.endswith(NARROW)]
    drafter = [n for n in values if n.startswith("mtp.") and "norm" not in n]
    order = {
        "int4": [name.removesuffix(".weight") for name in packed],
        "drafter_kept": [name.removesuffix(".weight") for name in drafter],
        "iters": iters,
        **SETTINGS,
    }
    (work / "work/order.json").write_text(json.dumps(order))
    subprocess.run([sys.executable, str(SCRIPT)], check=True,
                   env={**os.environ, "SPARK_ROOT": str(work)})  # fmt: skip
    return tree_in(work)


def tree_in(work: Path) -> Path:
    tree: Path = work / "work/made" / done_in(work)["tree"]
    return tree


def done_in(work: Path) -> dict[str, Any]:
    """Return what the script wrote last."""
    found: dict[str, Any] = json.loads((work / "work/done.json").read_text())
    return found


def rounded(values: dict[str, Floats], tree: Path) -> Path:
    kept = [name.removesuffix(".weight") for name in values if name.endswith(NARROW)]
    tokenizer = vocabulary.train(TINY.vocabulary)
    plain = {name: one for name, one in values.items() if not name.endswith(NARROW)}
    tensors = repository.int4_tensors(plain)
    narrow = {name: one for name, one in values.items() if name.endswith(NARROW)}
    repository.write_int4(tree, TINY, plain, tokenizer, "")
    for shard in tree.glob("*.safetensors*"):
        shard.unlink()
    write_model(tree, {**tensors, **{n: rounding.bf16(v) for n, v in narrow.items()}}, {}, 1 << 30)
    config = json.loads((tree / "config.json").read_text())
    per_module = config["quantization_config"]["extra_config"]
    per_module.update({name: {"bits": 16, "data_type": "float"} for name in kept})
    (tree / "config.json").write_text(json.dumps(config))
    return tree


def damaged(tree: Path, out: Path) -> Path:
    """Copy a tree with two experts of a layer in each other's place: the judge must see it."""
    shutil.copytree(tree, out)
    config = out / "model.safetensors.index.json"
    index = json.loads(config.read_text())
    from safetensors.torch import load_file, save_file

    for shard in sorted(set(index["weight_map"].values())):
        found = load_file(out / shard)
        one, other = f"{LAYERS}.1.mlp.experts.0.", f"{LAYERS}.1.mlp.experts.1."
        swap = {n: n.replace(one, other) if one in n else n.replace(other, one) for n in found}
        save_file({swap[n]: t for n, t in found.items()}, out / shard, metadata={"format": "pt"})
    return out


def dequantised(tree: Path, out: Path) -> Path:
    """Write a tree with plain 16-bit weights in place of the packed ones."""
    found = read_checkpoint(tree)
    tensors: dict[str, rounding.Tensor] = {}
    for name in found.owner:
        module = name.removesuffix(".qweight")
        if module != name:
            weight = np.ascontiguousarray(unpack_weight(found, module))
            tensors[f"{module}.weight"] = rounding.bf16(weight)
        elif not name.endswith((".scales", ".qzeros")):
            path, offset, size_bytes = found.span(name)
            data = path.read_bytes()[offset : offset + size_bytes]
            tensors[name] = rounding.Tensor(
                found.tensor(name).dtype, found.tensor(name).shape, data
            )
    shutil.copytree(tree, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    write_file(out / "model.safetensors", tensors)
    return out


def answers(tree: Path, asked: list[lessons.Lesson]) -> list[Any]:
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(tree, dtype=torch.bfloat16).eval()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tree)
    found = []
    with torch.no_grad():
        for one in asked:
            prompt, reply = (tokenizer(text)["input_ids"] for text in (one.prompt, one.reply))
            ids = torch.tensor([prompt + reply], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            found.append((torch.log_softmax(logits, -1).cpu(), ids[0, 1:].cpu(), len(prompt) - 1))
    return found


def beside(reference: list[Any], other: list[Any]) -> dict[str, float]:
    """Hold one model's probabilities against another's: all positions, and those of replies."""
    found: dict[str, float] = {"positions": sum(len(tokens) for _, tokens, _ in reference)}
    for part in ("all", "replies"):
        numbers = compared(reference, other, replies=part == "replies")
        found |= {f"{name}_{part}": number for name, number in numbers.items()}
    return found


def compared(reference: list[Any], other: list[Any], *, replies: bool) -> dict[str, float]:
    import torch

    divergence, agree, lost = [], [], []
    for (theirs, tokens, asked), (ours, _, _) in zip(reference, other, strict=True):
        part = slice(asked if replies else 0, None)
        divergence.append((theirs.exp() * (theirs - ours)).sum(-1)[part])
        agree.append((theirs.argmax(-1) == ours.argmax(-1)).float()[part])
        lost.append(-ours.gather(-1, tokens[:, None])[part, 0])
    found = {
        "divergence": round(float(torch.cat(divergence).mean()), 6),
        "top_agrees": round(float(torch.cat(agree).mean()), 5),
    }
    # What a prompt is made of nobody can foresee.
    return found | (
        {"perplexity": round(float(torch.cat(lost).mean().exp()), 4)} if replies else {}
    )


def main() -> None:
    """Make the trees, hold them against the model in 16 bits, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder with AutoRound")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, required=True, help="empty, or of a run whose trees are judged again"
    )
    parser.add_argument("--iters", type=int, default=WAYS["tuned"])
    options = parser.parse_args()
    work = options.work.resolve()
    values = off_grid(5)
    for made in (
        "16-bit",
        "ours",
        "damaged",
        *(f"{one}-plain" for one in ("ours", "damaged", *WAYS)),
    ):
        shutil.rmtree(work / made, ignore_errors=True)
    repository.write_plain(work / "16-bit", TINY, values, vocabulary.train(TINY.vocabulary))
    trees = {"ours": rounded(values, work / "ours")}
    for name, iters in {**WAYS, "tuned": options.iters}.items():
        trees[name] = quantised(iters, values, work / name, options.packages)
    seconds = {name: done_in(work / name)["seconds_of_last_run"] for name in WAYS}
    trees["damaged"] = damaged(trees["tuned"], work / "damaged")
    asked = drills(2, 60) + lessons.fixed()
    reference = answers(work / "16-bit", asked)
    plain = {name: dequantised(tree, work / f"{name}-plain") for name, tree in trees.items()}
    found = {name: beside(reference, answers(tree, asked)) for name, tree in plain.items()}
    done = done_in(work / "tuned")
    perplexity = beside(reference, reference)["perplexity_replies"]
    write(options.out, found, seconds, options.iters, perplexity, done["versions"])


def write(
    out: Path,
    found: dict[str, Any],
    seconds: dict[str, float],
    iters: int,
    perplexity: float,
    quantiser: dict[str, str],
) -> None:
    mean = {name: numbers["divergence_all"] for name, numbers in found.items()}
    rows = [
        {"claim": f"{name}: how far from the model in 16 bits", "passed": None, "cases": [name],
         "numbers": {**numbers, **({"seconds": seconds[name]} if name in seconds else {})}}
        for name, numbers in found.items()
    ]  # fmt: skip
    judged = {
        "tuned by AutoRound, nearer to 16 bits than AutoRound's rounding to nearest": (
            mean["tuned"] < mean["nearest"]
        ),
        "tuned by AutoRound, nearer to 16 bits than our rounding": mean["tuned"] < mean["ours"],
        "two experts of it in each other's place are further away": (
            mean["damaged"] > 1.25 * mean["tuned"]
        ),
    }
    rows += [{"claim": claim, "passed": held, "cases": [], "numbers": {}}
             for claim, held in judged.items()]  # fmt: skip
    document = {
        "command": read_command(),
        "seed": 5,
        **stages.environment(),
        "quantiser": quantiser,
        "caveats": CAVEATS,
        "settings": {**SETTINGS, "iters": iters, "perplexity_16_bit": perplexity},
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "requantize.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
