"""What an engine counts, in the text format of Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

# An engine of ours prints some hundred short lines; what goes beyond these is not read.
_MAX_SAMPLES = 20_000
_MAX_LINE = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the Prometheus text format."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The engine's samples at one moment."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read the Prometheus text format; lines that are not samples are skipped."""
        found: list[Sample] = []
        for written in StringIO(text):  # one line after the other, not all of them at once
            line = written.rstrip("\r\n")
            if not line or line.startswith("#") or len(line) > _MAX_LINE:
                continue
            if len(found) == _MAX_SAMPLES:
                break
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            try:
                found.append(Sample(name.strip(), _labels(labels.rstrip("}")), float(value)))
            except ValueError:
                continue
        return cls(tuple(found))

    def total(self, name: str) -> float | None:
        """Return the sum over all label sets; ``None`` when the name is absent."""
        values = [sample.value for sample in self.samples if sample.name == name]
        return sum(values) if values else None

    def has(self, name: str, labels: dict[str, str]) -> bool:
        """Return whether some sample of ``name`` carries these labels."""
        return any(
            sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items())
            for sample in self.samples
        )

    @property
    def running(self) -> float:
        """Requests the engine works on."""
        return self.total("vllm:num_requests_running") or 0.0

    @property
    def unfinished(self) -> float:
        """Requests running or waiting."""
        return self.running + (self.total("vllm:num_requests_waiting") or 0.0)

    @property
    def generated(self) -> float:
        """Tokens generated so far, for anybody."""
        return self.total("vllm:generation_tokens_total") or 0.0

    @property
    def tokens(self) -> float:
        """Prompt and generated tokens so far; a prompt counts when all of it was read."""
        names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
        return sum(self.total(name) or 0.0 for name in names)

    @property
    def progress(self) -> tuple[float, float]:
        """What moves while work is done; only ever compared with an earlier one.

        The tokens stand still while a long prompt is read in chunks. Each chunk takes blocks of the
        cache, so the share in use moves (seen on a GPU: docs/reference/engine-proofs.md).
        """
        return self.tokens, self.total("vllm:kv_cache_usage_perc") or 0.0


def _labels(text: str) -> dict[str, str]:
    labels = {}
    rest = text
    while rest:
        key, _, rest = rest.partition('="')
        value, _, rest = rest.partition('"')
        labels[key.strip(" ,")] = value
    return labels
