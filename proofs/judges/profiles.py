import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spark_vllm.checkpoint.reader import ModuleReader
from spark_vllm.checkpoint.settings import read_settings

from proofs.drafts.cases import gpu_cases as draft_cases
from proofs.drafts.cases import judge_drafts
from proofs.engine.profile_cases import LONG_PROMPTS, STEERED_TOKENS
from proofs.judges.answers import (
    Row,
    acceptance,
    attempt,
    cache_hits,
    compare_answers,
    failed_start,
    judge_same_answers,
    row,
    show,
)
from proofs.judges.engine import (
    LOGIT_LIMIT,
    Weights,
    judge_modules,
    judge_trained_answers,
    relative,
    rounded_activations,
)
from proofs.prompts import IDS_LENGTHS, random_prompts
from proofs.trees.build import SEED, names_of
from proofs.trees.special import (
    STEERED,
    STEERED_SHAPE,
    Steering,
    expected_acceptance,
    expected_tokens,
    steer,
)

EXPERT_LIMIT = 0.02
"""BF16 rounding inside an expert; a single wrong expert of eight gives 0.4."""
CLEAR = 0.02
"""Least distance of router logits between the last chosen and the first other expert."""

ExpertWeights = dict[str, torch.Tensor]


def judge_experts(name: str, capture: Path, tree: Path) -> Row:
    """Judge blocks of experts with recorded inputs, at positions with a clear choice.

    With 8 of 256 experts, near ties flip with any rounding, so logits do not measure the kernels.
    """
    modules = torch.load(capture)["modules"]
    blocks = {key: value for key, value in modules.items() if key.endswith(".mlp")}
    config = json.loads((tree / "config.json").read_text())
    top_k = int(config["text_config"]["num_experts_per_tok"])
    reader = ModuleReader(tree, read_settings(config["quantization_config"]))
    results = {}
    for module, (x, y) in blocks.items():
        prefix = module.replace("language_model.model.", "model.language_model.") + "."
        weights = {
            key.removeprefix(prefix): value.double()
            for key, value in reader.read_weights(lambda key, p=prefix: key.startswith(p))  # type: ignore[misc]
        }
        expected, gap, used = compute_block(x.double(), weights, top_k)
        clear = gap > CLEAR
        results[module] = {
            "error": round(relative(y[clear], expected[clear]), 5),
            "positions": int(clear.sum()),
            "unclear": int((~clear).sum()),
            "experts_used": used,
        }
    return row(
        f"{name}: every block of experts equals the dequantised experts where the choice is clear",
        bool(results)
        and all(v["error"] < EXPERT_LIMIT and v["positions"] > 20 for v in results.values()),
        [name],
        blocks=results,
        limit=EXPERT_LIMIT,
    )


