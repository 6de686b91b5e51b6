"""The phases of an engine's start, from its log; messages of vLLM 0.33."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract import receipts
from spark_contract.release import Release

from spark_host.engine.memory import available_bytes

# Messages that begin a phase.
_FIRST_MESSAGES = {
    "weights": r"Starting to load model|Loading model from scratch|Loading safetensors checkpoint",
    "compile": r"Model loading took|Dynamo bytecode transform|torch\.compile took",
    "graphs": r"[GC]PU KV cache size: |Capturing CUDA graphs|Graph capturing finished",
    "ready": r"init engine \(|Application startup complete",
}
_MESSAGES = {phase: re.compile(pattern) for phase, pattern in _FIRST_MESSAGES.items()}
_TEXTS = {
    "image": "starting the container",
    "weights": "loading weights",
    "compile": "compiling",
    "graphs": "capturing CUDA graphs",
    "ready": "starting the API",
}
_PHASES = tuple(_TEXTS)


@dataclass(slots=True)
class StartPhases:
    """Follows the log of a start; times are seconds since the container started."""

    release: Release
    began_s: dict[str, float] = field(default_factory=lambda: {_PHASES[0]: 0.0})
    updated_s: float = 0.0
    _weight_bytes: int = 0
    _available_bytes: int = 0  # before the weights

    @property
    def current(self) -> str:
        return next(reversed(self.began_s))

    def update(self, lines: Iterable[str], now_s: float) -> None:
        """Enter the last phase in the log, never an earlier one: drafters repeat messages."""
        self.updated_s, text = now_s, "\n".join(lines)
        later = _PHASES[_PHASES.index(self.current) + 1 :]
        reached = next((name for name in reversed(later) if _MESSAGES[name].search(text)), None)
        if reached:
            self.began_s[reached] = now_s
        if reached == "weights":
            self._weight_bytes = weight_bytes(self.release)
            self._available_bytes = available_bytes()

    def text(self, now_s: float) -> str:
        parts = [_TEXTS[self.current]]
        if self.current == "weights" and (total := self._weight_bytes):
            loaded = min(max(0, self._available_bytes - available_bytes()), total)
            parts.append(f"{loaded / 1e9:.1f} of {total / 1e9:.1f} GB")
        return ", ".join([*parts, f"{now_s - self.began_s[self.current]:.0f} s"])

    def durations_s(self, end_s: float) -> dict[str, float]:
        ends = [*list(self.began_s.values())[1:], end_s]
        return {
            phase: round(max(0.0, end - began), 1)
            for (phase, began), end in zip(self.began_s.items(), ends, strict=True)
        }


def weight_bytes(release: Release) -> int:
    """Return the size of the weights that a member loads into memory; 0 if unknown."""
    if release.check.portable:  # dequantizes them
        return 0
    tree_receipts = (receipts.find_receipt(Path(tree.path)) for tree in release.trees)
    files = [file for receipt in tree_receipts if receipt for file in receipt.files]
    total = sum(file.size_bytes for file in files if file.path.endswith(".safetensors"))
    return total // (len(release.cluster.members) if release.cluster else 1)
