"""AutoRound as `spark-deploy add --requantize` runs it, against plain rounding.

    python3 proofs/kernels/requantize.py --packages DIR --out RESULTS --work DIR

The lab's trained model gets rescaled channels: the same answers with weights off any grid. The
script of the engine's container rounds it to nearest and tunes it on drills; "ours" is the lab's
rounding. Transformers computes all checkpoints, dequantized to BF16, on other drills.
"""

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
HOMES = (".", "files/contract", "files/checkpoint", "files/image")
sys.path[:0] = [str(ROOT / home) for home in HOMES]

from spark_checkpoint.directory import read_checkpoint  # noqa: E402
from spark_checkpoint.number_formats import unpack_int4  # noqa: E402

from lab.model import lessons, original, repository, rounding, vocabulary, weights  # noqa: E402
from lab.model.original import LAYERS, Floats  # noqa: E402
from lab.model.safetensors import write_file, write_model  # noqa: E402
from lab.model.shape import TINY  # noqa: E402
from lab.model.spread import rescale_layer  # noqa: E402
from proofs import stages  # noqa: E402
from proofs.judges.answers import row  # noqa: E402
from proofs.result_files import print_rows, write_result  # noqa: E402

SCRIPT = ROOT / "files/checkpoint/spark_checkpoint/autoround_job.py"
NARROW = (".in_proj_a.weight", ".in_proj_b.weight")  # eight rows: AutoRound leaves them as they are
SETTINGS = {"nsamples": 32, "seqlen": 128, "batch": 8}
ITERATIONS = {"nearest": 0, "tuned": 200}
CAVEATS = [
    "not a GB10, and seconds are of four small layers: no time of a Spark",
    "a model of 12 million weights does not show how a large model is rounded",
    "judged over all positions, prompts included, because the model is too sure of replies for "
    "rounding or damage to show; this and the limit for damage were chosen after a first run",
]


def rescale_channels(seed: int) -> dict[str, Floats]:
    """The model computes the same from other numbers."""
    rng = np.random.default_rng(seed)
    tensors = weights.read(TINY)
    for layer in range(TINY.layers):
        rescale_layer(
            tensors, layer, lambda size: np.exp(rng.normal(0, 0.3, size)).astype(np.float32)
        )
    return tensors


def make_drills(seed: int, count: int) -> list[lessons.Lesson]:
    rng = random.Random(seed)
    return [lessons.drill(rng) for _ in range(count)]


def quantize_by_autoround(
    iters: int, values: dict[str, Floats], work: Path, packages: Path
) -> Path:
    if (work / "work/done.json").exists():
        return find_tree(work)
    (work / "work/made").mkdir(parents=True)
    (work / "work/resume").mkdir()
    (work / "packages").symlink_to(packages.resolve())
    (work / "model").symlink_to(work.parent / "16-bit")
    texts = [lesson.prompt + lesson.reply for lesson in make_drills(1, 1500)]
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
    return find_tree(work)


def find_tree(work: Path) -> Path:
    tree: Path = work / "work/made" / read_state(work)["tree"]
    return tree


