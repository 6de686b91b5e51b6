"""What served releases prove: from what they said to rows of claim, numbers and verdict."""

from __future__ import annotations

import re
from typing import Any

from spark_contract.documents import plain as plain_of
from spark_contract.documents import read
from spark_host.check import compare

from proofs.judges.answers import TRAINED_NOISE, compare_answers, same

Row = dict[str, Any]
ACCEPTED_APART = 0.05
WITHOUT = {
    "plain-fp8": "plain-fp8-without",
    "plain-bf16": "plain-bf16-without",
    "plain-ngram": "plain-bf16-without",
}
"""The run without drafts that one with them is held against."""
MTP_ACCEPTED = 0.3
LEAST_ACCEPTED = {"plain-ngram": 0.02}
"""Words that stood before are a guess; the lab's answers repeat little."""
BLIND = {"seeing-blind": ("must",), "seeing-other": ("warn", "must")}
"""How the check has to weigh pictures that are all the same, or others, to a damaged tower."""
COMPARED_NATS = 1e-3
RECALL_NOISE = 0.05
"""Of a log-probability between one device and two, which add up in another order."""


def row(claim: str, passed: bool, cases: list[str], **numbers: Any) -> Row:
    return {"claim": claim, "passed": bool(passed), "cases": cases, "numbers": numbers}


def cluster(results: dict[str, Row]) -> list[Row]:
    """Judge two processes that take each other for two hosts against one device."""
    found = []
    for name, result in results.items():
        found.append(_served(name, result))
        if result["state"] != "served":
            continue
        right = sum(one["tokens"] == one["wanted"] for one in result["answers"])
        found.append(
            row(
                f"{name}: every record, passage and register is found",
                right == len(result["answers"]),
                [name],
                right=right,
                asked=len(result["answers"]),
                wrong=[one for one in result["answers"] if one["tokens"] != one["wanted"]][:3],
            )
        )
    alone = results["one-host"]
    for name in ("two-hosts-overlay", "two-hosts-full"):
        two = results[name]
        if alone["state"] == two["state"] == "served":
            found.append(_alike(name, two, "one-host", alone, RECALL_NOISE))
            found.append(_apart(name, two))
            found.append(_room(name, two, alone))
    return found


def _room(name: str, result: Row, alone: Row) -> Row:
    room, before = cache_tokens(result), cache_tokens(alone)
    return row(
        f"{name}: room for twice the tokens of one device, with the same bytes on each",
        before > 0 and 1.9 < room / before < 2.1,
        [name, "one-host"],
        cache_tokens=room,
        cache_tokens_there=before,
    )


def cache_tokens(result: Row) -> int:
    """Return how many tokens an engine said that its cache holds; 0 when it said nothing."""
    found = [re.search(r"GPU KV cache size: ([\d,]+) tokens", line) for line in result["log"]]
    return max((int(one[1].replace(",", "")) for one in found if one), default=0)


def _apart(name: str, result: Row) -> Row:
    ways = result["ways"]
    told = [
        [argv[argv.index(o) + 1] for o in ("--nnodes", "--node-rank")] for argv in result["argv"]
    ]
    over_sockets = ways["via NET/"] > 0 and ways["via P2P"] == ways["via SHM"] == 0
    return row(
        f"{name}: the plan's own ranks, which meet over sockets alone",
        over_sockets and told == [["2", "0"], ["2", "1"]],
        [name],
        channels=ways,
        nodes_and_ranks=told,
    )


def plain(results: dict[str, Row]) -> list[Row]:
    """Judge plain repositories with the engine's own speculation against the same without."""
    found = []
    for name, result in results.items():
        found.append(_served(name, result))
        if result["state"] != "served":
            continue
        found.append(_checked(name, result))
        other = WITHOUT.get(name, "")
        without = results.get(other)
        if without and without["state"] == "served":
            found.append(_alike(name, result, other, without, TRAINED_NOISE))
            found.append(_drafted(name, result, other, without))
            found.append(_compared(name, result, other, without))
    kinds = [results[f"plain-{kind}-without"] for kind in ("fp8", "bf16")]
    if all(one["state"] == "served" for one in kinds):
        found.append(_told_apart(*kinds))
    return found


