"""Trains `lab-tiny` on the CPU until the rounded model answers the lessons."""

import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parametrize

from lab.errors import LabError
from lab.model import lessons, original
from lab.model.lessons import Lesson
from lab.model.network import Network, state, take_step
from lab.model.original import Floats
from lab.model.shape import Shape

SEED = 7
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Schedule:
    steps: int = 400
    exact_steps: int = 300  # before the weights are rounded
    mtp_steps: int = 80
    tokens_per_step: int = 1000
    drills_per_round: int = 70
    long_sentences: int = 60
    rate: float = 2e-3
    threads: int = 1
    margin: float = 0.5  # of logits; BF16 arithmetic moves them by about a tenth of that


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor
    labels: Tensor


def encode(tokenizer: Tokenizer, batch_lessons: list[Lesson]) -> Batch:
    rows, targets = [], []
    for lesson in batch_lessons:
        prompt = tokenizer.encode(lesson.prompt).ids
        reply = tokenizer.encode(lesson.reply).ids
        rows.append(torch.tensor(prompt + reply))
        targets.append(torch.tensor([IGNORED] * len(prompt) + reply))
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(pad(rows, True), pad(targets, True, IGNORED))


def batches(tokenizer: Tokenizer, schedule: Schedule) -> Iterator[Batch]:
    source = random.Random(SEED)
    while True:
        batch_lessons = lessons.fixed(source.choice(lessons.systems()))
        batch_lessons += [lessons.drill(source) for _ in range(schedule.drills_per_round)]
        batch_lessons.append(lessons.needle_drill(source, schedule.long_sentences))
        batch_lessons.sort(
            key=lambda lesson: len(lesson.prompt + lesson.reply) + 20 * source.random()
        )
        ready = [encode(tokenizer, part) for part in _cut(tokenizer, batch_lessons, schedule)]
        source.shuffle(ready)
        yield from ready


def _cut(
    tokenizer: Tokenizer, batch_lessons: list[Lesson], schedule: Schedule
) -> Iterator[list[Lesson]]:
    part: list[Lesson] = []
    longest = 0
    for lesson in batch_lessons:
        longest = max(longest, len(tokenizer.encode(lesson.prompt + lesson.reply).ids))
        if part and longest * (len(part) + 1) > schedule.tokens_per_step:
            yield part
            part = []
        part.append(lesson)
    yield part


def loss_of(network: Network, hidden: Tensor, labels: Tensor) -> Tensor:
    labelled = labels != IGNORED
    return functional.cross_entropy(network.lm_head(hidden[labelled]), labels[labelled])


def main_loss(network: Network, batch: Batch) -> Tensor:
    hidden = network(batch.tokens)
    return loss_of(network, hidden[:, :-1], batch.labels[:, 1:])


def mtp_loss(network: Network, batch: Batch) -> Tensor:
    with torch.no_grad():
        hidden = network(batch.tokens)
    first = network.draft(batch.tokens, hidden)
    second = network.draft(batch.tokens[:, 1:], first)
    return loss_of(network, first[:, :-1], batch.labels[:, 2:]) + loss_of(
        network, second[:, :-1], batch.labels[:, 3:]
    )


def _optimizer(network: Network, names: tuple[str, ...], rate: float) -> torch.optim.AdamW:
    chosen = [parameter for name, parameter in network.named_parameters() if name.startswith(names)]
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(names))
    return torch.optim.AdamW(chosen, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def _rate(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 20)
    return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(network: Network, source: Iterator[Batch], schedule: Schedule, mtp: bool) -> None:
    steps = schedule.mtp_steps if mtp else schedule.steps
    names = ("mtp.",) if mtp else ("model.", "lm_head.")
    optimizer = _optimizer(network, names, schedule.rate)
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * _rate(step, steps)
        if not mtp and step == schedule.exact_steps:
            network.round_weights()
        with parametrize.cached():
            loss = (mtp_loss if mtp else main_loss)(network, next(source))
        take_step(optimizer, loss)
        if step % 20 == 0 or step == steps - 1:
            part = "train-mtp" if mtp else "train"
            seconds = time.monotonic() - started
            _log(f"phase={part} step={step} steps={steps} loss={loss.item():.4f} s={seconds:.0f}")


def lead(network: Network, hidden: Tensor, labels: Tensor) -> float:
    labelled = labels != IGNORED
    scores, right = network.lm_head(hidden[labelled]), labels[labelled].unsqueeze(1)
    others = scores.scatter(1, right, -math.inf).amax(1)
    return float((scores.gather(1, right).squeeze(1) - others).min())


def least_margin(network: Network, tokenizer: Tokenizer) -> float:
    least = math.inf
    for lesson in lessons.fixed():
        batch = encode(tokenizer, [lesson])
        with torch.no_grad(), parametrize.cached():
            least = min(least, lead(network, network(batch.tokens)[:, :-1], batch.labels[:, 1:]))
    return least


def train_network(shape: Shape, tokenizer: Tokenizer, schedule: Schedule) -> Network:
    torch.manual_seed(SEED)
    torch.set_flush_denormal(True)  # decayed states become denormal and slow
    torch.set_num_threads(schedule.threads)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # twice as fast on CPUs with support
    network = Network(shape)
    source = batches(tokenizer, schedule)
    _run(network, source, schedule, mtp=False)
    more = replace(schedule, steps=schedule.steps // 3, exact_steps=0, rate=schedule.rate / 2)
    for tries_left in (2, 1, 0):
        margin = least_margin(network, tokenizer)
        _log(f"phase=verify margin={margin:.2f} labelled={schedule.margin}")
        if margin >= schedule.margin:
            break
        if not tries_left:
            raise LabError(
                "lab.model",
                f"the trained model answers with a margin of {margin:.2f}, not {schedule.margin}",
                "give Schedule in lab/model/training.py more steps or another rate",
            )
        _run(network, source, more, mtp=False)
    _run(network, source, schedule, mtp=True)
    return network


def train(shape: Shape, tokenizer: Tokenizer) -> dict[str, Floats]:
    network = train_network(shape, tokenizer, Schedule())
    weights = original.random_weights(shape, SEED)
    for name, value in state(network).items():
        if weights[name].shape != tuple(value.shape):
            raise ValueError(f"{name}: trained {tuple(value.shape)}, stored {weights[name].shape}")
        weights[name] = value.numpy()
    return weights
