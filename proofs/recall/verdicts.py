"""Judges of the recall proofs, by stage.

An engine must find everything that the model finds reliably with a 16-bit cache, so no claim
depends on a single training. Each claim about a cache comes with a damaged engine that must fail
the same judge.
"""

import math
from collections.abc import Callable
from typing import Any

from proofs.judges.answers import acceptance, change, failed_start, row
from proofs.recall import sampling
from proofs.recall.judge import (
    ENOUGH,
    KNOWN,
    LOST,
    TIE,
    Results,
    Row,
    acceptance_by_place,
    answers_of,
    divergences,
    looked_up,
    noise_row,
    recall_row,
    registers,
    share,
    states_row,
    sure,
    talk_figures,
    tokens_of,
)

KNOWN_AT_LONGEST = 0.9
"""Share of records and passages that the model must find at 262,144 tokens with a 16-bit cache."""
WITHOUT_VERDICT = "4bit_nc"
UNKNOWN = 0.1
"""Share of wrong answers allowed without cache and drafts."""


def judge_talks(results: Results, plain_name: str) -> list[Row]:
    """Judge conversations with prefix caching and drafts against an engine without both.

    Answers may differ only where both engines have a tie.
    """
    rows = []
    for name, result in results.items():
        if "talk" not in name:
            continue
        plain_engine = _plain_of(name, plain_name, results)
        if result.get("talks"):
            rows.append(
                _talk_row(
                    name, result, plain_engine, results.get(plain_engine, {}).get("talks", [])
                )
            )
        else:
            rows.append(failed_start(name, result))
    return rows


def _plain_of(name: str, plain_name: str, results: Results) -> str:
    for own in ("talk-other", "talk-tq", "talk-bf16-states"):
        if name.startswith(own) and f"{own}-plain" in results:
            return f"{own}-plain"
    return plain_name


def _talk_row(name: str, result: dict[str, Any], plain_engine: str, plain: list[Row]) -> Row:
    rows = result["talks"]
    expected = {_turn_of(answer): answer for answer in plain}
    pairs = [
        (answer, expected[_turn_of(answer)]) for answer in rows if _turn_of(answer) in expected
    ]
    different, ties = find_differences(pairs)
    outside = different - len(ties)
    figures = talk_figures(result)
    caching = bool(result["case"]["options"].get("enable_prefix_caching"))
    if "damage" in name:
        claim = f"{name}: the damage is detected"
        passed = outside > 0
    else:
        claim = f"{name}: every answer as without cache and drafts, outside ties"
        passed = not outside and len(pairs) == len(rows)
        if name == plain_engine:
            claim = f"{name}: the model gives {1 - UNKNOWN:.0%} right answers"
            passed = figures["wrong"] <= UNKNOWN * len(rows)
        passed &= (figures["tokens_found_in_cache"] > 0) == caching
        passed &= not any(answer.get("unlikely") for answer in rows)
    return row(
        claim,
        passed,
        [name, plain_engine],
        **figures,
        other_than_plain=different,
        ties=ties,
        other_outside_ties=outside,
        compared=len(pairs),
        right_token_moved_at_most=moved_at_most(pairs),
        wrong_rounds=sorted({answer["round"] for answer in rows if not answer["right"]}),
        repeats_differ=_repeats_differ(rows),
        block_tokens=result.get("block_tokens"),
        acceptance=acceptance(result),
        acceptance_by_place=acceptance_by_place(result),
    )


def find_differences(pairs: list[tuple[Row, Row]]) -> tuple[int, list[Row]]:
    """Return how many answers differ, and those where both engines have a tie."""
    different = [pair for pair in pairs if pair[0]["tokens"] != pair[1]["tokens"]]
    ties = []
    for first, second in different:
        tokens = zip(first["tokens"], second["tokens"], strict=False)
        place = next((place for place, (a, b) in enumerate(tokens) if a != b), None)
        if place is None:
            continue
        both = [first["tokens"][place], second["tokens"][place]]
        gaps = [_gap(answer["best"][place], *both) for answer in (first, second)]
        if all(gap < TIE for gap in gaps):
            about = {key: first[key] for key in ("client", "round", "kind") if key in first}
            ties.append({**about, "place": place, "tokens": both, "gaps": gaps})
    return len(different), ties


