"""Trains the recall model on a GPU, in minutes, from nothing but a seed.

    python3 -m proofs.recall.training OUT [--seed 11] [--limit-s 600]

Writes ``weights.npz`` (every exact weight, BF16) and ``recall-training.json`` (what was learnt
when, and recall by length of the network that was trained). Not every seed learns: ``race``
trains several. The forward pass is
transformers' own code but for the gated delta rule, which is ``delta_rule`` here. Towards the end
the weights are rounded as checkpoints store them (``lab.model.network``), so the rounded model is
the one that has learnt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from lab.model.network import Network, state
from proofs import stages
from proofs.recall import language, weights
from proofs.recall.network import losses, make_network, put_in, use_own_rule

SEED = 11
LEARNT = "learnt"
"""File that says that this training can look things up: nothing behind it fails for that."""
RESULT = "recall-training.json"
SPAN = 140_000
"""Positions taught, by jumps between slots."""
MTP_WEIGHT = 0.3
CAVEATS = [
    "each phase ended when enough was known or its share of the time was over, so a slower machine "
    "takes fewer steps",
    "the shares of right tokens are of a forward pass of transformers with autocast to bfloat16, "
    "not of an engine",
]


@dataclass(frozen=True)
class Phase:
    """Steps at one length; it ends early once ``until`` of the tokens that can be known are."""

    name: str
    steps: int
    rows: int
    length: int
    rate: float
    share: float  # of the time allowed, what may be over at its end
    until: float = 2.0
    rounded: bool = False


PHASES = (
    Phase("first", 2000, 128, 256, 2e-3, 0.35, until=0.9),
    Phase("short", 1500, 64, 512, 2e-3, 0.45, until=0.97),
    Phase("middle", 900, 16, 4096, 1.5e-3, 0.6, until=0.995),
    Phase("rounded", 350, 8, 8192, 1e-3, 0.72, rounded=True),
    Phase("long", 150, 2, 32768, 7e-4, 0.85, rounded=True),
    Phase("longest", 45, 1, 131072, 4e-4, 1.0, rounded=True),
)
FURTHER = (
    Phase("middle again", 900, 16, 4096, 1.2e-3, 0.45, until=0.9985, rounded=True),
    Phase("rounded again", 250, 8, 8192, 8e-4, 0.7, rounded=True),
    Phase("long again", 60, 2, 32768, 6e-4, 0.85, rounded=True),
    Phase("longest again", 20, 1, 131072, 3e-4, 1.0, rounded=True),
)
"""What follows where a training has learnt to look up and still errs."""
LOOK_STEPS = 25
NEAR = 0.01
"""A phase that ends so far below what it is for has not learnt its lesson."""


def _made(job: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    seed, rows, length = job
    tokens, labels = language.batch(seed, rows, length)
    return tokens, labels, language.positions(seed, rows, length, max(SPAN, length))


def batches(pool: Any, seed: int, number: int, phase: Phase) -> Iterator[list[Tensor]]:
    """Yield the batches of one phase, made in other processes."""
    jobs = [
        (seed + 1_000_000 * (number + 1) + step, phase.rows, phase.length)
        for step in range(phase.steps)
    ]
    for arrays in pool.imap(_made, jobs, chunksize=4):
        yield [torch.from_numpy(array) for array in arrays]


class Run:
    """One training: the network, its optimizer, and what was seen on the way."""

    def __init__(self, device: str, limit_s: float, seed: int, further: Path | None) -> None:
        self.device, self.limit_s, self.seed, self.further = device, limit_s, seed, further
        self.seen: dict[str, Any] = {"log": []}
        self.done = 0

    def start(self) -> None:
        """Make the network on its device, with the weights it goes on from."""
        device = self.device
        self.seen["rule_differs_by"] = use_own_rule(device)
        network = make_network(self.seed)
        if self.further:
            put_in(network, weights.read(self.further))
        self.network = network.to(device)
        parameters = list(self.network.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=(0.9, 0.98),
            fused=device == "cuda",
        )
        self.started = time.monotonic()

    def spent_s(self) -> float:
        """Return how long it has been training."""
        return time.monotonic() - self.started

    def phase(self, phase: Phase, source: Iterator[list[Tensor]]) -> float:
        """Train one phase, at most until its share of the time is over; return what is known."""
        known = 0.0
        recent: list[Tensor] = []
        if phase.rounded:
            self.network.round_weights()
        for step, batch in enumerate(source):
            warm = min(1.0, (self.done + 1) / 100) * min(1.0, (step + 1) / 20)
            for group in self.optimizer.param_groups:
                group["lr"] = phase.rate * warm * (1 - 0.6 * step / phase.steps)
            found = self.step(batch)
            recent.append(found["right1"])
            look = step % (LOOK_STEPS if phase.steps > 100 else 5) == 0
            if not look and step != phase.steps - 1:
                continue
            self.note(phase, step, found)
            known = torch.stack(recent[-LOOK_STEPS:]).mean().item()
            if step >= LOOK_STEPS and known > phase.until:
                break
            if self.spent_s() > self.limit_s * phase.share:
                break
        return known

    def step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """Take one step; return its losses."""
        arrays = [array.to(self.device, non_blocking=True) for array in batch]
        with parametrize.cached(), torch.autocast(self.device, torch.bfloat16):
            found = losses(self.network, *arrays)
            loss = found["loss1"] + MTP_WEIGHT * (found["loss2"] + 0.5 * found["loss3"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return found

    def note(self, phase: Phase, step: int, found: dict[str, Tensor]) -> None:
        """Keep and print one line."""
        row = {name: round(value.item(), 4) for name, value in found.items()}
        row = {"phase": phase.name, "step": step, "s": round(self.spent_s(), 1), **row}
        self.seen["log"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)


def train(run: Run, phases: tuple[Phase, ...], workers: int, learnt: Path) -> None:
    """Train all phases; ``learnt`` is written once the last lesson has been learnt.

    Raises:
        ValueError: A phase ended without what the next one builds on.
    """
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        next(iter(batches(pool, run.seed, 99, phases[0])))  # every worker runs before the device is
        run.start()
        for number, phase in enumerate(phases):
            known = run.phase(phase, batches(pool, run.seed, number, phase))
            if known < phase.until - NEAR and phase.until <= 1:
                raise ValueError(
                    f"{known:.3f} of what can be known is known after phase {phase.name}, not "
                    f"{phase.until}: nothing learns behind that; train again"
                )
            if phase.until <= 1 and all(later.until > 1 for later in phases[number + 1 :]):
                learnt.touch()
        pool.terminate()
    run.seen |= {"steps": run.done, "seconds": round(run.spent_s(), 1)}


def recall(network: Network, device: str, length: int, rows: int) -> dict[str, Any]:
    """Return the share of right tokens at one length, positions without jumps, by distance."""
    right, right2, total = 0.0, 0.0, 0
    for row in range(rows):
        tokens, labels = language.batch(SEED + 5_000_000 + length + row, 1, length)
        places = torch.arange(length)[None].to(device)
        with torch.no_grad(), parametrize.cached(), torch.autocast(device, torch.bfloat16):
            found = losses(
                network,
                torch.from_numpy(tokens).to(device),
                torch.from_numpy(labels).to(device),
                places,
            )
        count = int((labels >= 0).sum())
        right += found["right1"].item() * count
        right2 += found["right2"].item() * count
        total += count
    return {
        "length": length,
        "tokens": total,
        "right": round(right / total, 5),
        "drafts_right": round(right2 / total, 5),
    }


def save(network: Network, out: Path) -> str:
    """Write every exact weight as BF16; return the file's SHA-256."""
    bits = {
        name: value.bfloat16().cpu().view(torch.int16).numpy().view(np.uint16)
        for name, value in state(network).items()
    }
    return sha256(weights.write(out, bits))


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Train, judge by length, and write both down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--further", type=Path, metavar="DIR", help="go on from the weights there")
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a few steps on a CPU")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out, seed, limit_s = arguments.out, arguments.seed, arguments.limit_s
    out.mkdir(parents=True, exist_ok=True)
    phases = FURTHER if arguments.further else PHASES
    if arguments.small:
        phases = (
            Phase("small", 4, 2, 256, 1e-3, 1),
            Phase("more", 2, 2, 256, 1e-3, 1, rounded=True),
        )
    run = Run(device, limit_s, seed, arguments.further)
    train(run, phases, arguments.workers, out / LEARNT)
    network, seen = run.network, run.seen
    about = {
        "stage": "recall-training",
        "command": f"python3 -m proofs.recall.training OUT --seed {seed} --limit-s {limit_s:g}"
        + (" --further DIR" if arguments.further else ""),
        "seed": seed,
        "weights_sha256": save(network, out),
        "further_from_sha256": arguments.further and sha256(arguments.further / weights.NAME),
        **stages.environment("recall-training"),
        "caveats": CAVEATS,
    }
    seen["recall"] = []
    seen["phases"] = [asdict(phase) for phase in phases]
    for length, rows in ((512, 32), (4096, 8), (32768, 2), (131072, 1)):
        if arguments.small and length > 512:
            break
        seen["recall"].append(recall(network, device, length, rows))
        print(json.dumps(seen["recall"][-1]), file=sys.stderr, flush=True)
        document = {**about, **seen}
        (out / RESULT).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