def compute_block(
    x: torch.Tensor, weights: ExpertWeights, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the block's output, how clear each position's choice is, and the experts used."""
    router = x @ weights["gate.weight"].t()
    best = router.topk(min(top_k + 1, router.shape[1]), dim=1)
    gap = best.values[:, top_k - 1] - best.values[:, -1]
    if router.shape[1] == top_k:
        gap = torch.full_like(gap, torch.inf)
    experts, share = best.indices[:, :top_k], best.values[:, :top_k].softmax(1)
    result = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        rows, slots = (experts == expert).nonzero(as_tuple=True)
        value = _swiglu(x[rows], weights, f"experts.{expert}.")
        result.index_add_(0, rows, share[rows, slots, None] * value)
    gate = (x @ weights["shared_expert_gate.weight"].t()).sigmoid()
    result += gate * _swiglu(x, weights, "shared_expert.", rounded=True)
    return result, gap, len(experts.unique())


def _swiglu(x: torch.Tensor, weights: ExpertWeights, prefix: str, *, rounded: bool = False) -> Any:
    """Return an expert's output; ``rounded``: with activations rounded as in the FP8 kernel."""
    rounding = (lambda v: rounded_activations(v).double()) if rounded else (lambda v: v)
    x = rounding(x)
    up = x @ weights[f"{prefix}up_proj.weight"].t()
    inner = torch.nn.functional.silu(x @ weights[f"{prefix}gate_proj.weight"].t()) * up
    return rounding(inner) @ weights[f"{prefix}down_proj.weight"].t()


TRANSFORMERS_LIMIT = 0.06
"""BF16 logits of four layers in two implementations; sizes and roundings are the same."""
ACCEPTANCE_SLACK = 0.03


def judge_profiles(results: dict[str, Row]) -> list[Row]:
    pairs = {}
    for name in ("native", "online-fp8"):
        for suffix in ("-mtp2", "-full", "-full-mtp2"):
            pairs[f"tiny-{name}{suffix}"] = f"tiny-{name}"
        pairs[f"tiny-{name}"] = "tiny-head8"
    rows = [judge_trained_answers(results, *pair) for pair in pairs.items()]
    return [*judge_drafts(results, draft_cases()), *rows]


def judge_prefixes(results: dict[str, Row], names: tuple[str, ...]) -> list[Row]:
    return [attempt(name, _judge_conversation, results, name) for name in names]


def _judge_conversation(results: dict[str, Row], name: str) -> Row:
    """Tokens must be equal in every turn; margins detect wrong cached states.

    Margins are judged only if another beginning changes them by far more than kernel noise does.
    """
    plain, kept = results["prefixes-plain"], results[name]
    if kept["state"] != "ran":
        return failed_start(name, kept)
    pairs = [(plain, kept), *zip(plain["turns"], kept["turns"], strict=True)]
    equal = all(
        a["tokens"] == b["tokens"]
        for without, with_cache in pairs
        for a, b in zip(without["answers"], with_cache["answers"], strict=True)
    )
    changes = [
        _margin_change(without["answers"], with_cache["answers"]) for without, with_cache in pairs
    ]
    other = _margin_change(plain["turns"][-1]["answers"], plain["other_beginning"])
    hits = [cache_hits(turn) for turn in kept["turns"]]
    # The first turn has no cache hits: differences are noise of this machine.
    telling = changes[0] < other / 4
    return row(
        f"{name}: growing conversations hit the cache, and answers equal those without it",
        equal and min(hits) > 0 and (not telling or max(changes) < other / 4),
        [name, "prefixes-plain"],
        margins_tell_of_states=telling,
        tokens_equal=equal,
        tokens_found_per_turn=hits,
        tokens_found_without=[cache_hits(turn) for turn in plain["turns"]],
        margin_change_per_turn=changes,
        margin_change_by_another_beginning=other,
    )


def _margin_change(first: list[Row], second: list[Row]) -> float:
    differences = [
        x - y
        for a, b in zip(first, second, strict=True)
        for x, y, s, t in zip(a["margins"], b["margins"], a["tokens"], b["tokens"], strict=True)
        if s == t
    ]
    return round(float(np.sqrt(np.mean(np.square(differences)))), 4)


def judge_steered(results: dict[str, Row], cases: list[dict[str, Any]]) -> list[Row]:
    known = {name: steer(STEERED_SHAPE, SEED, share) for name, share in STEERED.items()}
    names = [case["name"] for case in cases]
    return [attempt(name, _judge_steered_run, name, results, known) for name in names]


def _judge_steered_run(name: str, results: dict[str, Row], known: dict[str, Steering]) -> Row:
    result = results[name]
    steering = known["-".join(name.split("-")[:2])]
    answers = [
        expected_tokens(steering, ids[-1], STEERED_TOKENS) for ids in random_prompts(IDS_LENGTHS)
    ]
    wrong = sum(
        int((np.array(answer["tokens"]) != np.array(expected)).sum())
        for answer, expected in zip(result["answers"], answers, strict=True)
    )
    drafts = int(name[-1]) if "mtp" in name else 0
    counted = [expected_acceptance(steering, tokens, drafts) for tokens in answers]
    accepted, drafted = (sum(part) for part in zip(*counted, strict=True))
    expected = round(accepted / drafted, 3) if drafted else None
    measured = acceptance(result)
    near = expected is None or abs((measured or 0) - expected) < ACCEPTANCE_SLACK
    return row(
        f"{name}: every token and the acceptance are as constructed",
        wrong == 0 and near and (measured is None) == (expected is None),
        [name],
        tokens=sum(map(len, answers)),
        wrong_tokens=wrong,
        acceptance_expected=expected,
        acceptance_measured=measured,
        counters=result["counters"],
        smallest_margin=round(min(min(a["margins"]) for a in result["answers"]), 3),
    )


def judge_heads(results: dict[str, Row], cases: list[dict[str, Any]]) -> list[Row]:
    known = [case for case in cases if case["name"].startswith("steered")]
    rows = judge_steered(results, known)
    name, reference = "true-35b-head-read-mtp2", "true-35b-head-measured-mtp2"
    claim = "a head of 248,320 x 2,048 answers as on the first start, without measuring"
    rows.append(attempt(name, judge_same_answers, results, name, reference, claim))
    for result_row in rows:
        for name in result_row.get("cases", []):
            lines = [line for line in results[name]["log_lines"] if "int8-triton head" in line]
            measured = any("us by batch size" in line for line in lines)
            result_row["numbers"][f"log of {name}"] = lines
            result_row["passed"] &= bool(lines) and measured == ("head-measured" in name)
            if "unmeasured" in name:
                result_row["passed"] &= any("computed by marlin" in line for line in lines)
    return rows


def judge_tensor_reads(results: dict[str, Row], case: dict[str, Any], trees: Path) -> Row:
    names = names_of(trees / case["tree"])
    target, drafter = results[case["name"]]["loads"]
    by_target, by_drafter = set(target["read"]), set(drafter["read"])
    read = by_target | by_drafter
    drafts = {name for name in names if name.startswith("mtp.")}
    return row(
        f"{case['name']}: target and drafter read every tensor of the tree",
        read == names and drafts <= by_drafter,
        [case["name"]],
        names_in_tree=len(names),
        mtp_names_in_tree=len(drafts),
        yielded_to_target=len(target["yielded"]),
        yielded_to_drafter=len(drafter["yielded"]),
        read_by_target=len(by_target),
        read_by_drafter=len(by_drafter),
        mtp_read_by_drafter=len(drafts & by_drafter),
        read_by_nobody=sorted(names - read)[:20],
        read_without_being_in_the_index=sorted(read - names)[:20],
        replacements_under_names_of_an_overlay=sum(
            name.endswith(("_fp8", "_int8")) for name in names
        ),
        # An overlay keeps the base's files: replaced tensors are yielded and dropped.
        handed_out_without_being_in_the_index=len(set(target["yielded"]) - names),
    )


def judge_sizes(results: dict[str, Row], out: Path, trees: Path) -> list[Row]:
    """Native logits of 256 experts are not judged: near ties flip with any rounding."""
    rows = [
        attempt(name, _compare_with_transformers, out, name, key, limit)
        for name, key, limit in (
            ("wide-portable", "ids", TRANSFORMERS_LIMIT),
            ("wide-native", "ids", LOGIT_LIMIT),
            ("pictures-portable", "pictures", TRANSFORMERS_LIMIT),
            ("pictures-native", "pictures", LOGIT_LIMIT),
            ("true-35b-portable", "ids", LOGIT_LIMIT),
            ("true-122b-portable", "ids", LOGIT_LIMIT),
        )
    ]
    for tree, name in (
        ("wide-overlay", "wide-native"),
        ("true-35b", "true-35b-native"),
        ("true-122b", "true-122b-native"),
    ):
        rows.append(attempt(name, _judge_modules, results, out, trees / tree, name))
        rows.append(attempt(name, judge_experts, name, out / f"{name}.pt", trees / tree))
    rows += [attempt(name, _judge_drafts_run, results, name) for name in ("true-35b", "true-122b")]
    return [*rows, attempt("pictures", _judge_pictures, out)]


def _compare_with_transformers(out: Path, name: str, key: str, limit: float) -> Row:
    reference_name = name.rpartition("-")[0] if name.startswith("true") else "wide"
    expected = torch.load(out / f"transformers-{reference_name}.pt")[key]
    capture = torch.load(out / f"{name}.pt")
    errors, start = [], 0
    for reference, rows in zip(expected, capture["rows"], strict=True):
        logits = capture["logits"][start : start + rows].float()
        start += rows
        # The engine computes the last position separately: find the position of each row.
        nearest = torch.cdist(logits, reference).argmin(dim=1)
        if len(set(nearest.tolist())) < len(reference):
            raise ValueError(f"{len(set(nearest.tolist()))} of {len(reference)} positions found")
        errors.append(relative(logits, reference[nearest]))
    return row(
        f"{name}: logits of every position near those of transformers (dequantised)",
        max(errors) < limit,
        [name],
        logit_errors=[round(error, 4) for error in errors],
        limit=limit,
    )


def _judge_modules(results: dict[str, Row], out: Path, tree: Path, name: str) -> Row:
    return judge_modules(results, {name: torch.load(out / f"{name}.pt")}, Weights(tree), name)


def _judge_drafts_run(results: dict[str, Row], name: str) -> Row:
    result = results[f"{name}-full-mtp2"]
    drafter = sorted({" > ".join(v["method"]) for v in result["drafter_modules"].values()})
    packed = any("AutoGPTQ" in text or "INC" in text for text in drafter)
    return row(
        f"{name}: serves with two drafts and full graphs, the drafter in the base's format",
        packed == (name == "true-35b") and acceptance(result) is not None,
        [f"{name}-full-mtp2"],
        drafter=drafter,
        counters=result["counters"],
        answers_against_eager=compare_answers(results[f"{name}-native"], result),
    )


def _judge_pictures(out: Path) -> Row:
    capture = torch.load(out / "pictures-native.pt")
    first, second, again = capture["logits"].float().split(capture["rows"])
    changed, noise = relative(second[-20:], first[-20:]), relative(again[-20:], first[-20:])
    return row(
        "pictures: another picture changes the logits, the same picture does not",
        changed > 0.2 and noise < 0.05,
        ["pictures-native"],
        other_picture=round(changed, 4),
        same_picture=round(noise, 4),
    )


def judge_long(results: dict[str, Row]) -> list[Row]:
    claim = (
        f"prompts of up to {max(LONG_PROMPTS):,} tokens "
        "answered as a single sequence without drafts"
    )
    own, plain = (
        attempt(name, judge_same_answers, results, name, "long-alone", claim, max_noise=np.inf)
        for name in ("long-own-full-mtp2", "long-16-bit")
    )
    return [own, show(plain, "long-16-bit: a 16-bit cache for comparison, not judged")]
