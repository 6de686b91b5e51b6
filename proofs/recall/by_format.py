"""Recall and divergence of every cache format, computed by transformers' model on any machine.

    python3 -m proofs.recall.by_format WEIGHTS_DIR OUT.json [--length 4096 ...]

No engine and no kernel: attention reads keys and values as ``formats`` makes them, in the engine's
order. A prompt is read in steps of 8,192 tokens, each seeing its own tokens as they are and all
earlier ones from the cache; the questions at its end see everything from the cache, as tokens that
are decoded do. All questions stand in one prompt with their answers.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import AttentionInterface

from lab.model.network import Network
from proofs.recall import formats, judge, language, weights
from proofs.recall.formats import Preset
from proofs.recall.network import hidden_states, make_network, put_in
from proofs.recall.rows import ENOUGH, KNOWN, row, sure
from proofs.result_files import describe_run

STEP = 8192
ROWS = 512
KINDS = {"record": 48, "passage": 6, "register": 8}
Rounding = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Cache:
    """What attention reads: set before a forward pass."""

    rounding: Rounding | None = None
    tail: int = 0  # first token that sees even itself from the cache


CACHE = Cache()


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Return attention over what the cache would hold, ``[batch, tokens, heads, size]``."""
    held = CACHE.rounding(key, value) if CACHE.rounding else (key, value)
    groups = module.num_key_value_groups
    total, out = query.shape[2], []
    for start in range(0, total, ROWS):
        end = min(start + ROWS, total)
        if start < CACHE.tail < end:
            end = CACHE.tail
        out.append(_rows(query, key, value, held, (start, end), scaling, groups))
        while end < min(start + ROWS, total):
            more = min(start + ROWS, total)
            out.append(_rows(query, key, value, held, (end, more), scaling, groups))
            end = more
    return torch.cat(out, 2).transpose(1, 2), None


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    held: tuple[Tensor, Tensor],
    rows: tuple[int, int],
    scaling: float,
    groups: int,
) -> Tensor:
    start, end = rows
    fresh = end if start >= CACHE.tail else start // STEP * STEP
    k = torch.cat([held[0][:, :, :fresh], key[:, :, fresh:end].float()], 2)
    v = torch.cat([held[1][:, :, :fresh], value[:, :, fresh:end].float()], 2)
    later = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
    found = []
    for head in range(query.shape[1]):
        scores = query[:, head, start:end].float() @ k[:, head // groups].transpose(-1, -2)
        weights = (scores * scaling).masked_fill(later, -torch.inf).softmax(-1)
        found.append(weights @ v[:, head // groups])
    return torch.stack(found, 1)


def load(directory: Path) -> Network:
    """Return the trained network with its weights rounded as checkpoints store them."""
    network = make_network()
    put_in(network, weights.read(directory))
    network.round_weights()
    network.model.config._attn_implementation = "recall-cache"
    return network


def rounding_of(preset: Preset) -> Rounding:
    """Return what a preset does to keys and values."""
    return lambda key, value: (formats.keys(key, preset), formats.values(value, preset))


def noise(relative: float) -> Rounding:
    """Return keys and values that are off by a share of their size: a judge must see that."""

    def rounding(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        found = []
        for x in (key, value):
            size = x.float().pow(2).mean(-1, keepdim=True).sqrt()
            found.append(x.float() + relative * size * torch.randn(x.shape, generator=generator))
        return found[0], found[1]

    return rounding


def ask(network: Network, length: int, rounding: Rounding | None, near: bool) -> list[judge.Row]:
    """Return the answers to every question on one context."""
    made = language.context(np.random.default_rng([length, 7]), length, near=near, asks=False)
    asked = language.questions(made, length, KINDS)
    tokens, starts = made.tokens.tolist(), []
    for one in asked:
        starts.append(len(tokens) + len(one.tokens))
        tokens += [*one.tokens, *one.answer]
    CACHE.rounding, CACHE.tail = rounding, length
    places = torch.arange(len(tokens))[None]
    with torch.no_grad(), parametrize.cached():
        hidden, _ = hidden_states(network, torch.tensor([tokens]), places)
        best = functional.log_softmax(network.lm_head(hidden[0, length:]).float(), -1)
    rows = []
    for one, start in zip(asked, starts, strict=True):
        steps = best[start - 1 - length : start - 1 - length + len(one.answer)]
        said = steps.argmax(-1).tolist()
        top, ids = steps.topk(40)
        rows.append(
            {
                "kind": one.kind,
                "length": length,
                "depth": one.depth,
                "right": said == one.answer,
                "tokens": one.answer,  # given: every format is compared behind the same tokens
                "logprobs": [
                    float(step[token]) for step, token in zip(steps, one.answer, strict=True)
                ],
                "steps": [
                    {str(token): float(value) for token, value in zip(i, t, strict=True)}
                    for i, t in zip(ids.tolist(), top.tolist(), strict=True)
                ],
            }
        )
    return rows


def result_rows(found: dict[str, list[judge.Row]]) -> list[judge.Row]:
    """Judge every format against the 16-bit cache."""
    base, rows = found["16-bit"], []
    for name, answers in found.items():
        known = judge.share(sure(base, answers)) or 0.0
        claim = f"{ENOUGH:.0%} of what 16 bit finds without doubt is found"
        passed = known >= ENOUGH
        if name == "16-bit":
            claim = f"{KNOWN:.0%} is found"
            passed = (judge.share(judge.looked_up(answers)) or 0.0) >= KNOWN
        elif name.startswith("noise"):
            claim, passed = "less is found: the judge sees it", known < KNOWN
        rows.append(
            row(
                f"{name}: {claim}",
                passed,
                [name],
                answers=len(answers),
                right=judge.by_length(answers),
                right_by_depth=judge.by_depth(answers),
                divergence=judge.divergences(base, answers),
            )
        )
    return rows


def main() -> None:
    """Ask with every format and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, action="append")
    arguments = parser.parse_args()
    AttentionInterface.register("recall-cache", attention)
    torch.set_grad_enabled(False)
    network = load(arguments.weights)
    ways: dict[str, Rounding | None] = {"16-bit": None}
    ways |= {name: rounding_of(preset) for name, preset in formats.PRESETS.items()}
    ways["noise of 200 %"] = noise(2.0)
    found: dict[str, list[judge.Row]] = {name: [] for name in ways}
    for length in arguments.length or [4096, 16384, 32768]:
        for name, rounding in ways.items():
            started = time.monotonic()
            answers = ask(network, length, rounding, near=length > 4096)
            found[name] += answers
            right, spent = judge.share(answers), time.monotonic() - started
            print(f"length={length} format={name} right={right} s={spent:.0f}", flush=True)
        text = json.dumps(document(found), indent=1)  # after every length: the next takes longer
        arguments.out.write_text(text + "\n")


def document(found: dict[str, list[judge.Row]]) -> dict[str, Any]:
    """Return the result file."""
    return {
        "stage": "recall-formats",
        "command": "python3 -m proofs.recall.by_format WEIGHTS OUT",
        "seed": 0,
        **describe_run(
            f"CPU ({platform.machine()}), no GPU: formats in torch, no engine's kernel",
            *("torch", "transformers"),
        ),
        "formats": {
            name: {"bytes_per_token_and_head_of_256": preset.bytes_per_head(256)}
            for name, preset in formats.PRESETS.items()
        },
        "rows": result_rows(found),
    }


if __name__ == "__main__":
    main()