def read_state(work: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((work / "work/done.json").read_text())
    return state


def round_to_nearest(values: dict[str, Floats], tree: Path) -> Path:
    kept = [name.removesuffix(".weight") for name in values if name.endswith(NARROW)]
    tokenizer = vocabulary.train(TINY.vocabulary)
    plain = {name: value for name, value in values.items() if not name.endswith(NARROW)}
    tensors = repository.int4_tensors(plain)
    narrow = {name: value for name, value in values.items() if name.endswith(NARROW)}
    repository.write_int4(tree, TINY, plain, tokenizer, "")
    for shard in tree.glob("*.safetensors*"):
        shard.unlink()
    write_model(tree, {**tensors, **{n: rounding.bf16(v) for n, v in narrow.items()}}, {}, 1 << 30)
    config = json.loads((tree / "config.json").read_text())
    per_module = config["quantization_config"]["extra_config"]
    per_module.update({name: {"bits": 16, "data_type": "float"} for name in kept})
    (tree / "config.json").write_text(json.dumps(config))
    return tree


def swap_experts(tree: Path, out: Path) -> Path:
    shutil.copytree(tree, out)
    config = out / "model.safetensors.index.json"
    index = json.loads(config.read_text())
    from safetensors.torch import load_file, save_file

    for shard in sorted(set(index["weight_map"].values())):
        tensors = load_file(out / shard)
        first, second = f"{LAYERS}.1.mlp.experts.0.", f"{LAYERS}.1.mlp.experts.1."
        swap = {
            n: n.replace(first, second) if first in n else n.replace(second, first) for n in tensors
        }
        save_file({swap[n]: t for n, t in tensors.items()}, out / shard, metadata={"format": "pt"})
    return out


def dequantize(tree: Path, out: Path) -> Path:
    checkpoint = read_checkpoint(tree)
    tensors: dict[str, rounding.Tensor] = {}
    for name in checkpoint.owner:
        module = name.removesuffix(".qweight")
        if module != name:
            weight = np.ascontiguousarray(unpack_int4(checkpoint, module))
            tensors[f"{module}.weight"] = rounding.bf16(weight)
        elif not name.endswith((".scales", ".qzeros")):
            path, offset, size_bytes = checkpoint.span(name)
            data = path.read_bytes()[offset : offset + size_bytes]
            tensors[name] = rounding.Tensor(
                checkpoint.tensor(name).dtype, checkpoint.tensor(name).shape, data
            )
    shutil.copytree(tree, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    write_file(out / "model.safetensors", tensors)
    return out


def compute_answers(tree: Path, questions: list[lessons.Lesson]) -> list[Any]:
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(tree, dtype=torch.bfloat16).eval()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tree)
    results = []
    with torch.no_grad():
        for lesson in questions:
            prompt, reply = (tokenizer(text)["input_ids"] for text in (lesson.prompt, lesson.reply))
            ids = torch.tensor([prompt + reply], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            results.append((torch.log_softmax(logits, -1).cpu(), ids[0, 1:].cpu(), len(prompt) - 1))
    return results


def compare_all(reference: list[Any], other: list[Any]) -> dict[str, float]:
    figures: dict[str, float] = {"positions": sum(len(tokens) for _, tokens, _ in reference)}
    for part in ("all", "replies"):
        numbers = compare_part(reference, other, replies=part == "replies")
        figures |= {f"{name}_{part}": number for name, number in numbers.items()}
    return figures


def compare_part(reference: list[Any], other: list[Any], *, replies: bool) -> dict[str, float]:
    import torch

    divergence, agree, lost = [], [], []
    for (expected, tokens, prompt_length), (computed, _, _) in zip(reference, other, strict=True):
        part = slice(prompt_length if replies else 0, None)
        divergence.append((expected.exp() * (expected - computed)).sum(-1)[part])
        agree.append((expected.argmax(-1) == computed.argmax(-1)).float()[part])
        lost.append(-computed.gather(-1, tokens[:, None])[part, 0])
    figures = {
        "divergence": round(float(torch.cat(divergence).mean()), 6),
        "top_agrees": round(float(torch.cat(agree).mean()), 5),
    }
    # The perplexity of a prompt has no meaning.
    return figures | (
        {"perplexity": round(float(torch.cat(lost).mean().exp()), 4)} if replies else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder with AutoRound")
    parser.add_argument("--out", type=Path, required=True)
    hint = "empty, or the directory of an earlier run to judge again"
    parser.add_argument("--work", type=Path, required=True, help=hint)
    options = parser.parse_args()
    work = options.work.resolve()
    values = rescale_channels(5)
    for name in ("16-bit", "ours", "damaged"):
        shutil.rmtree(work / name, ignore_errors=True)
    for name in ("ours", "damaged", *ITERATIONS):
        shutil.rmtree(work / f"{name}-plain", ignore_errors=True)
    repository.write_plain(work / "16-bit", TINY, values, vocabulary.train(TINY.vocabulary))
    trees = {"ours": round_to_nearest(values, work / "ours")}
    for name, iters in ITERATIONS.items():
        trees[name] = quantize_by_autoround(iters, values, work / name, options.packages)
    seconds = {name: read_state(work / name)["seconds_of_last_run"] for name in ITERATIONS}
    trees["damaged"] = swap_experts(trees["tuned"], work / "damaged")
    questions = make_drills(2, 60) + lessons.fixed()
    reference = compute_answers(work / "16-bit", questions)
    plain = {name: dequantize(tree, work / f"{name}-plain") for name, tree in trees.items()}
    figures = {
        name: compare_all(reference, compute_answers(tree, questions))
        for name, tree in plain.items()
    }
    done = read_state(work / "tuned")
    perplexity = compare_all(reference, reference)["perplexity_replies"]
    write(options.out, figures, seconds, perplexity, done["versions"])


def write(
    out: Path,
    figures: dict[str, Any],
    seconds: dict[str, float],
    perplexity: float,
    quantiser: dict[str, str],
) -> None:
    mean = {name: numbers["divergence_all"] for name, numbers in figures.items()}
    rows = [
        row(f"{name}: how far from the model in 16 bits", None, [name],
            **numbers, **({"seconds": seconds[name]} if name in seconds else {}))
        for name, numbers in figures.items()
    ]  # fmt: skip
    judged = {
        "tuned by AutoRound, nearer to 16 bits than AutoRound's rounding to nearest": (
            mean["tuned"] < mean["nearest"]
        ),
        "tuned by AutoRound, nearer to 16 bits than plain rounding": mean["tuned"] < mean["ours"],
        "the same with two experts swapped is further away": (
            mean["damaged"] > 1.25 * mean["tuned"]
        ),
    }
    rows += [row(claim, passed, []) for claim, passed in judged.items()]
    document = {
        **stages.environment(),
        "seed": 5,
        "quantiser": quantiser,
        "caveats": CAVEATS,
        "settings": {**SETTINGS, "iters": ITERATIONS["tuned"], "perplexity_16_bit": perplexity},
        "rows": rows,
    }
    write_result(out / "requantize.json", document)
    print_rows(rows)


if __name__ == "__main__":
    main()