def _gap(best: dict[str, float], first: int, second: int) -> float:
    """Return the distance of two tokens' log-probabilities, inf if one is not among the best."""
    if not {str(first), str(second)} <= best.keys():
        return math.inf
    return round(abs(best[str(first)] - best[str(second)]), 4)


def moved_at_most(pairs: list[tuple[Row, Row]]) -> float:
    """Return the largest change in a right token's log-probability before answers differ."""
    most = 0.0
    for first_answer, second_answer in pairs:
        steps = zip(
            first_answer["tokens"],
            second_answer["tokens"],
            first_answer["logprobs"],
            second_answer["logprobs"],
            strict=True,
        )
        for a, b, first, second in steps:
            most = max(most, change(first, second))
            if a != b:
                break
    return round(most, 4)


def _turn_of(row: Row) -> tuple[Any, ...]:
    return row["round"], row["client"], row["prompt"]


def _repeats_differ(rows: list[Row]) -> int:
    seen: dict[tuple[Any, ...], list[int]] = {}
    differ = 0
    for answer in rows:
        key = answer["client"], answer["prompt"]
        differ += seen.setdefault(key, answer["tokens"]) != answer["tokens"]
    return differ


def judge_flashinfer(results: Results, reference: dict[str, Any]) -> list[Row]:
    base, rows = reference.get("recall", []), []
    ahead = [name for name, result in results.items() if _runs_ahead(result["case"])]
    for name, result in results.items():
        if "talk" in name or name in ahead:
            continue
        if not result.get("recall"):
            rows.append(failed_start(name, result))
        elif "states" in name:
            rows.append(states_row(results, name, base))
        elif "noise" in name:
            rows.append(noise_row(results, name, base))
        else:
            rows.append(recall_row(results, name, base))
    if ahead:
        rows.append(_ahead_row({name: results[name] for name in ahead}, base))
    return rows + judge_talks(results, "fi-talk-plain")


def _runs_ahead(case: dict[str, Any]) -> bool:
    """Return whether an engine runs ahead: it fails depending on the host's speed."""
    options = case["options"]
    flashinfer = options.get("attention_config", {}).get("backend") == "FLASHINFER"
    waits = "speculative_config" in options or "environment" in case or case.get("damage")
    return bool(flashinfer and not waits and options.get("async_scheduling", True))


def _ahead_row(results: Results, base: list[Row]) -> Row:
    """Judge the claim of a guard rail that some of these engines fail or lose answers."""
    became: dict[str, str] = {}
    bad = 0
    for name, result in results.items():
        known = sure(base, answers_of(results, name))
        lost = sum(not answer["right"] for answer in known)
        error = str(result.get("error", [""])[0]).partition("\n")[0]
        became[name] = f"{lost} of {len(known)} lost" if known else error or result["state"]
        bad += not known or 1 - lost / len(known) < ENOUGH
    ran = all(
        result["state"] in ("ran", "refused") and "out of memory" not in str(result.get("error"))
        for result in results.values()
    )
    return row(
        "FlashInfer attention without drafts, where the host prepares the next step: some engines "
        "break down or lose answers",
        ran and bad > 0,
        list(results),
        engines=len(became),
        broke_down_or_lost=bad,
        became=became,
    )


THREE_BITS = ("k3v4", "3bit")
TAKEN = ("tq-k8v4", "tq-4bit_nc")


