"""Judge conversations with prefix caching and drafts against an engine without both.

Answers may differ only if the right token has at least a third of the probability but is not the
best. Questions that the reference answers wrongly must stay wrong.
"""

from typing import Any

from proofs.judges.answers import acceptance, failed_start, row
from proofs.recall.judge import CLEAR, DOUBT, Results, Row, acceptance_by_place, talk_figures

UNKNOWN = 0.1
"""Share of wrong answers allowed without cache and drafts."""


def judge_talks(results: Results, plain_name: str) -> list[Row]:
    rows = []
    for name, result in results.items():
        if "talk" not in name:
            continue
        plain_engine = _plain_of(name, plain_name, results)
        if result.get("talks"):
            rows.append(
                _row(name, result, plain_engine, results.get(plain_engine, {}).get("talks", []))
            )
        else:
            rows.append(failed_start(name, result))
    return rows


def _plain_of(name: str, plain_name: str, results: Results) -> str:
    for own in ("talk-other", "talk-tq"):
        if name.startswith(own) and f"{own}-plain" in results:
            return f"{own}-plain"
    return plain_name


def _row(name: str, result: dict[str, Any], plain_engine: str, plain: list[Row]) -> Row:
    rows = result["talks"]
    expected = {_question(answer): answer for answer in plain}
    pairs = [
        (answer, expected[_question(answer)]) for answer in rows if _question(answer) in expected
    ]
    other = [pair for pair in pairs if pair[0]["tokens"] != pair[1]["tokens"]]
    figures = talk_figures(result)
    doubtful = sum(in_doubt(answer) for answer in rows if not answer["right"])
    outside = sum(not (in_doubt(answer) or in_doubt(reference)) for answer, reference in other)
    caching = bool(result["case"]["options"].get("enable_prefix_caching"))
    surely_wrong, in_plain = figures["wrong"] - doubtful, _surely_wrong(plain)
    if "damage" in name:
        claim = f"{name}: the damage is detected"
        passed = surely_wrong > in_plain
    else:
        claim = f"{name}: every answer token for token as without cache and drafts"
        passed = surely_wrong <= in_plain and not outside and len(pairs) == len(rows)
        if name == plain_engine:
            claim = f"{name}: the model gives {1 - UNKNOWN:.0%} right answers"
            passed = figures["wrong"] <= UNKNOWN * len(rows)
        passed &= (figures["tokens_found_in_cache"] > 0) == caching
    return row(
        claim,
        passed,
        [name, plain_engine],
        **figures,
        wrong_where_the_model_doubts=doubtful,
        other_than_plain=len(other),
        other_outside_doubt=outside,
        compared=len(pairs),
        right_token_moved_at_most=moved(pairs),
        wrong_rounds=sorted({answer["round"] for answer in rows if not answer["right"]}),
        repeats_differ=_repeats_differ(rows),
        block_tokens=result.get("block_tokens"),
        acceptance=acceptance(result),
        acceptance_by_place=acceptance_by_place(result),
    )


def _surely_wrong(rows: list[Row]) -> int:
    return sum(not row["right"] and not in_doubt(row) for row in rows)


def in_doubt(row: Row) -> bool:
    """Return whether the first unclear step gives the right token at least a third."""
    unclear = [value for value in row["logprobs"] if value < CLEAR]
    return bool(unclear) and unclear[0] >= DOUBT


def moved(pairs: list[tuple[Row, Row]]) -> float:
    """Return the largest change of a right token's log-probability before answers differ."""
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
            most = max(most, abs(first - second))
            if a != b:
                break
    return round(most, 4)


def _question(row: Row) -> tuple[Any, ...]:
    return row["round"], row["client"], row["prompt"]


def _repeats_differ(rows: list[Row]) -> int:
    seen: dict[tuple[Any, ...], list[int]] = {}
    differ = 0
    for answer in rows:
        key = answer["client"], answer["prompt"]
        differ += seen.setdefault(key, answer["tokens"]) != answer["tokens"]
    return differ
