"""Releases that cannot serve, and the phase of a rollout that rejects each.

proofs/faults.md documents the same table; tests/unit/lab/test_fault_lists.py compares them.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BadRelease:
    """Values for ``release.json``, and the settings of a deploy that lead to them, if any do."""

    phase: str
    release: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] | None = None


def _with_fault(fault: str, phase: str, *, by_deploy: bool = False, **values: Any) -> BadRelease:
    choices = {"engine": {"environment": {"STUB_FAULT": fault}}, "check": {"timeout_s": 10}}
    release = {"engine__env": {"STUB_FAULT": fault}, **values}
    return BadRelease(phase, release, choices if by_deploy else None)


BAD_RELEASES = {
    "bad flag": BadRelease(
        "start",
        {"engine__argv": ["--no-such-flag", "1"]},
        {
            "engine": {"options": {"no-such-flag": 1}},
            "override_rails": {"unlisted-option": "the engine shall refuse it"},
        },
    ),
    "out of memory at load": _with_fault("oom-at-start", "start", by_deploy=True),
    "garbage answers": _with_fault("garbage", "start", by_deploy=True),
    "low acceptance": _with_fault("low-acceptance", "check", by_deploy=True),
    "hang after start": _with_fault("wedge", "start", by_deploy=True),
    "wrong served name": _with_fault("wrong-name", "start", by_deploy=True),
    "plugin missing": _with_fault("plugin-missing", "start", by_deploy=True),
    "crash at start": _with_fault("crash-at-start", "start"),
    "never ready": _with_fault(
        "never-ready", "start", timeouts={"start_s": 4, "stop_s": 2, "drain_s": 1}
    ),
    "same token repeated": _with_fault("nan", "start"),
    "wrong context length": _with_fault("wrong-context", "start"),
    "errors while the health check passes": _with_fault("error-500", "start"),
    "forbidden log line": _with_fault("log-forbidden", "start"),
    "wrong arithmetic": _with_fault("wrong-arithmetic", "check"),
    "copied text has a typo": _with_fault("copy-typo", "check"),
    "crash during the check": BadRelease(
        "check",
        {
            "engine__env": {
                "STUB_FAULT": "crash-later",
                "STUB_FAULT_AFTER_S": "1.5",
                "STUB_PIECE_S": "0.1",
            }
        },
    ),
    "memory in use by others": BadRelease("memory", {"memory__wait_s": 2}),
    "more memory than the host has": BadRelease("prove", {"memory__needed_bytes": 1 << 50}),
    "image missing": BadRelease("prove", {"image__tag": "spark-vllm:none"}),
    "image with a different digest": BadRelease("prove", {"image__digest_label": "e" * 64}),
    "incomplete checkpoint": BadRelease(
        "prove", {"tree": {"path": "/srv/spark/models/half", "digest": "d" * 64}}
    ),
}
DEPLOYED = {name: bad for name, bad in BAD_RELEASES.items() if bad.choices is not None}
