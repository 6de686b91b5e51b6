"""Judges of the stages in ``profile_cases``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from proofs.drafts.cases import gpu_cases as draft_cases
from proofs.drafts.cases import judge_drafts
from proofs.engine.profile_cases import LONG_PROMPTS, STEERED_TOKENS
from proofs.judges import experts as experts_judge
from proofs.judges.answers import (
    TRAINED_NOISE,
    Row,
    acceptance,
    answers_agree,
    attempt,
    compare_answers,
    row,
)
from proofs.judges.engine import (
    FP8_LIMIT,
    INT_LIMIT,
    LEAST_ACCEPTANCE,
    LOGIT_LIMIT,
    Weights,
    module_errors,
    relative,
)
from proofs.prompts import IDS_LENGTHS, random_prompts
from proofs.trees import special as special_trees
from proofs.trees import steered
from proofs.trees.build import SEED, names_of

TRANSFORMERS_LIMIT = 0.06
"""BF16 logits of four layers in two implementations; sizes and roundings are the same."""
ACCEPTANCE_SLACK = 0.03
"""The last step of an answer may draft past the end."""


def judge_profiles(results: dict[str, Row]) -> list[Row]:
    pairs = {}
    for name in ("native", "online-fp8"):
        for suffix in ("-mtp2", "-full", "-full-mtp2"):
            pairs[f"tiny-{name}{suffix}"] = f"tiny-{name}"
        pairs[f"tiny-{name}"] = "tiny-head8"
    rows = [
        attempt(name, lambda o=name, t=reference: _judge_answers(results, o, t))
        for name, reference in pairs.items()
    ]
    return [*judge_drafts(results, draft_cases()), *rows]


def _judge_answers(results: dict[str, Row], name: str, reference: str) -> Row:
    comparison = compare_answers(results[reference], results[name])
    accepted = acceptance(results[name])
    drafted = "mtp" in name
    return row(
        f"{name}: greedy answers equal {reference} outside ties",
        answers_agree(comparison, TRAINED_NOISE)
        and (not drafted or (accepted or 0) > LEAST_ACCEPTANCE),
        [name, reference],
        acceptance=accepted,
        counters=results[name]["counters"],
        downgraded=[t for t in results[name]["log_lines"] if "setting cudagraph" in t],
        **comparison,
    )


def judge_prefixes(results: dict[str, Row]) -> list[Row]:
    rows = [attempt(n, lambda n=n: _judge_talk(results, n)) for n in ("agent-eager", "agent-full")]
    steered_runs = ("prefixes-eager", "prefixes-full")
    return rows + [attempt(n, lambda n=n: _judge_conversation(results, n)) for n in steered_runs]


def _judge_talk(results: dict[str, Row], name: str) -> Row:
    """Compare each conversation up to the first differing answer; then prompts differ."""
    plain, kept = results["agent-plain"], results[name]
    pairs = [(plain, kept), *zip(plain["turns"], kept["turns"], strict=True)]
    alike = list(range(len(plain["answers"])))
    turns = []
    for without, with_cache in pairs:
        first, second = (
            {"answers": [turn["answers"][place] for place in alike]}
            for turn in (without, with_cache)
        )
        turns.append(compare_answers(first, second))
        alike = [
            place
            for place in alike
            if without["answers"][place]["tokens"] == with_cache["answers"][place]["tokens"]
        ]
    hits = [_count_hits(turn["counters"]) - _count_hits(turn["before"]) for turn in kept["turns"]]
    return row(
        f"{name}: later turns hit the cache, and answers equal those without it outside ties",
        not any(turn["beyond_margin"] for turn in turns) and min(hits) > 0,
        [name, "agent-plain"],
        tokens_found_per_turn=hits,
        tokens_found_without=[_count_hits(turn["counters"]) for turn in plain["turns"]],
        turns=turns,
    )


def _judge_conversation(results: dict[str, Row], name: str) -> Row:
    """Tokens must be equal in every turn; margins detect wrong cached states.

    The same last tokens after another beginning show the effect of a wrong state; margins are
    judged only if kernel noise is small in comparison.
    """
    plain, kept = results["prefixes-plain"], results[name]
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
    hits = [_count_hits(turn["counters"]) - _count_hits(turn["before"]) for turn in kept["turns"]]
    # The first turn has no cache hits: differences are noise of this machine.
    telling = changes[0] < other / 4
    found = row(
        f"{name}: growing conversations hit the cache, and answers equal those without it",
        equal and min(hits) > 0 and (not telling or max(changes) < other / 4),
        [name, "prefixes-plain"],
        margins_tell_of_states=telling,
        tokens_equal=equal,
        tokens_found_per_turn=hits,
        tokens_found_without=[_count_hits(turn["counters"]) for turn in plain["turns"]],
        margin_change_per_turn=changes,
        margin_change_by_another_beginning=other,
    )
    return found


def _margin_change(first: list[Row], second: list[Row]) -> float:
    differences = [
        x - y
        for a, b in zip(first, second, strict=True)
        for x, y, s, t in zip(a["margins"], b["margins"], a["tokens"], b["tokens"], strict=True)
        if s == t
    ]
    return round(float(np.sqrt(np.mean(np.square(differences)))), 4)


def _count_hits(counters: dict[str, Any]) -> float:
    return float(sum(v for k, v in counters.items() if k.endswith("prefix_cache_hits")))


def judge_steered(results: dict[str, Row], cases: list[dict[str, Any]]) -> list[Row]:
    known = {
        name: steered.steering(special_trees.STEERED_SHAPE, SEED, share)
        for name, share in special_trees.STEERED.items()
    }
    return [
        attempt(case["name"], lambda n=case["name"]: _judge_steered_run(n, results[n], known))
        for case in cases
    ]


def _judge_steered_run(name: str, result: Row, known: dict[str, steered.Steering]) -> Row:
    steering = known["-".join(name.split("-")[:2])]
    answers = [
        steered.expected_tokens(steering, ids[-1], STEERED_TOKENS)
        for ids in random_prompts(IDS_LENGTHS)
    ]
    wrong = sum(
        int((np.array(answer["tokens"]) != np.array(expected)).sum())
        for answer, expected in zip(result["answers"], answers, strict=True)
    )
    drafts = int(name[-1]) if "mtp" in name else 0
    counted = [steered.expected_acceptance(steering, tokens, drafts) for tokens in answers]
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
    rows.append(
        attempt(
            "true-35b-head",
            lambda: _judge_head_answers(
                results, "true-35b-head-read-mtp2", "true-35b-head-measured-mtp2"
            ),
        )
    )
    for result_row in rows:
        for name in result_row.get("cases", []):
            lines = [line for line in results[name]["log_lines"] if "int8-triton head" in line]
            measured = any("us at batches" in line for line in lines)
            result_row["numbers"][f"log of {name}"] = lines
            result_row["passed"] &= bool(lines) and measured == ("head-measured" in name)
            if "unmeasured" in name:
                result_row["passed"] &= any("computed by marlin" in line for line in lines)
    return rows


def _judge_head_answers(results: dict[str, Row], name: str, reference: str) -> Row:
    comparison = compare_answers(results[reference], results[name])
    return row(
        f"{name}: a head of 248,320 x 2,048 answers as at the first start, without measuring",
        answers_agree(comparison, TRAINED_NOISE),
        [name, reference],
        **comparison,
    )


def judge_names(results: dict[str, Row], cases: list[dict[str, Any]], trees: Path) -> list[Row]:
    return [
        attempt(c["name"], lambda c=c: _judge_tensor_reads(results[c["name"]], c, trees))
        for c in cases
    ]


def _judge_tensor_reads(result: Row, case: dict[str, Any], trees: Path) -> Row:
    names = names_of(trees / case["tree"])
    target, drafter = result["loads"]
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
    rows = []
    for name, key, limit in (
        ("wide-portable", "ids", TRANSFORMERS_LIMIT),
        ("wide-native", "ids", LOGIT_LIMIT),
        ("pictures-portable", "pictures", TRANSFORMERS_LIMIT),
        ("pictures-native", "pictures", LOGIT_LIMIT),
        ("true-35b-portable", "ids", LOGIT_LIMIT),
        ("true-35b-native", "ids", LOGIT_LIMIT),
        ("true-122b-portable", "ids", LOGIT_LIMIT),
        ("true-122b-native", "ids", LOGIT_LIMIT),
    ):
        rows.append(
            attempt(name, lambda n=name, k=key, m=limit: _compare_with_transformers(out, n, k, m))
        )
    for tree, name in (
        ("wide-overlay", "wide-native"),
        ("true-35b", "true-35b-native"),
        ("true-122b", "true-122b-native"),
    ):
        rows.append(
            attempt(name, lambda t=tree, n=name: _judge_modules(results, out, trees / t, n))
        )
        rows.append(
            attempt(
                name,
                lambda t=tree, n=name: experts_judge.judge(
                    n, torch.load(out / f"{n}.pt"), trees / t
                ),
            )
        )
    for name in ("true-35b", "true-122b"):
        rows.append(attempt(name, lambda n=name: _judge_drafts_run(results, n)))
    rows.append(attempt("pictures", lambda: _judge_pictures(out)))
    return rows


def _compare_with_transformers(out: Path, name: str, key: str, limit: float) -> Row:
    reference_name = name.rpartition("-")[0] if name.startswith("true") else "wide"
    wanted = torch.load(out / f"transformers-{reference_name}.pt")[key]
    capture = torch.load(out / f"{name}.pt")
    errors, start = [], 0
    for reference, rows in zip(wanted, capture["rows"], strict=True):
        logits = capture["logits"][start : start + rows].float()
        start += rows
        # The engine computes the last position separately: find the position of each row.
        place = torch.cdist(logits, reference).argmin(dim=1)
        if len(set(place.tolist())) < len(reference):
            raise ValueError(f"{len(set(place.tolist()))} of {len(reference)} positions found")
        errors.append(relative(logits, reference[place]))
    result_row = row(
        f"{name}: logits of every position near those of transformers (dequantised)",
        max(errors) < limit,
        [name],
        logit_errors=[round(error, 4) for error in errors],
        limit=limit,
    )
    if name.startswith("true") and name.endswith("native"):
        # Routing differs; experts_judge judges each block.
        result_row["passed"] = None
        result_row["numbers"]["limit"] = "shown, not judged: near ties of 256 experts flip"
    return result_row


def _judge_modules(results: dict[str, Row], out: Path, tree: Path, name: str) -> Row:
    capture = torch.load(out / f"{name}.pt")
    errors = module_errors(results[name], capture, Weights(tree))
    good = all(
        value["worst"] <= (FP8_LIMIT if kind == "fp8" else INT_LIMIT)
        for kind, value in errors.items()
        if "not rounded" not in kind
    )
    classes = sorted({" > ".join(v["method"]) for v in results[name]["modules"].values()})
    return row(
        f"{name}: every module equals the dequantised weight",
        good,
        [name],
        errors=errors,
        classes=classes,
    )


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
    """Judge TurboQuant at long contexts; the 16-bit cache is shown, not judged."""
    own = attempt(
        "long-own-full-mtp2",
        lambda: _judge_long_answers(results, "long-own-full-mtp2", "long-alone"),
    )
    plain = attempt(
        "long-16-bit", lambda: _judge_long_answers(results, "long-16-bit", "long-alone")
    )
    plain["claim"] = "long-16-bit: a 16-bit cache for comparison, not judged"
    plain["passed"] = None
    return [own, plain]


def _judge_long_answers(results: dict[str, Row], name: str, reference: str) -> Row:
    comparison = compare_answers(results[reference], results[name])
    return row(
        f"{name}: prompts of up to {max(LONG_PROMPTS):,} tokens "
        "answered as a single sequence without drafts",
        not comparison["beyond_margin"],
        [name, reference],
        acceptance=acceptance(results[name]),
        counters=results[name]["counters"],
        **comparison,
    )
