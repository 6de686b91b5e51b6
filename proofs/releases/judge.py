"""Judge served releases: from answers to rows."""

import re

from spark_contract.documents import read
from spark_contract.documents import to_plain as plain_of
from spark_host.check import compare

from proofs.judges.answers import TRAINED_NOISE, Row, answers_agree, compare_answers, row

ACCEPTED_APART = 0.05
WITHOUT = {
    "plain-fp8": "plain-fp8-without",
    "plain-bf16": "plain-bf16-without",
    "plain-ngram": "plain-bf16-without",
}
MTP_ACCEPTED = 0.3
LEAST_ACCEPTED = {"plain-ngram": 0.02}
BLIND = {"seeing-blind": ("must",), "seeing-other": ("warn", "must")}
"""Expected severity of the picture check for a blind tower, and for a different tower."""
COMPARED_NATS = 1e-3
RECALL_NOISE = 0.05
"""Log-probability noise between a single device and two devices."""


def judge_cluster(results: dict[str, Row]) -> list[Row]:
    rows = []
    for name, result in results.items():
        rows.append(_judge_start(name, result))
        if result["state"] != "served":
            continue
        right = sum(answer["tokens"] == answer["wanted"] for answer in result["answers"])
        rows.append(
            row(
                f"{name}: every record, passage and register is found",
                right == len(result["answers"]),
                [name],
                right=right,
                asked=len(result["answers"]),
                wrong=[
                    answer for answer in result["answers"] if answer["tokens"] != answer["wanted"]
                ][:3],
            )
        )
    alone = results["one-host"]
    for name in ("two-hosts-overlay", "two-hosts-full"):
        two = results[name]
        if alone["state"] == two["state"] == "served":
            rows.append(_judge_answers(name, two, "one-host", alone, RECALL_NOISE))
            rows.append(_judge_ranks(name, two))
            rows.append(_judge_cache_size(name, two, alone))
    return rows


def _judge_cache_size(name: str, result: Row, alone: Row) -> Row:
    room, before = cache_tokens(result), cache_tokens(alone)
    return row(
        f"{name}: cache for twice the tokens of a single device, with the same bytes on each",
        before > 0 and 1.9 < room / before < 2.1,
        [name, "one-host"],
        cache_tokens=room,
        cache_tokens_there=before,
    )


def cache_tokens(result: Row) -> int:
    matches = [re.search(r"GPU KV cache size: ([\d,]+) tokens", line) for line in result["log"]]
    return max((int(match[1].replace(",", "")) for match in matches if match), default=0)


def _judge_ranks(name: str, result: Row) -> Row:
    channels = result["ways"]
    ranks = [
        [argv[argv.index(o) + 1] for o in ("--nnodes", "--node-rank")] for argv in result["argv"]
    ]
    over_sockets = channels["via NET/"] > 0 and channels["via P2P"] == channels["via SHM"] == 0
    return row(
        f"{name}: the planned ranks, connected only by sockets",
        over_sockets and ranks == [["2", "0"], ["2", "1"]],
        [name],
        channels=channels,
        nodes_and_ranks=ranks,
    )


def judge_plain(results: dict[str, Row]) -> list[Row]:
    rows = []
    for name, result in results.items():
        rows.append(_judge_start(name, result))
        if result["state"] != "served":
            continue
        rows.append(_judge_check(name, result))
        other = WITHOUT.get(name, "")
        without = results.get(other)
        if without and without["state"] == "served":
            rows.append(_judge_answers(name, result, other, without, TRAINED_NOISE))
            rows.append(_judge_drafts(name, result, other, without))
            rows.append(_judge_comparison(name, result, other, without))
    kinds = [results[f"plain-{kind}-without"] for kind in ("fp8", "bf16")]
    if all(result["state"] == "served" for result in kinds):
        rows.append(_judge_format_difference(*kinds))
    return rows


def _judge_comparison(name: str, result: Row, other: str, without: Row) -> Row:
    near = _compare(result, without)
    return row(
        f"{name}: spark-check --compare finds the same answers as without drafts",
        near.steps > 0 and near.same_answers == near.prompts and near.mean_nats < COMPARED_NATS,
        [name, other],
        **plain_of(near),
    )


