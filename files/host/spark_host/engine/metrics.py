"""What an engine counts, in the text format of Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

from spark_contract.errors import HostToolError
from spark_contract.release import Release

# A release names its row. Releases, proofs and watch speak of what is counted in the words of
# ``Dialect`` alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of one engine: of what it counts, in the text form of Prometheus."""

    running: str  # requests it works on
    waiting: str
    generated: str  # tokens
    read: str  # tokens of prompts
    cache_share: str  # of the KV cache in use
    drafted: str  # tokens
    accepted: str  # of these
    found_again: str  # tokens of prompts whose cache was kept


ENGINES: dict[str, Dialect] = {
    "vllm": Dialect(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        generated="vllm:generation_tokens_total",
        read="vllm:prompt_tokens_total",
        cache_share="vllm:kv_cache_usage_perc",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        found_again="vllm:prefix_cache_hits_total",
    ),
}
USUAL = ENGINES["vllm"]


def problem(release: Release) -> HostToolError | None:
    """Return why these tools cannot talk to a release's engine; ``None`` when they can."""
    kind = release.engine.kind
    if kind in ENGINES:
        return None
    what = f"is no engine that these tools know ({', '.join(ENGINES)})"
    return HostToolError(f"engine {kind!r} of {release.name}", what, "run the deploy again")


def of(release: Release) -> Dialect:
    """Return what a release's engine calls what it has.

    Raises:
        HostToolError: These tools do not know it.
    """
    refused = problem(release)
    if refused is not None:
        raise refused
    return ENGINES[release.engine.kind]


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
