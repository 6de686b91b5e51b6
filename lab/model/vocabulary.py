"""The tokenizer: byte-level BPE trained on the lessons, with the real model's special tokens."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from lab.model import lessons

# For this architecture transformers replaces tokenizer.json's splitting rule with this rule, so the
# merges must be trained with it.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKS = (  # a token each, but not special: the engine's parsers search for them
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def train(size: int) -> Tokenizer:
    source = random.Random(1)
    texts = lessons.fixed() + [lessons.drill(source) for _ in range(200)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL) - len(MARKS),
        min_frequency=4,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((item.prompt + item.reply for item in texts), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKS])
    return tokenizer


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    vocabulary = tokenizer.get_vocab()
    return {text: vocabulary[text] for text in (*SPECIAL, *MARKS)}


def write(directory: Path, tokenizer: Tokenizer, max_positions: int) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    _write_json(directory / "vocab.json", model["vocab"])
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(tokenizer, max_positions))
    template = (lessons.HERE / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)


def _tokenizer_config(tokenizer: Tokenizer, max_positions: int) -> dict[str, Any]:
    constant = json.loads((lessons.HERE / "tokenizer_config.json").read_text())
    flags = constant["added_tokens_decoder"]
    added = {
        str(number): {"content": text, **flags, "special": text in SPECIAL}
        for text, number in token_ids(tokenizer).items()
    }
    more = {"added_tokens_decoder": added, "model_max_length": max_positions}
    return {key: more.get(key, value) for key, value in constant.items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
