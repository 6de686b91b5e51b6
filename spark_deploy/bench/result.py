"""The result of a benchmark: figures by protocol, and samples of the host."""

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from spark_contract.documents import OPTIONAL
from spark_contract.tool import LAB_STUB_SUFFIX

from spark_deploy.config.documents import CLOSED


@dataclass(frozen=True, slots=True, config=CLOSED)
class Answer:
    """An answer of protocol `seeds`; tokens are those of the server's usage block."""

    prompt: str
    """Name of the prompt."""
    run: PositiveInt
    """Run 1 is the warm-up; reports leave it out."""
    asked_tokens: PositiveInt
    """Requested limit of the answer."""
    prompt_tokens: NonNegativeInt
    """Tokens of the prompt."""
    completion_tokens: NonNegativeInt
    """Tokens of the answer."""
    first_token_s: NonNegativeFloat
    """From the request to the first token."""
    wall_s: NonNegativeFloat
    """From the request to the end of the answer."""

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True, config=CLOSED)
class Cell:
    """A case of llama-benchy; means over all runs."""

    depth_tokens: NonNegativeInt
    """Tokens of context before the prompt."""
    concurrency: PositiveInt
    """Concurrent clients."""
    prompt_tokens: NonNegativeInt
    """Prompt size (pp)."""
    generated_tokens: NonNegativeInt
    """Answer size (tg)."""
    prefill_tokens_per_s: float | None
    """Sum of all clients."""
    decode_tokens_per_s: float | None
    """Sum of all clients."""
    decode_deviation: float | None
    """Standard deviation of the decode speed."""
    first_response_ms: float | None
    """Mean time to the first response."""

    @property
    def case(self) -> tuple[int, ...]:
        return self.depth_tokens, self.concurrency


@dataclass(frozen=True, slots=True, config=CLOSED)
class Load:
    """A case of `vllm bench serve`: random prompts, greedy, answers of fixed length."""

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
    """Seed of the random prompts; a new seed per case avoids cached prompts."""
    sent_tokens: NonNegativeInt
    """Sum over all prompts."""
    answered_tokens: NonNegativeInt
    """Sum over all answers."""
    output_tokens_per_s: NonNegativeFloat
    """Sum of all clients."""
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
    """A case of protocol `tools`."""

    name: str
    """Name in `tool_calls.yml`."""
    problem: str | None
    """First difference from the expected calls; null: right."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Sample:
    """The state of the host at a point in time."""

    at_s: NonNegativeFloat
    """Since the start of the benchmark."""
    available_bytes: NonNegativeInt
    """MemAvailable."""
    temperature_c: float | None
    """Temperature of the GPU."""
    power_w: float | None
    """Power of the GPU."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Served:
    """The measured release."""

    host: str
    """Name in the inventory."""
    release: str
    """Name of the release."""
    model: str
    """Name in the catalog."""
    profile: str
    """Name in the catalog."""
    image: str
    """Image of the engine."""
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
        """Why the figures are not valid for a Spark; "" if they are."""
        stand_ins = sorted(f"{k} {version}" for k, version in self.versions.items()
                           if LAB_STUB_SUFFIX in version)  # fmt: skip
        reason = f"Stand-ins: {', '.join(stand_ins)}. " if stand_ins else ""
        reason += "Portable mode: every layer dequantized. " * self.portable
        return reason and f"{reason}Not valid for a Spark."


@dataclass(frozen=True, slots=True, config=CLOSED)
class Published:
    """A published figure for the same model and profile, without concurrent requests."""

    tokens_per_s: NonNegativeFloat
    """The figure."""
    source: str
    """Author and software of the measurement."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class BenchResult:
    """A run of `spark-deploy bench` on a host."""

    schema_version: Literal[1]
    """Version of this format."""
    at: str
    """Start, UTC."""
    served: Served
    answers: tuple[Answer, ...]
    """Protocol `seeds`; empty if not requested."""
    cells: tuple[Cell, ...]
    """Protocol `llama-benchy`; empty if not requested."""
    llama_benchy: str | None
    """Version of llama-benchy."""
    drafted_tokens: NonNegativeInt
    """Drafted tokens during the benchmark, by the engine's counters."""
    accepted_tokens: NonNegativeInt
    """Accepted drafted tokens."""
    samples: tuple[Sample, ...]
    """The host during the benchmark."""
    notes: tuple[str, ...]
    """Omitted measurements, with reasons."""
    loads: tuple[Load, ...] = ()
    """Protocol `vllm-bench`; empty if not requested."""
    vllm: str | None = None
    """Version of vLLM for `vllm-bench`."""
    tools: tuple[ToolCase, ...] = field(default=(), metadata=OPTIONAL)
    """Protocol `tools`; empty if not requested."""
    published: tuple[Published, ...] = ()
    """Published figures to compare with `seeds`."""

    @property
    def acceptance_fraction(self) -> float | None:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    def warm_answers(self) -> dict[str, Answer]:
        last = max((answer.run for answer in self.answers), default=0)
        return {answer.prompt: answer for answer in self.answers if answer.run == last}
