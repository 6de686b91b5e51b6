"""Train the recall model on a GPU from a seed; takes minutes.

    python3 -m proofs.recall.training OUT [--further DIR] [--seed 11] [--limit-s 400]

Writes ``weights.npz`` (BF16) and ``recall-training.json``. Not every seed learns lookups, so
``race`` trains several. ``--further`` continues from weights over all lengths, rounded as in
checkpoints. The forward pass is transformers' code except for the gated delta rule.
"""

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

from lab.model.network import Network, load_state, state, take_step
from proofs import stages
from proofs.recall import language, trees
from proofs.recall.network import losses, make_network, use_own_rule
from proofs.result_files import write_result

SEED = 11
RESULT = "recall-training.json"
SPAN = 262_400
"""Positions taught, by jumps between slots: all of ``cases.FARTHEST``."""
LIMIT_S = 400
MTP_WEIGHT = 0.3
CAVEATS = [
    "each phase stopped at the target accuracy or time limit: fewer steps on slower machines",
    "the shares of right tokens are of a forward pass of transformers with autocast to bfloat16, "
    "not of an engine",
]


@dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    rows: int
    length: int
    rate: float
    share: float
    until: float = 2.0
    rounded: bool = False
    falls_to: float = 0.4

    @property
    def warm_steps(self) -> int:
        """Steps in which the rate rises: long contexts get few of them."""
        return 20 if self.length <= 8192 else 4


PHASES = (
    Phase("first", 2000, 128, 256, 2e-3, 0.5, until=0.9),
    Phase("short", 1500, 64, 512, 2e-3, 0.6, until=0.97),
    Phase("middle", 900, 16, 4096, 1.5e-3, 1.0, until=0.99),
)
FURTHER = (
    Phase("rounded", 900, 16, 4096, 1e-3, 0.35, rounded=True, falls_to=0.7),
    Phase("longer", 600, 8, 8192, 7e-4, 0.6, rounded=True, falls_to=0.6),
    Phase("long", 150, 2, 32768, 4e-4, 0.8, rounded=True, falls_to=0.5),
    Phase("longest", 45, 1, 131072, 2e-4, 1.0, rounded=True, falls_to=0.05),
)
"""The rate falls to almost 0: noise of single steps causes wrong words in long answers."""
LOOK_STEPS = 25
NEAR = 0.01