def _judge_format_difference(fp8: Row, bf16: Row) -> Row:
    far = _compare(fp8, bf16)
    return row(
        "spark-check --compare distinguishes FP8 from 16 bits",
        far.steps > 0 and far.mean_nats > COMPARED_NATS / 100,
        ["plain-fp8-without", "plain-bf16-without"],
        **plain_of(far),
    )


def _compare(first: Row, second: Row) -> compare.Comparison:
    kept = [read(compare.Answers, result["compared"]) for result in (first, second)]
    return compare.compare_answers(*kept)


def _judge_drafts(name: str, result: Row, other: str, without: Row) -> Row:
    share = accepted(result)
    return row(
        f"{name}: drafts are made and accepted, and none without them",
        (share or 0) > LEAST_ACCEPTED.get(name, MTP_ACCEPTED) and accepted(without) is None,
        [name, other],
        acceptance=share,
        drafts=result["drafts"],
        without=without["drafts"],
    )


def judge_seeing(results: dict[str, Row]) -> list[Row]:
    rows = [_judge_start(name, result) for name, result in results.items()]
    if results["seeing"]["state"] == "served":
        rows.append(_judge_check("seeing", results["seeing"]))
        rows.append(_judge_documents("seeing", results["seeing"], right=True))
    for name, severities in BLIND.items():
        if results[name]["state"] == "served":
            rows.append(_judge_blindness(name, results[name], severities))
            rows.append(_judge_documents(name, results[name], right=False))
    return rows


def _judge_blindness(name: str, result: Row, severities: tuple[str, ...]) -> Row:
    image = next(finding for finding in result["check"] if finding["check"] == "image")
    others = [
        finding for finding in result["check"] if finding["check"] != "image" and not finding["ok"]
    ]
    return row(
        f"{name}: the check's pictures {'fail' if severities[0] == 'must' else 'are warned of'}, "
        "and all other checks pass",
        not image["ok"] and image["severity"] in severities and not failed_checks(others),
        [name],
        image=image,
        others=others,
    )


def _judge_documents(name: str, result: Row, *, right: bool) -> Row:
    same_ = [
        answer["said"].lower().split() == answer["wanted"].split() for answer in result["documents"]
    ]
    claim = "several pictures of a request are named in order"
    return row(
        f"{name}: {claim}" if right else f"{name}: not that {claim}",
        all(same_) if right else sum(same_) <= len(same_) // 2,
        [name],
        right=sum(same_),
        asked=len(same_),
        answers=result["documents"],
    )


def _judge_start(name: str, result: Row) -> Row:
    return row(
        f"{name}: the plan's arguments and environment serve over HTTP",
        result["state"] == "served",
        [name],
        state=result["state"],
        healthy_s=result.get("healthy_s"),
        error=result.get("error"),
    )


def _judge_check(name: str, result: Row) -> Row:
    bad = [finding for finding in result["check"] if not finding["ok"]]
    return row(
        f"{name}: the questions of spark-check --full, the log apart, are answered",
        not failed_checks(bad) and len(result["check"]) > 5,
        [name],
        asked=[finding["check"] for finding in result["check"]],
        not_ok=bad,
    )


def failed_checks(findings: list[Row]) -> list[Row]:
    return [finding for finding in findings if not finding["ok"] and finding["severity"] == "must"]


def _judge_answers(name: str, result: Row, other: str, reference: Row, noise: float) -> Row:
    comparison = compare_answers(reference, result)
    shares = accepted(result), accepted(reference)
    near = None in shares or abs(shares[0] - shares[1]) <= ACCEPTED_APART
    return row(
        f"{name}: token for token as {other} outside ties",
        answers_agree(comparison, noise) and near,
        [name, other],
        acceptance=shares[0],
        acceptance_there=shares[1],
        max_noise=noise,
        **comparison,
    )


def accepted(result: Row) -> float | None:
    drafts = result["drafts"]
    return round(drafts["accepted"] / drafts["drafted"], 3) if drafts["drafted"] else None
