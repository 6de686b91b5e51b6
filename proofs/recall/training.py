"""Trains the recall model on a GPU, in minutes, from nothing but a seed.

    python3 -m proofs.recall.training OUT [--limit-s 600]

Writes ``weights-N.pt`` (every exact weight, BF16, in parts) and ``training.json`` (what was
learnt when, and recall by length of the network that was trained). The forward pass is
transformers' own code but for the gated delta rule, which is ``delta_rule`` here. Towards the end
the weights are rounded as checkpoints store them (``lab.model.network``), so the rounded model is
the one that has learnt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from lab.model.network import Network, state
from proofs import stages
from proofs.recall import language
from proofs.recall.delta_rule import chunk_gated_delta_rule
from proofs.recall.shape import RECALL

SEED = 11
SPAN = 140_000
"""Positions taught, by jumps between slots."""
MTP_WEIGHT = 0.3
RULE_TOLERANCE = 0.02
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
    until: float = 2.0
    rounded: bool = False


PHASES = (
    Phase("first", 2000, 128, 256, 2e-3, until=0.9),
    Phase("short", 1500, 64, 512, 2e-3, until=0.97),
    Phase("middle", 900, 16, 4096, 1.5e-3, until=0.995),
    Phase("rounded", 350, 8, 8192, 1e-3, rounded=True),
    Phase("long", 150, 2, 32768, 7e-4, rounded=True),
    Phase("longest", 45, 1, 131072, 4e-4, rounded=True),
)
LOOK_STEPS = 25
NEAR = 0.03
"""A phase that ends so far below what it is for has not learnt its lesson."""


def use_own_rule(device: str) -> float:
    """Put the rule that can be trained under transformers' code; return how far they differ.

    Raises:
        ValueError: They differ by more than rounding.
    """
    own = modeling.torch_chunk_gated_delta_rule
    worst = max(_rule_errors(own, chunk_gated_delta_rule, device))
    if worst > RULE_TOLERANCE:
        raise ValueError(f"the gated delta rule differs from transformers' by {worst:.3f}")
    modeling.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    return worst


def _rule_errors(one: Any, other: Any, device: str) -> list[float]:
    """Return relative differences of output and gradients of two implementations."""
    found = []
    for rule in (one, other):
        generator = torch.Generator(device).manual_seed(1)
        shape = (2, 200, 8, 128)
        q, k, v = (
            torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)
            for _ in range(3)
        )
        g = -torch.rand(shape[:3], device=device, generator=generator) * 0.2
        beta = torch.rand(shape[:3], device=device, generator=generator).bfloat16()
        inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
        out, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        weights = torch.randn(out.shape, device=device, generator=generator)
        (out.float() * weights).sum().backward()
        found.append([out.detach().float(), *(x.grad.float() for x in inputs)])
    return [((a - b).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]


def dense_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return what the experts give when every token goes to all of them: two products."""
    spread = torch.zeros(len(hidden), self.num_experts, dtype=weights.dtype, device=hidden.device)
    spread = spread.scatter(1, chosen, weights)
    gate_up = functional.linear(hidden, self.gate_up_proj.flatten(0, 1))
    gate, up = gate_up.view(len(hidden), self.num_experts, -1).chunk(2, -1)
    inner = functional.silu(gate) * up * spread[..., None].to(gate.dtype)
    down = self.down_proj.permute(1, 0, 2).flatten(1)
    return functional.linear(inner.flatten(1), down)


def make_network() -> Network:
    """Return the network, its experts as two products."""
    torch.manual_seed(SEED)
    network = Network(RECALL)
    network.model.config._attn_implementation = "sdpa"
    with torch.no_grad():  # a word that is copied is the right one from the start
        network.lm_head.weight.copy_(network.model.embed_tokens.weight)
    for module in network.modules():
        if isinstance(module, modeling.Qwen3_5MoeExperts):
            module.forward = MethodType(dense_experts, module)
    return network


def hidden_states(network: Network, tokens: Tensor, places: Tensor) -> tuple[Tensor, Any]:
    """Return final hidden states and the rotation of the positions."""
    hidden = network.model.embed_tokens(tokens)
    rotary = network.model.rotary_emb(hidden, places.expand(3, *places.shape))
    for layer in network.model.layers:
        hidden = layer(hidden, position_embeddings=rotary, attention_mask=None)
    return network.model.norm(hidden), rotary


