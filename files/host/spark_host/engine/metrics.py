"""What an engine counts, in the text format of Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

from spark_host.engine.dialect import USUAL, Dialect

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
    dialect: Dialect = USUAL

    @classmethod
    def parse(cls, text: str, dialect: Dialect = USUAL) -> Metrics:
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
        return cls(tuple(found), dialect)

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
        return self.total(self.dialect.running) or 0.0

    @property
    def unfinished(self) -> float:
        """Requests running or waiting."""
        return self.running + (self.total(self.dialect.waiting) or 0.0)

    @property
    def generated(self) -> float:
        """Tokens generated so far, for anybody."""
        return self.total(self.dialect.generated) or 0.0

    @property
    def tokens(self) -> float:
        """Prompt and generated tokens so far; a prompt counts when all of it was read."""
        names = (self.dialect.generated, self.dialect.read)
        return sum(self.total(name) or 0.0 for name in names)

    @property
    def drafted(self) -> float | None:
        """Tokens drafted so far; ``None``: it drafts nothing."""
        return self.total(self.dialect.drafted)

    @property
    def accepted(self) -> float | None:
        """Drafted tokens that were right."""
        return self.total(self.dialect.accepted)

    @property
    def found_again(self) -> float | None:
        """Tokens of prompts whose cache was kept; ``None``: none is."""
        return self.total(self.dialect.found_again)

    @property
    def progress(self) -> tuple[float, float]:
        """What moves while work is done; only ever compared with an earlier one.

        The tokens stand still while a long prompt is read in chunks. Each chunk takes blocks of the
        cache, so the share in use moves (seen on a GPU: proofs/engine-proofs.md).
        """
        return self.tokens, self.total(self.dialect.cache_share) or 0.0


def _labels(text: str) -> dict[str, str]:
    labels = {}
    rest = text
    while rest:
        key, _, rest = rest.partition('="')
        value, _, rest = rest.partition('"')
        labels[key.strip(" ,")] = value
    return labels
