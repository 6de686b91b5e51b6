"""What a bench found, as one document: every figure beside the protocol that it was taken by."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from spark_contract.tool import STAND_IN

from spark_deploy.config.documents import CLOSED


@dataclass(frozen=True, slots=True, config=CLOSED)
class Answer:
    """One answer of the seeds' protocol; tokens as the server's usage block counts them."""

    prompt: str
    """Name of the prompt."""
    run: PositiveInt
    """1 is the warm-up, of which no figure is shown."""
    asked_tokens: PositiveInt
    """The most that was asked for."""
    prompt_tokens: NonNegativeInt
    """Tokens of the prompt."""
    completion_tokens: NonNegativeInt
    """Tokens of the answer."""
    first_token_s: NonNegativeFloat
    """From the question to the first piece of the answer."""
    wall_s: NonNegativeFloat
    """From the question to the end of the answer."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer over all of its time."""
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True, config=CLOSED)
class Cell:
    """One case of llama-benchy: a depth and a number of clients; means over its runs."""

    depth_tokens: NonNegativeInt
    """Tokens of the conversation before."""
    concurrency: PositiveInt
    """Clients at a time."""
    prompt_tokens: NonNegativeInt
    """Tokens of the prompt (pp)."""
    generated_tokens: NonNegativeInt
    """Tokens of the answer (tg)."""
    prefill_tokens_per_s: float | None
    """Of all clients together."""
    decode_tokens_per_s: float | None
    """Of all clients together."""
    decode_deviation: float | None
    """Standard deviation of it over the runs."""
    first_response_ms: float | None
    """Mean time to the first response."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Load:
    """One case of `vllm bench serve`: random prompts, greedy, answers of a fixed length."""

    concurrency: PositiveInt
    """Clients at a time."""
    prompt_tokens: PositiveInt
    """Asked for in each prompt."""
    answer_tokens: PositiveInt
    """Asked for in each answer."""
    requests: PositiveInt
    """Asked after the warm-up."""
    completed: NonNegativeInt
    """Of them answered whole."""
    seed: int
    """Of the random prompts: a new one for each case, so nothing is cached."""
    sent_tokens: NonNegativeInt
    """Of all prompts together."""
    answered_tokens: NonNegativeInt
    """Of all answers together."""
    output_tokens_per_s: NonNegativeFloat
    """Of all clients together."""
    first_token_ms: NonNegativeFloat
    """Mean time to the first token (ttft)."""
    token_ms: NonNegativeFloat
    """Mean time of each token after it (tpot)."""
    request_ms: NonNegativeFloat
    """Mean time of a whole request (e2el)."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens of a prompt over the time to the first token."""
        if not self.first_token_ms:
            return None
        return self.sent_tokens / self.requests / self.first_token_ms * 1000

    @property
    def decode_tokens_per_s(self) -> float | None:
        """What one client reads, after the first token."""
        return 1000 / self.token_ms if self.token_ms else None


@dataclass(frozen=True, slots=True, config=CLOSED)
class Sample:
    """The host at one moment of the bench."""

    at_s: NonNegativeFloat
    """Since the bench began."""
    available_bytes: NonNegativeInt
    """MemAvailable."""
    temperature_c: float | None
    """Of the GPU."""
    power_w: float | None
    """Of the GPU."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Served:
    """What was measured."""

    host: str
    """Name in the inventory."""
    release: str
    """Name of the release that served."""
    model: str
    """Name in the catalog."""
    profile: str
    """Name in the catalog."""
    image: str
    """Image of the engine."""
    tree: str
    """Path of the tree on the host."""
    versions: dict[str, str]
    """Kernel, driver, docker and so on, as the host says."""
    portable: bool = False
    """Whether the engine computed without quantised kernels."""

    @property
    def no_spark(self) -> str:
        """Say why its figures are not a Spark's; empty where nothing speaks against them."""
        found = sorted(f"{name} {said}" for name, said in self.versions.items() if STAND_IN in said)
        parts = [f"Stand-ins: {', '.join(found)}. "] if found else []
        if self.portable:
            parts.append("Portable mode: every layer dequantised. ")
        return f"{''.join(parts)}This says nothing of a Spark." if parts else ""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Published:
    """What others measured of the same model and profile, one request at a time."""

    tokens_per_s: NonNegativeFloat
    """Their figure."""
    source: str
    """Whose it is, and the stack that it was measured on."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class BenchResult:
    """One run of `spark-deploy bench` against one host."""

    schema_version: Literal[1]
    """Format of this file."""
    at: str
    """When it began, UTC."""
    served: Served
    answers: tuple[Answer, ...]
    """Protocol `seeds`; empty when it was not asked for."""
    cells: tuple[Cell, ...]
    """Protocol `llama-benchy`; empty when it was not asked for."""
    llama_benchy: str | None
    """Version of llama-benchy."""
    drafted_tokens: NonNegativeInt
    """By the engine's counters, over the whole bench."""
    accepted_tokens: NonNegativeInt
    """Of them accepted."""
    samples: tuple[Sample, ...]
    """The host while it was measured."""
    notes: tuple[str, ...]
    """What was left out, and why."""
    loads: tuple[Load, ...] = ()
    """Protocol `vllm-bench`; empty when it was not asked for."""
    vllm: str | None = None
    """Version of vLLM, of that protocol."""
    published: tuple[Published, ...] = ()
    """Figures of others, to be read beside `seeds`."""

    @property
    def acceptance_fraction(self) -> float | None:
        """Share of drafts that were accepted; ``None`` without drafts."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def title(self) -> str:
        """What stands above its figures."""
        return f"{self.served.model} with {self.served.profile} on {self.served.host}"

    def warm(self) -> tuple[Answer, ...]:
        """Return the answers that count: those of the last run."""
        last = max((answer.run for answer in self.answers), default=0)
        return tuple(answer for answer in self.answers if answer.run == last)
