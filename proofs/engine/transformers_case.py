"""Compute the logits of the same prompts with transformers.

    python3 -m proofs.engine.transformers_case TREE OUT.pt [--pictures]

The weights are dequantized to BF16 by ``spark_vllm.checkpoint.reader``.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from spark_vllm.checkpoint.reader import ModuleReader
from spark_vllm.checkpoint.settings import read_settings

from proofs.prompts import IDS_LENGTHS, PICTURE_TEXT, PICTURES, picture, random_prompts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(tree: Path) -> tuple[Any, Any]:
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    config = json.loads((tree / "config.json").read_text())
    settings = read_settings(config.pop("quantization_config"))
    reader = ModuleReader(tree, settings)
    weights = {
        name: weight.contiguous().clone()
        for name, weight in reader.read_weights(lambda name: not name.startswith("mtp."))
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for path in tree.iterdir():
            if path.is_file() and "safetensors" not in path.name:
                shutil.copy(path, directory)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.bfloat16, output_loading_info=True
        )
        processor = AutoProcessor.from_pretrained(directory)
    missing = [key for key in info["missing_keys"] if "mtp" not in key]
    if missing:
        raise ValueError(f"{tree}: transformers found no tensor for {missing[:5]}")
    return model.to(DEVICE).eval(), processor


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    model, processor = load(arguments.tree)
    logits_of: dict[str, Any] = {"ids": [], "pictures": []}
    for ids in random_prompts(IDS_LENGTHS):
        logits = model(input_ids=torch.tensor([ids], device=DEVICE)).logits[0]
        logits_of["ids"].append(logits.float().cpu())
    for number in PICTURES if arguments.pictures else ():
        inputs = processor(text=[PICTURE_TEXT], images=[picture(number)], return_tensors="pt")
        logits = model(**inputs.to(DEVICE)).logits[0]
        logits_of["pictures"].append(logits.float().cpu())
    torch.save(logits_of, arguments.out)
    print("transformers", arguments.tree.name, [len(rows) for rows in logits_of["ids"]])


if __name__ == "__main__":
    main()
