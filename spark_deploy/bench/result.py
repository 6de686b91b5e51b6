"""A benchmark result: figures by protocol, and samples from the host."""

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from spark_contract.documents import OPTIONAL
from spark_contract.tool import LAB_STUB_SUFFIX

from spark_deploy.config.documents import CLOSED


@dataclass(frozen=True, slots=True, config=CLOSED)
class Answer:
    """An answer in protocol `seeds`; token counts are from the server's usage block."""

    prompt: str
    """Name of the prompt."""
    run: PositiveInt
    """Run 1 is the warm-up, which reports exclude."""
    asked_tokens: PositiveInt
    """Requested limit on answer tokens."""
    prompt_tokens: NonNegativeInt
    """Tokens in the prompt."""
    completion_tokens: NonNegativeInt
    """Tokens in the answer."""
    first_token_s: NonNegativeFloat
    """Time from the request to the first token."""
    wall_s: NonNegativeFloat
    """Time from the request to the end of the answer."""

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True, config=CLOSED)
class Cell:
    """A llama-benchy case; means over all runs."""

    depth_tokens: NonNegativeInt
    """Tokens of context before the prompt."""
    concurrency: PositiveInt
    """Concurrent clients."""
    prompt_tokens: NonNegativeInt
    """Prompt size (pp)."""
    generated_tokens: NonNegativeInt
    """Answer size (tg)."""
    prefill_tokens_per_s: float | None
    """Sum over all clients."""
    decode_tokens_per_s: float | None
    """Sum over all clients."""
    decode_deviation: float | None
    """Standard deviation of the decode speed."""
    first_response_ms: float | None
    """Mean time to the first response."""

    @property
    def case(self) -> tuple[int, ...]:
        return self.depth_tokens, self.concurrency


@dataclass(frozen=True, slots=True, config=CLOSED)
class Load:
    """A `vllm bench serve` case: random prompts, greedy decoding, fixed-length answers."""

    concurrency: PositiveInt
    """Concurrent clients."""
    prompt_tokens: PositiveInt
    """Requested size of each prompt."""
    answer_tokens: PositiveInt
    """Requested size of each answer."""
    requests: PositiveInt
    """Requests after the warm-up."""
    completed: NonNegativeInt
    """Completed requests."""
    seed: int
    """Seed for the random prompts; a new seed per case avoids cached prompts."""
    sent_tokens: NonNegativeInt
    """Sum over all prompts."""
    answered_tokens: NonNegativeInt
    """Sum over all answers."""
    output_tokens_per_s: NonNegativeFloat
    """Sum over all clients."""
    first_token_ms: NonNegativeFloat
    """Mean time to the first token (ttft)."""
    token_ms: NonNegativeFloat
    """Mean time per later token (tpot)."""
    request_ms: NonNegativeFloat
    """Mean time of a request (e2el)."""

    @property
    def case(self) -> tuple[int, ...]:
        return self.prompt_tokens, self.answer_tokens, self.concurrency

    @property
    def prefill_tokens_per_s(self) -> float | None:
        if not self.first_token_ms:
            return None
        return self.sent_tokens / self.requests / self.first_token_ms * 1000

    @property
    def decode_tokens_per_s(self) -> float | None:
        return 1000 / self.token_ms if self.token_ms else None


@dataclass(frozen=True, slots=True, config=CLOSED)
class ToolCase:
    """A case in protocol `tools`."""

    name: str
    """Name in `tool_calls.yml`."""
    problem: str | None
    """First difference from the expected calls, or null if they are correct."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Sample:
    """The state of the host at a point in time."""

    at_s: NonNegativeFloat
    """Time since the start of the benchmark."""
    available_bytes: NonNegativeInt
    """MemAvailable."""
    temperature_c: float | None
    """GPU temperature."""
    power_w: float | None
    """GPU power."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Served:
    """The measured release."""

    host: str
    """Name in the inventory."""
    release: str
    """Release name."""
    model: str
    """Name in the catalog."""
    profile: str
    """Name in the catalog."""
    image: str
    """Engine image."""
    tree: str
    """Path of the checkpoint on the host."""
    versions: dict[str, str]
    """Versions of kernel, driver, docker and more, reported by the host."""
    portable: bool = False
    """Whether the engine ran without quantized kernels."""
    cpus: str | None = field(default=None, metadata=OPTIONAL)
    """`engine.cpuset_cpus`; null: all CPUs."""

    @property
    def invalid_reason(self) -> str:
        """Return why the figures are not valid for a Spark, or ""."""
        stand_ins = sorted(f"{name} {version}" for name, version in self.versions.items()
                           if LAB_STUB_SUFFIX in version)  # fmt: skip
        reasons = [f"Stand-ins: {', '.join(stand_ins)}."] if stand_ins else []
        if self.portable:
            reasons.append("Portable mode: every layer is dequantized.")
        return " ".join([*reasons, "Not valid for a Spark."]) if reasons else ""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Published:
    """A published figure for the same model and profile, without concurrent requests."""

    tokens_per_s: NonNegativeFloat
    """The figure."""
    source: str
    """Author and software behind the measurement."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class BenchResult:
    """A `spark-deploy bench` run on one host."""

    schema_version: Literal[1]
    """Format version."""
    at: str
    """Start time in UTC."""
    served: Served
    answers: tuple[Answer, ...]
    """Protocol `seeds`; empty if not requested."""
    cells: tuple[Cell, ...]
    """Protocol `llama-benchy`; empty if not requested."""
    llama_benchy: str | None
    """llama-benchy version."""
    drafted_tokens: NonNegativeInt
    """Drafted tokens during the benchmark, from the engine's counters."""
    accepted_tokens: NonNegativeInt
    """Accepted drafted tokens."""
    samples: tuple[Sample, ...]
    """Host samples during the benchmark."""
    notes: tuple[str, ...]
    """Omitted measurements, with reasons."""
    loads: tuple[Load, ...] = ()
    """Protocol `vllm-bench`; empty if not requested."""
    vllm: str | None = None
    """vLLM version for `vllm-bench`."""
    tools: tuple[ToolCase, ...] = field(default=(), metadata=OPTIONAL)
    """Protocol `tools`; empty if not requested."""
    published: tuple[Published, ...] = ()
    """Published figures to compare with `seeds` results."""

    @property
    def acceptance_fraction(self) -> float | None:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    def warm_answers(self) -> dict[str, Answer]:
        last = max((answer.run for answer in self.answers), default=0)
        return {answer.prompt: answer for answer in self.answers if answer.run == last}
