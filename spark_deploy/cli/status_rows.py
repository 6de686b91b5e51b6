"""The short output of ``spark-deploy status``: a line per service."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from spark_deploy.plan.memory import gib


def short_lines(hosts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per service and a line per problem."""
    rows = [row for host in hosts for row in _short_rows(host)]
    # Rows with only a name and a message are not aligned.
    aligned_rows = [cells for cells, _ in rows if len(cells) > 2]
    widths = [max(map(len, column)) for column in zip(*aligned_rows, strict=True)]
    for cells, problems in rows:
        padded = map(str.ljust, cells, widths) if cells in aligned_rows else cells
        yield "  ".join(padded).rstrip()
        yield from (f"    {problem}" for problem in problems if problem)


def _short_rows(host: Mapping[str, Any]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the cells of each row, and the problems to print below it."""
    name = host["host"]
    if not host["reachable"] or not host["installed"]:
        yield [f"○ {name}", host["problem"] or "not set up yet"], []
        return
    rollout = host["rollout"]["text"] if host["rollout"] else ""
    daily_problems = [
        f"{problem['where']}: {problem['what']}" for problem in host["daily"].get("problems", ())
    ]
    # A host's own fields describe its main service.
    yield _short_cells(name, host, host), [host["drift"], rollout, *daily_problems]
    for service in host["services"]:
        yield _short_cells(f"{name}/{service['service']}", service, host), []


def _short_cells(name: str, service: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    if not service["release"]:
        return [f"○ {name}", service["stopped"] or service.get("unreadable") or "serves nothing"]
    proof = service["proof"]
    bench = proof.get("bench") or {}
    speed = (bench.get("one_stream_tokens_per_s") or {}).get("median")
    free_bytes = host["memory"].get("available_bytes")
    symbol = "◐" if service["drift"] else "●"
    return [
        f"{symbol} {name}", service["model"], service["profile"],
        f"{speed:.1f} tok/s" if speed else "- tok/s",
        f"{gib(free_bytes)} free" if free_bytes else "",
        f"checked {check_age(proof)}" if proof else "not checked",
    ]  # fmt: skip


def check_age(proof: Mapping[str, Any]) -> str:
    checked_at = str(proof.get("checked_at"))
    try:
        timestamp = datetime.fromisoformat(checked_at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return f"at an unknown time ({checked_at})"
    age_s = max(0.0, datetime.now(timezone.utc).timestamp() - timestamp)
    for unit, unit_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if age_s >= unit_s:
            count = int(age_s // unit_s)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
