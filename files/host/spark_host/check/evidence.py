"""Checks of what the engine shows about itself: readiness, names, counters, log."""

from __future__ import annotations

import re
import time
from typing import Any

from spark_contract.release import MODELS

from spark_host.check.probe import CheckError, Probe, short
from spark_host.engine.client import EngineError
from spark_host.engine.metrics import Metrics

_DRAFTS_WANTED = 60
_ALMOST_NONE = 0.1  # a drafter without weights serves like that; a slow one is no broken server
_COUNTER_WAIT_S = 10.0


def listed_models(probe: Probe) -> list[dict[str, Any]]:
    """Return what ``/v1/models`` lists."""
    try:
        reply = probe.engine.get(MODELS, probe.left_s)
        if reply.status != 200:
            raise CheckError(f"{MODELS} answers HTTP {reply.status}")
        data = reply.json().get("data")
    except EngineError as error:
        raise CheckError(f"{MODELS}: {error}") from error
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise CheckError(f"{MODELS} lists no models")
    return data


def served_names(probe: Probe) -> str:
    """The engine answers to exactly the names of the release."""
    found = [str(item.get("id")) for item in listed_models(probe)]
    wanted = list(probe.release.names)
    if sorted(found) != sorted(wanted):
        raise CheckError(f"it serves the names {found}, the release wants {wanted}")
    return f"it serves {', '.join(found)}"


def context_length(probe: Probe) -> str:
    """The engine accepts contexts as long as the release says."""
    wanted = probe.plan.max_model_len
    for item in listed_models(probe):
        if item.get("max_model_len") != wanted:
            raise CheckError(
                f"max_model_len of {item.get('id')} is {item.get('max_model_len')}, "
                f"the release wants {wanted}"
            )
    return f"contexts of {wanted} tokens are accepted"


def counters_move(probe: Probe) -> str:
    """The engine counts the tokens it returned."""
    if probe.tokens_seen == 0:
        raise CheckError("not one token was returned")
    before = probe.before.tokens if probe.before else 0.0
    deadline = time.monotonic() + _COUNTER_WAIT_S
    while True:
        moved = probe.metrics().tokens - before
        if moved >= probe.tokens_seen:
            return f"the token counters moved by {moved:.0f}"
        if time.monotonic() > deadline:
            raise CheckError(
                f"the token counters moved by {moved:.0f} while "
                f"{probe.tokens_seen} tokens were returned"
            )
        time.sleep(0.2)


def acceptance(probe: Probe) -> str:
    """Speculation has its drafts accepted often enough to be worth its cost."""
    floor = probe.plan.acceptance_floor or 0.0
    before = probe.before or Metrics(())
    drafted = accepted = 0.0
    limit = max(16, min(128, probe.plan.max_model_len // 4))
    for question in (probe.plan.questions * 8)[:8]:
        # Text of some length: the first tokens after a prompt say little about the drafter.
        probe.say(question.prompt, limit, thinking=question.thinking)
        after = probe.metrics()
        if after.drafted is None:
            raise CheckError("the engine has no counters of speculation: it is switched off")
        drafted = after.drafted - (before.drafted or 0.0)
        accepted = (after.accepted or 0.0) - (before.accepted or 0.0)
        if drafted >= _DRAFTS_WANTED:
            break
    if drafted <= 0:
        raise CheckError("not one token was drafted")
    rate = accepted / drafted
    if not rate >= floor:
        what = f"{rate:.0%} of {drafted:.0f} drafted tokens were accepted, the floor is {floor:.0%}"
        raise CheckError(what, None if rate < _ALMOST_NONE else "warn")
    return f"{rate:.0%} of {drafted:.0f} drafted tokens were accepted (floor {floor:.0%})"


def metrics_required(probe: Probe) -> str:
    """The engine's metrics show the settings of the release."""
    metrics = probe.metrics()
    for name, wanted in probe.plan.metrics_required.items():
        if isinstance(wanted, dict):
            labels = {str(key): str(value) for key, value in wanted.items()}
            if not metrics.has(name, labels):
                raise CheckError(f"no sample of {name} carries {labels}")
        else:
            value = metrics.total(name)
            if value is None or value < float(wanted):
                raise CheckError(f"{name} is {value}, at least {wanted} is wanted")
    return f"{len(probe.plan.metrics_required)} metrics are as the release wants them"


def log_lines(probe: Probe) -> str:
    """The engine's log has every line it must have and none it must not have."""
    lines = probe.read_log()
    for pattern in probe.plan.log_forbidden:
        found = next((line for line in lines if re.search(pattern, line)), None)
        if found is not None:
            raise CheckError(f"the log has a forbidden line: {short(found, 120)}")
    for pattern in probe.plan.log_required:
        found = next((line for line in lines if re.search(pattern, line)), None)
        if found is None:
            raise CheckError(f"the log ({len(lines)} lines) has no line matching {pattern!r}")
        probe.load_lines.append(found)
    count = len(probe.plan.log_required)
    return f"{count} expected log lines found, no forbidden one"


def healthy(probe: Probe) -> str:
    """The engine is still up after all this."""
    try:
        status = probe.engine.get("/health", probe.left_s).status
    except EngineError as error:
        raise CheckError(f"the engine went away during the check: {error}") from error
    if status != 200:
        raise CheckError(f"/health answers HTTP {status} after the check")
    return "the engine is healthy after the check"
