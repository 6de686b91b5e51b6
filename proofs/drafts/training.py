"""Train the draft models for the lab's model from a seed; takes minutes.

    python3 -m proofs.drafts.training OUT [--only eagle3] [--steps 800]

Writes ``KIND/weights.npz`` (BF16) and ``drafts-training.json``. Labels are the target's greedy
answers. The prompts of the proofs are excluded.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parametrize

from lab.model import lessons, vocabulary
from lab.model import weights as trained
from lab.model.lessons import Lesson
from lab.model.network import Network, load_state, take_step
from lab.model.rounding import bf16_bits
from lab.model.shape import TINY
from proofs.drafts.network import DFlash, Draft, Eagle3
from proofs.drafts.trees import LAYERS, SEEN_LAYERS, TOKENS
from proofs.prompts import questions
from proofs.recall import weights
from proofs.result_files import write_result

SEED, DRILL_SEED, HELD_OUT_SEED = 5, 17, 18
DRILLS = 900
RATE = 1.5e-3
ROWS, ANCHORS = 24, 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Text:
    tokens: Tensor
    start: int
    seen: Tensor


def proof_prompts() -> set[str]:
    chats = [[{"role": "user", "content": text}] for text in questions({})]
    return {lessons.render(chat, thinking=True) for chat in chats}


def make_lessons() -> list[Lesson]:
    source = random.Random(DRILL_SEED)
    drills = [lessons.drill(source) for _ in range(DRILLS)]
    facts = [lesson for system in lessons.systems()[1:] for lesson in lessons.fixed(system)]
    known = proof_prompts()
    return [lesson for lesson in drills + 4 * facts if lesson.prompt not in known]


def make_held_out() -> dict[str, list[Lesson]]:
    """Return prompts excluded from training: those of the proofs, and other drills."""
    source = random.Random(HELD_OUT_SEED)
    known, learnt = proof_prompts(), {lesson.prompt for lesson in make_lessons()}
    drills = [lessons.drill(source) for _ in range(80)]
    return {
        "asked": [lesson for lesson in lessons.fixed() if lesson.prompt in known],
        "drills": [lesson for lesson in drills if lesson.prompt not in learnt],
    }


def make_target() -> Network:
    network = Network(TINY)
    load_state(network, trained.read(TINY))
    network.round_weights()
    return network.to(DEVICE).eval()


@torch.no_grad()
def make_texts(target: Network, wanted: list[Lesson]) -> Iterator[Text]:
    tokenizer = vocabulary.train(TINY.vocabulary)
    caught: dict[int, Tensor] = {}
    hooks = [
        target.model.layers[layer].register_forward_hook(
            lambda _module, _given, out, layer=layer: caught.update({layer: out})
        )
        for layer in SEEN_LAYERS
    ]
    rows = [
        (tokenizer.encode(lesson.prompt).ids, tokenizer.encode(lesson.reply).ids)
        for lesson in wanted
    ]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    with parametrize.cached():
        for at in range(0, len(rows), 16):
            part = [torch.tensor(prompt + reply) for prompt, reply in rows[at : at + 16]]
            batch = torch.nn.utils.rnn.pad_sequence(part, True).to(DEVICE)
            best = target.lm_head(target(batch)).argmax(-1)
            seen = torch.cat([caught[layer] for layer in SEEN_LAYERS], -1).bfloat16().cpu()
            for place, (prompt, reply) in enumerate(rows[at : at + 16]):
                start, end = len(prompt), len(prompt) + len(reply)
                own = best[place, start - 1 : end - 1] == batch[place, start:end]
                end = start + int(own.long().cumprod(0).sum())
                yield Text(batch[place, :end].cpu(), start, seen[place, :end])
    for hook in hooks:
        hook.remove()


def batch_of(chosen: list[Text], source: random.Random, anchors: int) -> tuple[Tensor, ...]:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([text.tokens for text in chosen], True)
    seen = pad([text.seen for text in chosen], True).float()
    places, labels = [], []
    for text in chosen:
        # From the prompt's last token: the next token is known, the tokens after it are drafted.
        able = list(range(text.start - 1, len(text.tokens) - 2)) or [0]
        picked = source.sample(able, anchors) if len(able) > anchors else able
        picked = picked + [-1] * (anchors - len(picked))
        places.append(torch.tensor([max(place, 0) for place in picked]))
        ahead = [
            [
                int(text.tokens[place + 2 + step])
                if place >= 0 and place + 2 + step < len(text.tokens)
                else -100
                for step in range(TOKENS)
            ]
            for place in picked
        ]
        labels.append(torch.tensor(ahead))
    batch = (tokens, seen, torch.stack(places), torch.stack(labels))
    return tuple(part.to(DEVICE) for part in batch)


def train(draft: Draft, target: Network, known: list[Text], steps: int) -> list[dict[str, Any]]:
    source = random.Random(SEED)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.05)
    embedding = target.model.embed_tokens.weight.detach()
    head = target.lm_head.weight.detach()
    by_length = sorted(known, key=lambda text: len(text.tokens))
    log, started = [], time.monotonic()
    for step in range(steps):
        at = source.randrange(max(1, len(by_length) - 2 * ROWS))
        chosen = source.sample(by_length[at : at + 2 * ROWS], min(ROWS, len(by_length)))
        tokens, seen, anchors, labels = batch_of(chosen, source, ANCHORS)
        hidden = draft(embedding, tokens, seen, anchors)
        logits = functional.linear(hidden, head)
        loss = functional.cross_entropy(logits.flatten(0, 2), labels.flatten())
        take_step(optimizer, loss)
        schedule.step()
        if step % 200 == 0 or step == steps - 1:
            row = {"step": step, "loss": round(loss.item(), 3)}
            log.append(row | {"s": round(time.monotonic() - started, 1)})
            print(json.dumps(log[-1]), file=sys.stderr, flush=True)
    return log


@torch.no_grad()
def acceptance_rate(draft: Draft | None, target: Network, known: list[Text]) -> float:
    """Return the acceptance rate of ``draft``; of perfect drafts if None."""
    kept = drafted = 0
    embedding = target.model.embed_tokens.weight
    for text in known:
        count = max(1, len(text.tokens) - 1 - text.start)
        tokens, seen, anchors, labels = batch_of([text], random.Random(0), count)
        best = labels
        if draft is not None:
            hidden = draft(embedding, tokens, seen, anchors)
            best = functional.linear(hidden, target.lm_head.weight).argmax(-1)
        right = ((best == labels) & (labels >= 0))[0].long().cumprod(-1).sum(-1).tolist()
        at = 0
        while at < len(right):
            kept, drafted = kept + right[at], drafted + TOKENS
            at += right[at] + 1
    return round(kept / max(1, drafted), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=[*LAYERS])
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    target = make_target()
    known = list(make_texts(target, make_lessons()))
    others = {name: list(make_texts(target, wanted)) for name, wanted in make_held_out().items()}
    print(len(known), {name: len(part) for name, part in others.items()}, file=sys.stderr)
    seen: dict[str, Any] = {}
    for make in (DFlash, Eagle3):
        if arguments.only not in (None, make.kind):
            continue
        draft = make(SEED).to(DEVICE)
        before = {name: acceptance_rate(draft, target, part) for name, part in others.items()}
        log = train(draft, target, known, arguments.steps)
        after = {name: acceptance_rate(draft, target, part) for name, part in others.items()}
        most = {name: acceptance_rate(None, target, part) for name, part in others.items()}
        seen[draft.kind] = {"untrained": before, "accepted": after, "at_most": most, "log": log}
        print(json.dumps(seen[draft.kind] | {"log": None}), file=sys.stderr, flush=True)
        (arguments.out / draft.kind).mkdir(exist_ok=True)
        weights.write(
            arguments.out / draft.kind,
            {
                name.replace("/", "."): bf16_bits(value.detach().cpu().numpy())
                for name, value in draft.held.items()
            },
        )
    write_result(arguments.out / "drafts-training.json", seen)


if __name__ == "__main__":
    main()
