"""What a bench found, as one document: every figure beside the protocol that it was taken by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spark_contract.tool import STAND_IN

from spark_deploy.config.documents.declare import later, needed


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the seeds' protocol; tokens as the server's usage block counts them."""

    prompt: str = needed("Name of the prompt.")
    run: int = needed("1 is the warm-up, of which no figure is shown.", minimum=1)
    asked_tokens: int = needed("The most that was asked for.", minimum=1)
    prompt_tokens: int = needed("Tokens of the prompt.", minimum=0)
    completion_tokens: int = needed("Tokens of the answer.", minimum=0)
    first_token_s: float = needed("From the question to the first piece of the answer.", minimum=0)
    wall_s: float = needed("From the question to the end of the answer.", minimum=0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer over all of its time."""
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of llama-benchy: a depth and a number of clients; means over its runs."""

    depth_tokens: int = needed("Tokens of the conversation before.", minimum=0)
    concurrency: int = needed("Clients at a time.", minimum=1)
    prompt_tokens: int = needed("Tokens of the prompt (pp).", minimum=0)
    generated_tokens: int = needed("Tokens of the answer (tg).", minimum=0)
    prefill_tokens_per_s: float | None = needed("Of all clients together.")
    decode_tokens_per_s: float | None = needed("Of all clients together.")
    decode_deviation: float | None = needed("Standard deviation of it over the runs.")
    first_response_ms: float | None = needed("Mean time to the first response.")


@dataclass(frozen=True, slots=True)
class Load:
    """One case of `vllm bench serve`: random prompts, greedy, answers of a fixed length."""

    concurrency: int = needed("Clients at a time.", minimum=1)
    prompt_tokens: int = needed("Asked for in each prompt.", minimum=1)
    answer_tokens: int = needed("Asked for in each answer.", minimum=1)
    requests: int = needed("Asked after the warm-up.", minimum=1)
    completed: int = needed("Of them answered whole.", minimum=0)
    seed: int = needed("Of the random prompts: a new one for each case, so nothing is cached.")
    sent_tokens: int = needed("Of all prompts together.", minimum=0)
    answered_tokens: int = needed("Of all answers together.", minimum=0)
    output_tokens_per_s: float = needed("Of all clients together.", minimum=0)
    first_token_ms: float = needed("Mean time to the first token (ttft).", minimum=0)
    token_ms: float = needed("Mean time of each token after it (tpot).", minimum=0)
    request_ms: float = needed("Mean time of a whole request (e2el).", minimum=0)

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


@dataclass(frozen=True, slots=True)
class Sample:
    """The host at one moment of the bench."""

    at_s: float = needed("Since the bench began.", minimum=0)
    available_bytes: int = needed("MemAvailable.", minimum=0)
    temperature_c: float | None = needed("Of the GPU.")
    power_w: float | None = needed("Of the GPU.")


@dataclass(frozen=True, slots=True)
class Served:
    """What was measured."""

    host: str = needed("Name in the inventory.")
    release: str = needed("Name of the release that served.")
    model: str = needed("Name in the catalog.")
    profile: str = needed("Name in the catalog.")
    image: str = needed("Image of the engine.")
    tree: str = needed("Path of the tree on the host.")
    versions: dict[str, str] = needed("Kernel, driver, docker and so on, as the host says.")
    portable: bool = later(False, "Whether the engine computed without quantised kernels.")

    @property
    def no_spark(self) -> str:
        """Say why its figures are not a Spark's; empty where nothing speaks against them."""
        found = sorted(f"{name} {said}" for name, said in self.versions.items() if STAND_IN in said)
        parts = [f"Stand-ins: {', '.join(found)}. "] if found else []
        if self.portable:
            parts.append("Portable mode: every layer dequantised. ")
        return f"{''.join(parts)}This says nothing of a Spark." if parts else ""


@dataclass(frozen=True, slots=True)
class Published:
    """What others measured of the same model and profile, one request at a time."""

    tokens_per_s: float = needed("Their figure.", minimum=0)
    source: str = needed("Whose it is, and the stack that it was measured on.")


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run of `spark-deploy bench` against one host."""

    schema_version: Literal[1] = needed("Format of this file.")
    at: str = needed("When it began, UTC.")
    served: Served = needed()
    answers: tuple[Answer, ...] = needed("Protocol `seeds`; empty when it was not asked for.")
    cells: tuple[Cell, ...] = needed("Protocol `llama-benchy`; empty when it was not asked for.")
    llama_benchy: str | None = needed("Version of llama-benchy.")
    drafted_tokens: int = needed("By the engine's counters, over the whole bench.", minimum=0)
    accepted_tokens: int = needed("Of them accepted.", minimum=0)
    samples: tuple[Sample, ...] = needed("The host while it was measured.")
    notes: tuple[str, ...] = needed("What was left out, and why.")
    loads: tuple[Load, ...] = later((), "Protocol `vllm-bench`; empty when it was not asked for.")
    vllm: str | None = later(None, "Version of vLLM, of that protocol.")
    published: tuple[Published, ...] = later((), "Figures of others, to be read beside `seeds`.")

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
