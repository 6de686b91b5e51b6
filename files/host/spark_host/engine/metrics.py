"""An engine's metrics in the Prometheus text format, and the names under which it reports them."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

from spark_contract.errors import HostToolError
from spark_contract.release import Release

# The engine's output is untrusted: vLLM prints some hundred short lines, the rest is not read.
_MAX_SAMPLES = 20_000
_MAX_LINE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of an engine's metrics."""

    running: str  # requests
    waiting: str  # requests
    generated: str  # tokens
    prompt: str  # tokens of completely processed prompts
    cache_usage: str  # share of the KV cache
    drafted: str  # tokens
    accepted: str  # drafted tokens
    prefix_hits: str  # prompt tokens found in the prefix cache


ENGINES: dict[str, Dialect] = {
    "vllm": Dialect(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        generated="vllm:generation_tokens_total",
        prompt="vllm:prompt_tokens_total",
        cache_usage="vllm:kv_cache_usage_perc",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        prefix_hits="vllm:prefix_cache_hits_total",
    ),
}
DEFAULT = ENGINES["vllm"]


def dialect_of(release: Release) -> Dialect:
    """Return the metric names of a release's engine.

    Raises:
        HostToolError: The engine is unknown.
    """
    kind = release.engine.kind
    if kind not in ENGINES:
        message = f"unknown engine; these tools support {', '.join(ENGINES)}"
        raise HostToolError(f"engine {kind!r} of {release.name}", message, "run the deploy again")
    return ENGINES[kind]


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The engine's samples at a moment; ``None`` means that a metric is not reported."""

    samples: tuple[Sample, ...]
    dialect: Dialect = DEFAULT

    @classmethod
    def parse(cls, text: str, dialect: Dialect = DEFAULT) -> Metrics:
        """Parse the Prometheus text format; lines that are not samples are skipped."""
        samples: list[Sample] = []
        for raw_line in StringIO(text):  # line by line: a hostile text may have millions
            line = raw_line.rstrip("\r\n")
            if not line or line.startswith("#") or len(line) > _MAX_LINE:
                continue
            if len(samples) == _MAX_SAMPLES:
                break
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            try:
                samples.append(Sample(name.strip(), _labels(labels.rstrip("}")), float(value)))
            except ValueError:
                continue
        return cls(tuple(samples), dialect)

    def total(self, name: str) -> float | None:
        """Return the sum over all label sets."""
        values = [sample.value for sample in self.samples if sample.name == name]
        return sum(values) if values else None

    def has(self, name: str, labels: dict[str, str]) -> bool:
        return any(
            sample.name == name and labels.items() <= sample.labels.items()
            for sample in self.samples
        )

    @property
    def running(self) -> float:
        return self.total(self.dialect.running) or 0.0

    @property
    def unfinished(self) -> float:
        """Requests running or waiting."""
        return self.running + (self.total(self.dialect.waiting) or 0.0)

    @property
    def generated(self) -> float:
        return self.total(self.dialect.generated) or 0.0

    @property
    def tokens(self) -> float:
        """Prompt and generated tokens so far."""
        return self.generated + (self.total(self.dialect.prompt) or 0.0)

    @property
    def drafted(self) -> float | None:
        return self.total(self.dialect.drafted)

    @property
    def accepted(self) -> float | None:
        return self.total(self.dialect.accepted)

    @property
    def prefix_hits(self) -> float | None:
        return self.total(self.dialect.prefix_hits)

    @property
    def progress(self) -> tuple[float, float]:
        """Numbers that change while the engine works; compare them with an earlier pair.

        Token counters stand still during a chunked prefill of a long prompt, but each chunk takes
        cache blocks, so the cache usage changes (measured: proofs/engine-proofs.md).
        """
        return self.tokens, self.total(self.dialect.cache_usage) or 0.0


def _labels(text: str) -> dict[str, str]:
    labels = {}
    while text:
        key, _, text = text.partition('="')
        value, _, text = text.partition('"')
        labels[key.strip(" ,")] = value
    return labels