def _compared(name: str, result: Row, other: str, without: Row) -> Row:
    near = _comparison(result, without)
    return row(
        f"{name}: spark-check --compare finds no other answer than without drafts",
        near.steps > 0 and near.same_answers == near.prompts and near.mean_nats < COMPARED_NATS,
        [name, other],
        **plain_of(near),
    )


def _told_apart(fp8: Row, bf16: Row) -> Row:
    far = _comparison(fp8, bf16)
    return row(
        "spark-check --compare tells FP8 from 16 bits",
        far.steps > 0 and far.mean_nats > COMPARED_NATS / 100,
        ["plain-fp8-without", "plain-bf16-without"],
        **plain_of(far),
    )


def _comparison(one: Row, other: Row) -> compare.Comparison:
    kept = [read(compare.Answers, found["compared"]) for found in (one, other)]
    return compare.compare_answers(*kept)


def _drafted(name: str, result: Row, other: str, without: Row) -> Row:
    share = accepted(result)
    return row(
        f"{name}: drafts are made and accepted, and none without them",
        (share or 0) > LEAST_ACCEPTED.get(name, MTP_ACCEPTED) and accepted(without) is None,
        [name, other],
        acceptance=share,
        drafts=result["drafts"],
        without=without["drafts"],
    )


def seeing(results: dict[str, Row]) -> list[Row]:
    """Judge that pictures are seen: named by a trained tower, and not by a damaged one."""
    found = [_served(name, result) for name, result in results.items()]
    if results["seeing"]["state"] == "served":
        found.append(_checked("seeing", results["seeing"]))
        found.append(_documents("seeing", results["seeing"], right=True))
    for name, weights in BLIND.items():
        if results[name]["state"] == "served":
            found.append(_noticed(name, results[name], weights))
            found.append(_documents(name, results[name], right=False))
    return found


def _noticed(name: str, result: Row, weights: tuple[str, ...]) -> Row:
    image = next(one for one in result["check"] if one["check"] == "image")
    others = [one for one in result["check"] if one["check"] != "image" and not one["ok"]]
    return row(
        f"{name}: the check's pictures {'fail' if weights[0] == 'must' else 'are warned of'}, "
        "and nothing else fails",
        not image["ok"] and image["weight"] in weights and not failed(others),
        [name],
        image=image,
        others=others,
    )


def _documents(name: str, result: Row, *, right: bool) -> Row:
    same_ = [one["said"].lower().split() == one["wanted"].split() for one in result["documents"]]
    claim = "several pictures of one request are named in their order"
    return row(
        f"{name}: {claim}" if right else f"{name}: not that {claim}",
        all(same_) if right else sum(same_) <= len(same_) // 2,
        [name],
        right=sum(same_),
        asked=len(same_),
        answers=result["documents"],
    )


def _served(name: str, result: Row) -> Row:
    return row(
        f"{name}: the plan's arguments and environment serve over HTTP",
        result["state"] == "served",
        [name],
        state=result["state"],
        healthy_s=result.get("healthy_s"),
        error=result.get("error"),
    )


def _checked(name: str, result: Row) -> Row:
    bad = [one for one in result["check"] if not one["ok"]]
    return row(
        f"{name}: the questions of spark-check --full, the log apart, are answered",
        not failed(bad) and len(result["check"]) > 5,
        [name],
        asked=[one["check"] for one in result["check"]],
        not_ok=bad,
    )


def failed(findings: list[Row]) -> list[Row]:
    return [one for one in findings if not one["ok"] and one["weight"] == "must"]


def _alike(name: str, result: Row, other: str, reference: Row, noise: float) -> Row:
    found = compare_answers(reference, result)
    shares = accepted(result), accepted(reference)
    near = None in shares or abs(shares[0] - shares[1]) <= ACCEPTED_APART
    return row(
        f"{name}: token for token as {other} outside ties",
        same(found, noise) and near,
        [name, other],
        acceptance=shares[0],
        acceptance_there=shares[1],
        most_noise=noise,
        **found,
    )


def accepted(result: Row) -> float | None:
    """Return the accepted share of drafted tokens; ``None`` where nothing was drafted."""
    drafts = result["drafts"]
    return round(drafts["accepted"] / drafts["drafted"], 3) if drafts["drafted"] else None
