"""Releases that cannot serve, and the phase of a rollout that rejects each.

proofs/faults.md documents the same table; tests/unit/lab/test_fault_lists.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BadRelease:
    """The values of release.json, and the settings that lead to such a release, if any do."""

    phase: str
    release: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] | None = None


def _faulty(fault: str, phase: str, *, deployed: bool = False, **more: Any) -> BadRelease:
    choices = {"engine": {"environment": {"STUB_FAULT": fault}}, "check": {"timeout_s": 10}}
    release = {"engine__env": {"STUB_FAULT": fault}, **more}
    return BadRelease(phase, release, choices if deployed else None)


BAD_RELEASES = {
    "bad flag": BadRelease(
        "start",
        {"engine__argv": ["--no-such-flag", "1"]},
        {"engine": {"options": {"no-such-flag": 1}}},
    ),
    "out of memory at load": _faulty("oom-at-start", "start", deployed=True),
    "garbage answers": _faulty("garbage", "start", deployed=True),
    "low acceptance": _faulty("low-acceptance", "check", deployed=True),
    "wedge after start": _faulty("wedge", "start", deployed=True),
    "wrong served name": _faulty("wrong-name", "start", deployed=True),
    "plugin missing": _faulty("plugin-missing", "start", deployed=True),
    "crash at start": _faulty("crash-at-start", "start"),
    "never ready": _faulty(
        "never-ready", "start", timeouts={"start_s": 4, "stop_s": 2, "drain_s": 1}
    ),
    "one token over and over": _faulty("nan", "start"),
    "wrong context length": _faulty("wrong-context", "start"),
    "errors behind a green health": _faulty("error-500", "start"),
    "forbidden log line": _faulty("log-forbidden", "start"),
    "wrong arithmetic": _faulty("wrong-arithmetic", "check"),
    "copies with a typo": _faulty("copy-typo", "check"),
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
    "memory that others hold": BadRelease("memory", {"memory__wait_s": 2}),
    "more memory than there is": BadRelease("prove", {"memory__needed_bytes": 1 << 50}),
    "image missing": BadRelease("prove", {"image__tag": "spark-vllm:none"}),
    "image of another digest": BadRelease("prove", {"image__digest_label": "e" * 64}),
    "tree half built": BadRelease(
        "prove", {"tree": {"path": "/srv/spark/models/half", "digest": "d" * 64}}
    ),
}
DEPLOYED = {name: bad for name, bad in BAD_RELEASES.items() if bad.choices is not None}