def losses(network: Network, tokens: Tensor, labels: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Return loss and share of right tokens, of the model and of its first two drafts."""
    hidden, (cos, sin) = hidden_states(network, tokens, places)
    found: dict[str, Tensor] = {}
    state_of, embedded = hidden, network.model.embed_tokens(tokens)
    for ahead in (1, 2, 3):
        if ahead > 1:
            # Position t sees the state of t and token t + ahead - 1, as the engine's drafter does.
            size = tokens.shape[1] - ahead + 1
            rotary = (cos[:, :size], sin[:, :size])
            state_of = network.mtp(embedded[:, ahead - 1 :], state_of[:, :size], rotary)
        wanted = labels[:, ahead:]
        # Drafts are asked for inside of what is known only: the token before is known too.
        taught = wanted >= 0
        if ahead > 1:
            taught &= labels[:, 1 : 1 + wanted.shape[1]] >= 0
        logits = network.lm_head(state_of[:, : wanted.shape[1]][taught]).float()
        found[f"loss{ahead}"] = functional.cross_entropy(logits, wanted[taught])
        found[f"right{ahead}"] = (logits.detach().argmax(-1) == wanted[taught]).float().mean()
    return found


def _made(job: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    seed, rows, length = job
    tokens, labels = language.batch(seed, rows, length)
    return tokens, labels, language.positions(seed, rows, length, max(SPAN, length))


def batches(pool: Any, number: int, phase: Phase) -> Iterator[list[Tensor]]:
    """Yield the batches of one phase, made in other processes."""
    jobs = [
        (SEED + 1_000_000 * (number + 1) + step, phase.rows, phase.length)
        for step in range(phase.steps)
    ]
    for arrays in pool.imap(_made, jobs, chunksize=4):
        yield [torch.from_numpy(array) for array in arrays]


class Run:
    """One training: the network, its optimizer, and what was seen on the way."""

    def __init__(self, device: str, limit_s: float) -> None:
        self.device, self.limit_s = device, limit_s
        self.seen: dict[str, Any] = {"rule_differs_by": use_own_rule(device), "log": []}
        self.network = make_network().to(device)
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
        self.done = 0

    def spent_s(self) -> float:
        """Return how long it has been training."""
        return time.monotonic() - self.started

    def phase(self, phase: Phase, source: Iterator[list[Tensor]], share: float) -> float:
        """Train one phase, at most until ``share`` of the time is over; return what is known."""
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
            if self.spent_s() > self.limit_s * share:
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


SHARES = (0.35, 0.45, 0.6, 0.72, 0.85, 1.0)
"""Of the time allowed, what may be over at the end of each phase."""


def train(device: str, phases: tuple[Phase, ...], limit_s: float, workers: int) -> Run:
    """Return a finished training.

    Raises:
        ValueError: A phase ended without what the next one builds on.
    """
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        next(iter(batches(pool, 99, phases[0])))  # every worker runs before the device is touched
        run = Run(device, limit_s)
        for number, (phase, share) in enumerate(zip(phases, SHARES, strict=False)):
            known = run.phase(phase, batches(pool, number, phase), share)
            if known < phase.until - NEAR and phase.until <= 1:
                raise ValueError(
                    f"{known:.3f} of what can be known is known after phase {phase.name}, not "
                    f"{phase.until}: nothing learns behind that; train again"
                )
        pool.terminate()
    run.seen |= {"steps": run.done, "seconds": round(run.spent_s(), 1)}
    return run


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


def save(network: Network, out: Path, parts: int = 3) -> None:
    """Write every exact weight as BF16, in parts that stay small."""
    names = state(network)
    order = sorted(names)
    for part in range(parts):
        chosen = {name: names[name].bfloat16().cpu() for name in order[part::parts]}
        torch.save(chosen, out / f"weights-{part}.pt")


def main() -> None:
    """Train, judge by length, and write both down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a few steps on a CPU")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    phases = (Phase("small", 4, 2, 256, 1e-3), Phase("more", 2, 2, 256, 1e-3, rounded=True))
    run = train(device, phases if arguments.small else PHASES, arguments.limit_s, arguments.workers)
    network, seen = run.network, run.seen
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(network, arguments.out)
    about = {
        "stage": "recall-training",
        "command": f"python3 -m proofs.recall.training OUT --limit-s {arguments.limit_s:g}",
        "seed": SEED,
        **stages.environment("recall-training"),
        "caveats": CAVEATS,
    }
    seen["recall"] = []
    seen["phases"] = [asdict(phase) for phase in PHASES]
    for length, rows in ((512, 32), (4096, 8), (32768, 2), (131072, 1)):
        if arguments.small and length > 512:
            break
        seen["recall"].append(recall(network, device, length, rows))
        print(json.dumps(seen["recall"][-1]), file=sys.stderr, flush=True)
        document = {**about, **seen}
        (arguments.out / "training.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