def judge_recall(results: Results, reference: dict[str, Any]) -> list[Row]:
    base = reference.get("recall", [])
    rows = [
        recall_row(results, name, base)
        for name in results
        if not name.startswith("damage") and results[name].get("recall")
    ]
    for name in results:
        if "bf16-states" in name and results[name].get("recall"):
            rows.append(_bf16_states_row(results, name, base))
        judges = {"damage-band": _band_row, "damage-states": states_row}
        if name.startswith("damage") and results[name].get("recall"):
            rows.append(judges.get(name, noise_row)(results, name, base))
    return rows


def _bf16_states_row(results: Results, name: str, base: list[Row]) -> Row:
    before, after = (
        share(registers(base)) or 0.0,
        share(registers(answers_of(results, name))) or 0.0,
    )
    claim = f"{name}: registers are found as with FP32 states"
    return row(claim, bool(before) and after >= before, [name], fp32=before, bf16=after)


def _band_row(results: Results, name: str, base: list[Row]) -> Row:
    start, end = results[name]["case"]["damage"]["band"]
    rows = sure(base, answers_of(results, name))
    inside = [r for r in rows if start <= r["depth"] * r["length"] < end]
    outside = [r for r in rows if r not in inside]
    seen = (share(inside) or 0.0, share(outside) or 0.0)
    return row(
        f"{name}: positions {start} to {end} taken out of the cache: only they are lost",
        bool(inside) and seen[0] <= LOST and seen[1] >= 0.9,
        [name],
        inside={"answers": len(inside), "right": seen[0]},
        outside={"answers": len(outside), "right": seen[1]},
    )


def judge_turboquant(results: Results, reference: dict[str, Any]) -> list[Row]:
    base, rows = reference.get("recall", []), []
    for name, result in results.items():
        if not result.get("recall"):
            rows.append(failed_start(name, result))
            continue
        result_row = recall_row(results, name, base)
        if result["case"].get("stock_turboquant"):
            result_row |= _stock_row(name, result_row)
        elif any(preset in name for preset in THREE_BITS):
            result_row |= _three_bits_row(results, name, base)
        rows.append(result_row)
    return rows


def _stock_row(name: str, result_row: Row) -> Row:
    """Judge that the stock backend answers correctly without drafts and loses answers with them."""
    if "mtp" not in name:
        return {"claim": f"{result_row['claim']}, by the engine's own backend"}
    claim = f"{name}: the stock backend loses answers with drafts, the plugin's does not"
    return {"claim": claim, "passed": not result_row["passed"]}


def _three_bits_row(results: Results, name: str, base: list[Row]) -> Row:
    others = [other for other in TAKEN if answers_of(results, other)]
    own, *others_moved = (
        divergences(base, answers_of(results, other))["later"].get("mean", 0.0)
        for other in (name, *others)
    )
    claim = f"{name}: further from 16 bit than every preset of a profile"
    return {"claim": claim, "passed": bool(others_moved) and own > max(others_moved)}


