"""Train the vision tower of the lab's model to name colors, from a seed.

    python3 -m proofs.releases.eyes OUT.npz

The text model, rounded as stored, is trained too and keeps the lessons; then the drafter follows.
Takes some minutes on a CPU core.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from lab.model import lessons, training, vocabulary
from lab.model import weights as stored
from lab.model.network import Network, load_state, state, take_step
from lab.model.original import Floats
from lab.model.shape import TINY, model_config
from proofs.prompts import COLORS, SEVERAL_PICTURES, SINGLE_PICTURE

SEED, STEPS = 11, 400
SIDE = 4
"""Patches along an edge of a picture; each is 16 pixels wide."""
JITTER = 12
TOWER_RATE, TEXT_RATE = 2e-3, 1e-3
VISION = "model.visual."
CONTENT = "<|vision_start|>{}<|vision_end|>"
PAD = "<|image_pad|>"
LEAST_MARGIN = 1.0


@dataclass(frozen=True)
class Seen:
    tokens: Tensor
    labels: Tensor
    pixels: Tensor
    grid: Tensor


def picture(rgb: tuple[int, ...]) -> Tensor:
    channels = (torch.tensor(rgb, dtype=torch.float32) / 255 - 0.5) / 0.5
    patch = channels.repeat_interleave(TINY.temporal_patch * TINY.patch**2)
    return patch.expand(SIDE * SIDE, -1)


def make_lesson(names: tuple[str, ...]) -> lessons.Lesson:
    pads = PAD * (SIDE // TINY.merge) ** 2
    shown = CONTENT.format(pads) * len(names)
    messages = [
        {
            "role": "user",
            "content": shown + (SINGLE_PICTURE if len(names) == 1 else SEVERAL_PICTURES),
        }
    ]
    prompt = lessons.render(messages, thinking=False)
    return lessons.Lesson(prompt, " ".join(names) + lessons.END_OF_TURN)


def make_batch(
    tokenizer: Any, several: list[tuple[str, ...]], source: random.Random | None
) -> Seen:
    batch = training.encode(tokenizer, [make_lesson(names) for names in several])
    pixels = []
    for name in (name for names in several for name in names):
        moved = [c + (source.randint(-JITTER, JITTER) if source else 0) for c in COLORS[name]]
        pixels.append(picture(tuple(min(255, max(0, value)) for value in moved)))
    grid = torch.tensor([[1, SIDE, SIDE]] * len(pixels))
    return Seen(batch.tokens, batch.labels, torch.cat(pixels), grid)


def draw_colors(source: random.Random) -> list[tuple[str, ...]]:
    count = source.choice((1, 2, 2, 3))
    return [tuple(source.choice(list(COLORS)) for _ in range(count)) for _ in range(12)]


class Model:
    def __init__(self, weights: dict[str, Floats], ids: dict[str, int]) -> None:
        self.network = Network(TINY)
        load_state(self.network, weights)
        self.network.round_weights()
        config = Qwen3_5MoeConfig(**model_config(TINY, ids))
        self.whole = Qwen3_5MoeForConditionalGeneration(config).float()
        self.whole.model.language_model = self.network.model
        self.whole.lm_head = self.network.lm_head
        self.image_id = ids[PAD]
        self.visual = self.whole.model.visual
        for name, value in self.visual.state_dict().items():
            value.copy_(torch.from_numpy(weights[VISION + name]))

    def hidden(self, batch: Seen) -> Tensor:
        hidden: Tensor = self.whole.model(
            input_ids=batch.tokens,
            pixel_values=batch.pixels,
            image_grid_thw=batch.grid,
            mm_token_type_ids=(batch.tokens == self.image_id).int(),
            use_cache=False,
        ).last_hidden_state
        return hidden

    def loss(self, batch: Seen) -> Tensor:
        hidden = self.hidden(batch)
        return training.loss_of(self.network, hidden[:, :-1], batch.labels[:, 1:])


def smallest_margin(model: Model, tokenizer: Any) -> float:
    names = list(COLORS)
    batches = [[(name,) for name in names], [(a, b) for a in names for b in names]]
    batches.append([(names[n], names[(2 * n + 1) % 6], names[(5 * n + 3) % 6]) for n in range(6)])
    least = float("inf")
    for several in batches:
        batch = make_batch(tokenizer, several, None)
        with torch.no_grad(), parametrize.cached():
            hidden = model.hidden(batch)[:, :-1]
            least = min(least, training.lead(model.network, hidden, batch.labels[:, 1:]))
    return least


def teach(model: Model, tokenizer: Any, steps: int, taught: Iterator[training.Batch]) -> None:
    source = random.Random(SEED)
    text = [
        parameter
        for name, parameter in model.network.named_parameters()
        if not name.startswith("mtp.")
    ]
    tower = list(model.visual.parameters())
    for name, parameter in model.network.named_parameters():
        parameter.requires_grad_(not name.startswith("mtp."))
    groups = [{"params": tower, "lr": TOWER_RATE}, {"params": text, "lr": TEXT_RATE}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
    rates = [group["lr"] for group in groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * training._rate(step, steps)
        with parametrize.cached():
            picture_loss = model.loss(make_batch(tokenizer, draw_colors(source), source))
            lesson_loss = (
                training.main_loss(model.network, next(taught)) if step % 2 else 0 * picture_loss
            )
        take_step(optimizer, picture_loss + lesson_loss)
        if step % 20 == 1 or step == steps - 1:
            print(
                f"phase=eyes step={step} pictures={picture_loss:.4f} lessons={lesson_loss:.4f}",
                flush=True,
            )


def train(steps: int) -> dict[str, Floats]:
    """Raises ValueError if colors or lessons are not known well enough."""
    torch.manual_seed(SEED)
    torch.set_flush_denormal(True)
    tokenizer = vocabulary.train(TINY.vocabulary)
    model = Model(stored.read(TINY), vocabulary.token_ids(tokenizer))
    schedule = training.Schedule()
    taught = training.batches(tokenizer, schedule)
    for tries_left in (2, 1, 0):
        teach(model, tokenizer, steps, taught)
        margins = smallest_margin(model, tokenizer), training.least_margin(model.network, tokenizer)
        print(f"phase=verify pictures={margins[0]:.2f} lessons={margins[1]:.2f}", flush=True)
        if margins[0] >= LEAST_MARGIN and margins[1] >= schedule.margin:
            break
        if not tries_left:
            raise ValueError(f"margins of {margins}: give it more steps")
    training._run(model.network, taught, replace(schedule, mtp_steps=60), mtp=True)
    tower = {f"{VISION}{name}": value for name, value in model.visual.state_dict().items()}
    return {name: value.cpu().numpy() for name, value in {**state(model.network), **tower}.items()}


def main() -> None:
    torch.set_num_threads(1)
    tensors = train(STEPS)
    np.savez_compressed(sys.argv[1], **tensors)
    print(f"phase=written tensors={len(tensors)}", file=sys.stderr)


if __name__ == "__main__":
    main()
