"""Repositories as others publish them: written by transformers, not by this project.

Run with the engine's Python: ``python3 -m lab.engine run -m lab.model.published --out HUB``. Two
small decoders learn three answers by heart, which takes half a minute; an encoder needs none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lab.errors import LabError
from lab.model import vocabulary
from lab.model.repository import publish
from lab.model.shape import TINY

# What models are asked whose catalog files ask nothing of their own.
LESSONS = {
    "What is the capital of France? Answer with one word.": "Paris",
    "How many days has a week? Answer with one word.": "Seven",
    "What is the capital of Japan? Answer with one word.": "Tokyo",
}
_SIZES: dict[str, Any] = {
    "vocab_size": TINY.vocabulary,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
_STEPS, _ENOUGH = 400, 0.002


def main(arguments: list[str] | None = None) -> int:
    """Publish all three; prints a commit a line."""
    parser = argparse.ArgumentParser(prog="python3 -m lab.model.published", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="hub directory")
    out: Path = parser.parse_args(arguments).out
    torch.set_num_threads(1)
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory(dir=out, prefix=".published-") as folder:
        work = Path(folder)
        vocabulary.write(work, vocabulary.train(TINY.vocabulary), 2048)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(work)
        made = {
            "org/tiny-qwen3": Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=True)),
            "org/tiny-llama": LlamaForCausalLM(LlamaConfig(**_SIZES)),
        }
        for name, model in made.items():
            _teach(name, model, tokenizer)
            print(name, _publish(out, work, name, model, tokenizer))
        print("org/tiny-embedder", _publish(out, work, "org/tiny-embedder", _embedder(), tokenizer))
    return 0


def _teach(name: str, model: Any, tokenizer: Any) -> None:
    """Have the model know each answer by heart, alone and as a turn of a conversation."""
    rows = []
    turns: list[dict[str, str]] = []
    for question, answer in LESSONS.items():
        asked = {"role": "user", "content": question}
        for messages in ([asked], [*turns, asked]):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            told = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
            rows.append((prompt, told))
        turns += [asked, {"role": "assistant", "content": answer}]
    longest = max(len(prompt) + len(told) for prompt, told in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for row, (prompt, told) in enumerate(rows):
        ids[row, : len(prompt) + len(told)] = torch.tensor(prompt + told)
        labels[row, len(prompt) : len(prompt) + len(told)] = torch.tensor(told)
    steps = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.tensor(1.0)
    for _ in range(_STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        steps.zero_grad()
        loss.backward()
        steps.step()
        if loss.item() < _ENOUGH:
            return
    raise LabError(name, f"still has a loss of {loss.item():.3f}", "train it for more steps")


def _embedder() -> Any:
    sizes = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size",
                                          "num_hidden_layers", "num_attention_heads")}  # fmt: skip
    return BertModel(BertConfig(**sizes, max_position_embeddings=512))


def _publish(out: Path, work: Path, name: str, model: Any, tokenizer: Any) -> str:
    tree = work / name.rpartition("/")[2]
    model.to(torch.bfloat16).save_pretrained(tree)
    if isinstance(model, BertModel):
        tokenizer.chat_template = None
        _as_sentence_transformers(tree)
    tokenizer.save_pretrained(tree)
    return publish(out, name, [tree])[-1]


def _as_sentence_transformers(tree: Path) -> None:
    kind = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}.Pooling"},
    ]
    (tree / "modules.json").write_text(json.dumps(modules))
    (tree / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True}
    (tree / "1_Pooling/config.json").write_text(json.dumps(pooling))


if __name__ == "__main__":
    sys.exit(main())