def judge_wide(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Judge answers at the longest context, and that concurrent equal sequential answers.

    As in conversations, answers may differ at ties. With 4-bit keys, which no profile uses,
    differences are recorded without a verdict.
    """
    base, result_rows = answers_of(results, "wide-16bit"), []
    for name in results:
        rows, twin = answers_of(results, name), _alone_of(name, results)
        other = answers_of(results, twin)
        result_row = recall_row(results, name, base)
        if name == "wide-16bit":
            passed = (share(looked_up(rows)) or 0.0) >= KNOWN_AT_LONGEST
            claim = f"{name}: {KNOWN_AT_LONGEST:.0%} of records and passages are found"
            result_row |= {"claim": claim, "passed": passed}
        elif any(preset in name for preset in THREE_BITS):
            result_row |= {"passed": None if rows else False}
        result_rows.append(result_row)
        if twin != name:
            different, ties = find_differences(list(zip(rows, other, strict=False)))
            outside = different - len(ties)
            complete = bool(rows) and len(rows) == len(other)
            result_rows.append(
                row(
                    f"{name}: five at once, answered as {twin} answers",
                    None if complete and WITHOUT_VERDICT in name else complete and not outside,
                    [name, twin],
                    different=different,
                    ties=ties,
                    different_outside_ties=outside,
                    divergence=divergences(other, rows),
                )
            )
    return result_rows


def _alone_of(name: str, results: Results) -> str:
    plain = name.removesuffix("-alone").removesuffix("-full-mtp2")
    return f"{plain}-alone" if f"{plain}-alone" in results else plain


def judge_drafts(results: Results, reference: dict[str, Any]) -> list[Row]:
    plain = answers_of(results, "drafts-none")
    result_rows = []
    for name, result in results.items():
        rows = answers_of(results, name)
        same = tokens_of(rows) == tokens_of(plain)
        share_accepted = acceptance(result)
        numbers = {
            "answers": len(rows),
            "acceptance": share_accepted,
            "acceptance_by_place": acceptance_by_place(result),
            "divergence": divergences(plain, rows),
        }
        known = share(looked_up(rows)) or 0.0
        claim = f"{name}: every answer as without drafts"
        passed = bool(rows) and same and known >= KNOWN
        if "damage" in name:
            claim = f"{name}: a drafter that sees noise is accepted almost never; answers stay"
            passed &= share_accepted is not None and share_accepted < LOST
        result_rows.append(row(claim, passed, [name, "drafts-none"], **numbers))
    return result_rows


def judge_sampling(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Judge greedy answers and the distribution of sampled answers; acceptance is shown."""
    rows = []
    for name, result in results.items():
        plain = results[_without_drafts(name)]
        if not (result.get("samples") and plain.get("samples")):
            rows.append(failed_start(name, result))
            continue
        if name == "sampling-v2":  # another head: its distribution is not compared
            rows.append(_greedy_row(results, name))
        elif result is not plain:
            damaged = "damage" in name
            rows.append(sampling.judge_samples(name, result, plain, damaged=damaged))
            if not damaged:
                rows.append(_greedy_row(results, name))
        elif result is not results["sampling-none"]:
            claim = f"{name}: sampled answers, compared with FP32 states"
            compared = sampling.judge_samples(name, result, results["sampling-none"], damaged=False)
            rows.append({**compared, "claim": claim, "passed": None})
        if result["accepted_at"][sampling.GREEDY]["acceptance"] is not None:
            claim = f"{name}: acceptance by temperature"
            rows.append(row(claim, None, [name], **result["accepted_at"]))
    return rows


def _without_drafts(name: str) -> str:
    return "sampling-bf16-states-none" if "bf16-states" in name else "sampling-none"


def _greedy_row(results: Results, name: str) -> Row:
    reference = _without_drafts(name)
    answers, plain = answers_of(results, name), answers_of(results, reference)
    passed = bool(answers) and tokens_of(answers) == tokens_of(plain)
    if "vocabulary" in name:  # drafts with wrong ids would almost never be accepted
        passed &= (acceptance(results[name]) or 0) > LOST
    return row(
        f"{name}: every greedy answer as without drafts",
        passed,
        [name, reference],
        answers=len(answers),
        acceptance=acceptance(results[name]),
        acceptance_by_place=acceptance_by_place(results[name]),
        divergence=divergences(plain, answers),
    )


def judge_formats(results: Results, reference: dict[str, Any]) -> list[Row]:
    base = answers_of(results, "format-16bit")
    return [
        recall_row(results, name, base) if result.get("recall") else failed_start(name, result)
        for name, result in results.items()
    ]


JUDGES: dict[str, Callable[[Results, dict[str, Any]], list[Row]]] = {
    "recall": judge_recall,
    "turboquant": judge_turboquant,
    "wide": judge_wide,
    "drafts": judge_drafts,
    "sampling": judge_sampling,
    "formats": judge_formats,
    "prefixes": lambda results, _: judge_talks(results, "talk-plain"),
    "flashinfer": judge_flashinfer,
    "flashinfer-waiting": judge_flashinfer,
}
