"""Runs inside the engine's container: AutoRound on /model, its tree in /work/made.

Nothing of ours is there but this file and its order; torch and transformers are the image's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("SPARK_ROOT", "/"))  # elsewhere where a benchmark runs this
MODEL, WORK, TEXT, PACKAGES = (
    ROOT / name for name in ("model", "work", "calibration.jsonl", "packages")
)
MADE, SCRATCH = WORK / "made", WORK / "scratch"
GROUP = 128


def main() -> None:
    """Quantise, or go on where an earlier container ended."""
    # As the first process of a container it would not be ended by the default action.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    order = json.loads((WORK / "order.json").read_text())
    prepare_environment()
    sys.path.append(str(PACKAGES))  # behind the image's own
    tree = quantise(order)
    versions = {name: version(name) for name in ("auto-round", "torch", "transformers")}
    seconds = round(time.monotonic() - began)
    done = {"tree": tree.name, "versions": versions, "seconds_of_last_run": seconds}
    write_json(WORK / "done.json", done)


def prepare_environment() -> None:
    """Say, before AutoRound is imported, where it keeps what and what it leaves to us."""
    os.environ |= {
        "AR_RESUME_DIR": str(WORK / "resume"),
        "AR_DISK_STREAM_MODEL": "1",  # one block in memory at a time
        "AR_DISABLE_COPY_MTP_WEIGHTS": "1",
        "AR_WORK_SPACE": str(SCRATCH),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(SCRATCH / "hf"),
    }


def quantise(order: dict[str, Any]) -> Path:
    """Have AutoRound pack exactly the modules of the order; return where it wrote them."""
    import torch
    from auto_round import AutoRound
    from auto_round.utils.missing_tensors import copy_missing_tensors_from_source

    torch.set_num_threads(os.cpu_count() or 1)
    packed = set(order["int4"])
    on_gpu = torch.cuda.is_available()
    rounding = AutoRound(
        str(MODEL),
        scheme="W4A16",
        iters=order["iters"],
        nsamples=order["nsamples"],
        seqlen=order["seqlen"],
        batch_size=order["batch"],
        dataset=pieces(order) if order["iters"] else None,
        layer_config={name: {"bits": 16, "data_type": "float"} for name in kept(packed)},
        device_map=0 if on_gpu else "cpu",
        enable_torch_compile=on_gpu,
        disable_opt_rtn=not order["iters"],  # nearest, or it would read text for that as well
        disable_model_free=True,
        seed=42,
    )
    rounding.quantize_and_save(output_dir=str(MADE), format="auto_round")
    [config] = MADE.glob("*/config.json")
    tree = config.parent
    say_what_of_the_drafter_stays(config, order["drafter_kept"])
    copy_missing_tensors_from_source(str(MODEL), str(tree))
    for path in sorted(MODEL.iterdir()):
        # Tokenizer, templates and processors as they were published, not as they are written again.
        is_weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name not in ("config.json", "receipt.json"):
            shutil.copyfile(path, tree / path.name)
    return tree


def pieces(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the text in batches of pieces of the same length.

    AutoRound would read the file itself, but through a pool of processes and a cache that need more
    than a container without a network has.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [json.loads(line)["text"] for line in TEXT.read_text().splitlines()]
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    wanted = order["nsamples"] * order["seqlen"]
    if len(tokens) < wanted:
        sys.exit(f"the text has {len(tokens)} tokens, nsamples times seqlen are {wanted}")
    # From all of it: texts of one kind often stand together.
    length = order["seqlen"]
    starts = [index * (len(tokens) - length) // order["nsamples"]
              for index in range(order["nsamples"])]  # fmt: skip
    rows = torch.tensor([tokens[start : start + length] for start in starts])
    return [{"input_ids": batch, "use_cache": False} for batch in rows.split(order["batch"])]


def kept(packed: set[str]) -> list[str]:
    """Return the linear modules of the language model that stay in 16 bits."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(MODEL))
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name for name in linear if ".layers." in name and name not in packed]


def say_what_of_the_drafter_stays(config: Path, kept: list[str]) -> None:
    """Have config.json name what stays in 16 bits of the layer that AutoRound never loads."""
    content = json.loads(config.read_text())
    per_module = content["quantization_config"].setdefault("extra_config", {})
    per_module.update({name: {"bits": 16, "data_type": "float"} for name in kept})
    write_json(config, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is there as a whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


if __name__ == "__main__":
    main()
