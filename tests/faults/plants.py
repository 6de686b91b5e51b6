"""Ways of serving that cannot work, and the phase of a change in which each of them is caught.

The table in proofs/faults.md says the same; tests/unit/lab/test_plants.py compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plant:
    """One bad release: how the bench writes it, and what a user would have chosen to get it."""

    phase: str
    release: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] | None = None  # None: no choice of a user leads there


def _misbehaving(fault: str, phase: str, *, deployed: bool = False, **more: Any) -> Plant:
    choices = {"engine": {"environment": {"STUB_FAULT": fault}}, "check": {"timeout_s": 10}}
    release = {"engine__env": {"STUB_FAULT": fault}, **more}
    return Plant(phase, release, choices if deployed else None)


PLANTS = {
    "bad flag": Plant(
        "start",
        {"engine__argv": ["--no-such-flag", "1"]},
        {"engine": {"options": {"no-such-flag": 1}}},
    ),
    "out of memory at load": _misbehaving("oom-at-start", "start", deployed=True),
    "garbage answers": _misbehaving("garbage", "start", deployed=True),
    "low acceptance": _misbehaving("low-acceptance", "check", deployed=True),
    "wedge after start": _misbehaving("wedge", "start", deployed=True),
    "wrong served name": _misbehaving("wrong-name", "start", deployed=True),
    "plugin missing": _misbehaving("plugin-missing", "start", deployed=True),
    "crash at start": _misbehaving("crash-at-start", "start"),
    "never ready": _misbehaving(
        "never-ready", "start", timeouts={"start_s": 4, "stop_s": 2, "drain_s": 1}
    ),
    "one token over and over": _misbehaving("nan", "start"),
    "wrong context length": _misbehaving("wrong-context", "start"),
    "errors behind a green health": _misbehaving("error-500", "start"),
    "forbidden log line": _misbehaving("log-forbidden", "start"),
    "wrong arithmetic": _misbehaving("wrong-arithmetic", "check"),
    "copies with a typo": _misbehaving("copy-typo", "check"),
    "crash during the check": Plant(
        "check",
        {
            "engine__env": {
                "STUB_FAULT": "crash-later",
                "STUB_FAULT_AFTER_S": "1.5",
                "STUB_PIECE_S": "0.1",
            }
        },
    ),
    "memory that others hold": Plant("memory", {"memory__wait_s": 2}),
    "more memory than there is": Plant("prove", {"memory__needed_bytes": 1 << 50}),
    "image missing": Plant("prove", {"image__tag": "spark-vllm:none"}),
    "image of another digest": Plant("prove", {"image__digest_label": "e" * 64}),
    "tree half built": Plant(
        "prove", {"tree": {"path": "/srv/spark/models/half", "digest": "d" * 64}}
    ),
}

DEPLOYED = {name: plant for name, plant in PLANTS.items() if plant.choices is not None}
# What no engine's misbehaviour stands for, nor any choice of a user.
BESIDE_THE_ENGINE = (
    "memory that others hold", "more memory than there is", "image missing",
    "image of another digest", "tree half built",
)  # fmt: skip