def _made(job: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    seed, rows, length = job
    tokens, labels = language.batch(seed, rows, length)
    return tokens, labels, language.positions(seed, rows, length, max(SPAN, length))


def batches(pool: Any, seed: int, number: int, phase: Phase) -> Iterator[list[Tensor]]:
    jobs = [
        (seed + 1_000_000 * (number + 1) + step, phase.rows, phase.length)
        for step in range(phase.steps)
    ]
    for arrays in pool.imap(_made, jobs, chunksize=4):
        yield [torch.from_numpy(array) for array in arrays]


class Run:
    def __init__(self, device: str, limit_s: float, seed: int, further: Path | None) -> None:
        self.device, self.limit_s, self.seed, self.further = device, limit_s, seed, further
        self.seen: dict[str, Any] = {"log": []}
        self.done = 0

    def start(self) -> None:
        device = self.device
        self.seen["rule_differs_by"] = use_own_rule(device)
        network = make_network(self.seed)
        if self.further:
            load_state(network, trees.load(self.further))
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
        return time.monotonic() - self.started

    def phase(self, phase: Phase, source: Iterator[list[Tensor]]) -> float:
        known = 0.0
        recent: list[Tensor] = []
        begun_s = self.spent_s()
        limit_s = max(self.limit_s * phase.share - begun_s, 1e-6)
        if phase.rounded:
            self.network.round_weights()
        for step, batch in enumerate(source):
            warm = min(1.0, (self.done + 1) / 100) * min(1.0, (step + 1) / phase.warm_steps)
            spent = (self.spent_s() - begun_s) / limit_s
            over = min(1.0, max(step / phase.steps, spent))
            for group in self.optimizer.param_groups:
                group["lr"] = phase.rate * warm * (1 - (1 - phase.falls_to) * over)
            values = self.step(batch)
            recent.append(values["right1"])
            look = step % (LOOK_STEPS if phase.steps > 100 else 5) == 0
            if not look and step != phase.steps - 1:
                continue
            self.note(phase, step, values)
            known = torch.stack(recent[-LOOK_STEPS:]).mean().item()
            if step >= LOOK_STEPS and known > phase.until:
                break
            if self.spent_s() > self.limit_s * phase.share:
                break
        return known

    def step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        arrays = [array.to(self.device, non_blocking=True) for array in batch]
        with parametrize.cached(), torch.autocast(self.device, torch.bfloat16):
            values = losses(self.network, *arrays)
            loss = values["loss1"] + MTP_WEIGHT * (values["loss2"] + 0.5 * values["loss3"])
        take_step(self.optimizer, loss)
        self.done += 1
        return values

    def note(self, phase: Phase, step: int, values: dict[str, Tensor]) -> None:
        row = {name: round(value.item(), 4) for name, value in values.items()}
        row = {"phase": phase.name, "step": step, "s": round(self.spent_s(), 1), **row}
        self.seen["log"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)


def train(run: Run, phases: tuple[Phase, ...], workers: int) -> None:
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        next(iter(batches(pool, run.seed, 99, phases[0])))  # every worker runs before the device is
        run.start()
        for number, phase in enumerate(phases):
            known = run.phase(phase, batches(pool, run.seed, number, phase))
            if known < phase.until - NEAR and phase.until <= 1:
                raise ValueError(
                    f"accuracy {known:.3f} after phase {phase.name}, {phase.until} required; "
                    "fix: train again"
                )
        pool.terminate()
    run.seen |= {"steps": run.done, "seconds": round(run.spent_s(), 1)}


def recall(network: Network, device: str, length: int, rows: int) -> dict[str, Any]:
    right, right2, total = 0.0, 0.0, 0
    for row in range(rows):
        tokens, labels = language.batch(SEED + 5_000_000 + length + row, 1, length)
        places = torch.arange(length)[None].to(device)
        with torch.no_grad(), parametrize.cached(), torch.autocast(device, torch.bfloat16):
            values = losses(
                network,
                torch.from_numpy(tokens).to(device),
                torch.from_numpy(labels).to(device),
                places,
            )
        count = int((labels >= 0).sum())
        right += values["right1"].item() * count
        right2 += values["right2"].item() * count
        total += count
    return {
        "length": length,
        "tokens": total,
        "right": round(right / total, 5),
        "drafts_right": round(right2 / total, 5),
    }


def save(network: Network, out: Path) -> str:
    bits = {
        name: value.bfloat16().cpu().view(torch.int16).numpy().view(np.uint16)
        for name, value in state(network).items()
    }
    return sha256(trees.store(out, bits))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--further", type=Path, metavar="DIR", help="go on from the weights there")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--workers", type=int, default=12)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out, seed, limit_s = arguments.out, arguments.seed, arguments.limit_s
    out.mkdir(parents=True, exist_ok=True)
    phases = FURTHER if arguments.further else PHASES
    run = Run(device, limit_s, seed, arguments.further)
    train(run, phases, arguments.workers)
    network, seen = run.network, run.seen
    about = {
        **stages.environment(),
        "stage": "recall-training",
        "command": f"python3 -m proofs.recall.training OUT --seed {seed} --limit-s {limit_s:g}"
        + (" --further DIR" if arguments.further else ""),
        "seed": seed,
        "weights_sha256": save(network, out),
        "further_from_sha256": arguments.further and sha256(arguments.further / trees.WEIGHTS),
        "caveats": CAVEATS,
    }
    seen["recall"] = []
    seen["phases"] = [asdict(phase) for phase in phases]
    for length, rows in ((512, 32), (4096, 8), (32768, 2), (131072, 1), (262144, 1)):
        seen["recall"].append(recall(network, device, length, rows))
        print(json.dumps(seen["recall"][-1]), file=sys.stderr, flush=True)
        write_result(out / RESULT, {**about, **seen})


if __name__ == "__main__":
    main()
