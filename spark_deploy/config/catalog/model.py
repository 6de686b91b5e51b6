"""Models: files of ``catalog/models``."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema
from spark_contract.builder_api import PatternError, count_names, expand_all

from spark_deploy.config.catalog.architecture import Architecture, RepoMetadata
from spark_deploy.config.catalog.guard_rails import COMPARISON
from spark_deploy.config.catalog.profile import TRAITS, Adapter, HubRepository
from spark_deploy.config.documents import CLOSED, GIB, UNIQUE, Gib, Text, Violation
from spark_deploy.config.settings.patterns import IMAGE_ROLE
from spark_deploy.config.settings.service import SERVED_NAME, CatalogName

_SETS = ("swap", "base", "mtp", "donor_unmatched")

_Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class DonorShape:
    """Shape of swapped modules in the FP8 source."""

    modules: Text = Field(description="Pattern that matches the swapped modules with this shape.")
    weight: tuple[_Size, _Size] = Field(description="Rows and columns of the FP8 weight.")
    scale: tuple[_Size, _Size] = Field(description="Rows and columns of the grid of block scales.")
    source: Text = Field(description="Source of these numbers.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Counts:
    """Number of names in each set."""

    base: int = Field(ge=0, description="Tensors of the base without MTP.")
    mtp: int = Field(ge=0, description="Tensors of the drafter.")
    swap: int = Field(ge=0, description="Swapped modules.")
    donor_unmatched: int = Field(
        ge=0, description="FP8 source tensors with no matching base tensor."
    )
    source: Text = Field(description="Where the counts come from, or how they were computed.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Tensors:
    """Exact sets of tensor names, as patterns with shell braces."""

    swap: tuple[Text, ...] = Field(json_schema_extra=UNIQUE)
    """Modules with weights from the FP8 source."""
    block_shape: tuple[_Size, _Size] = (128, 128)
    """Rows and columns per FP8 scale."""
    base: tuple[Text, ...] = Field(min_length=1, json_schema_extra=UNIQUE)
    """Tensors of the base without MTP."""
    mtp: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Tensors of the drafter in the base."""
    donor_unmatched: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Tensors of the FP8 source, except routed experts, that the base stores in another form."""
    donor_shapes: tuple[DonorShape, ...] = ()
    """Shapes of every swapped module, compared with the headers before the download."""
    counts: Counts | None = None
    """Expected number of names in each set; null if unknown."""

    def violations(self, *, donor: str | None) -> Iterator[Violation]:
        problems = list(self._wrong_patterns())
        yield from problems
        if not problems:
            yield from self._wrong_counts()
            yield from self._wrong_donor_shapes(donor)

    def _wrong_patterns(self) -> Iterator[Violation]:
        patterns = [(key, pattern) for key in _SETS for pattern in getattr(self, key)]
        patterns += [("donor_shapes", shape.modules) for shape in self.donor_shapes]
        for key, pattern in patterns:
            try:
                count_names(pattern)
            except PatternError as error:
                yield Violation((key,), f"{pattern!r}: {error.what}", error.fix)

    def _wrong_counts(self) -> Iterator[Violation]:
        if self.counts is None:
            return
        for key in _SETS:
            actual = sum(map(count_names, getattr(self, key)))
            expected = getattr(self.counts, key)
            if actual != expected:
                source = self.counts.source
                fix = f"correct the patterns or the count (source of the count: {source})"
                message = f"the patterns match {actual} names, but counts.{key} is {expected}"
                yield Violation((key,), message, fix)

    def _wrong_donor_shapes(self, donor: str | None) -> Iterator[Violation]:
        """Check that every swapped module has a shape, and that its scales match the blocks."""
        where = ("donor_shapes",)
        if donor is not None or self.donor_shapes:
            try:
                described = expand_all([shape.modules for shape in self.donor_shapes])
            except PatternError as error:
                yield Violation(where, f"{error.where} {error.what}", "describe each module once")
                return
            unmatched = sorted(described ^ expand_all(self.swap))
            if unmatched:
                count_text = f"{len(unmatched)} modules are listed only here or only in swap"
                message = f"{count_text}, for example {unmatched[0]}"
                yield Violation(where, message, "list the same modules in both")
        for shape in self.donor_shapes:
            dimensions = zip(shape.weight, self.block_shape, strict=True)
            grid = [-(-size // block) for size, block in dimensions]  # rounded up
            if list(shape.scale) != grid:
                message = (
                    f"{shape.modules}: scale {list(shape.scale)} does not match "
                    f"block_shape {list(self.block_shape)}"
                )
                fix = f"write scale: {grid} for weight {list(shape.weight)}"
                yield Violation(where, message, fix)


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Sources:
    """Repositories of the model hub; the lock adds the commit."""

    base: HubRepository = Field(description="Complete INT4 checkpoint.")
    donor: HubRepository | None = None
    """FP8 source checkpoint of the shared experts; null for none."""
    hybrid: HubRepository | None = None
    """Published checkpoint that already contains the FP8 shared experts; null for none."""
    original: HubRepository | None = None
    """16-bit repository for `spark-deploy add MODEL --requantize`; null if none."""
    revision: str = Field(default="main", description="Branch or tag to lock.")
    repeats_names: bool = False
    """The base stores some tensors twice, which fastsafetensors rejects."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Parsers:
    """Names of the engine's parsers."""

    reasoning: str | None = Field(default=None, description="Reasoning parser; null for none.")
    tool_call: str | None = Field(default=None, description="Tool call parser; null for none.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class ModelImage:
    """Which engine image serves the model."""

    role: str = Field(default="engine", json_schema_extra=IMAGE_ROLE)
    """Key of `images` in the settings."""
    plugin: bool = True
    """false: use the image unchanged with every profile."""
    engine_mode: Literal["native", "portable"] = "native"
    """portable: for an engine without kernels for these weights; the plugin dequantizes them."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class ModelMemory:
    """Engine memory in addition to weights and KV cache."""

    runtime_gib: Gib = Field(default=4, ge=0)
    """Process, GPU context, compiled graphs and activations, in GiB; an estimate."""
    weights_factor: float = Field(default=1.0, ge=1)
    """Bytes in memory for each byte on disk; above 1 only where weights are dequantized."""

    @property
    def runtime_bytes(self) -> int:
        return round(self.runtime_gib * GIB)


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Question:
    """A question with a checkable answer."""

    prompt: str = Field(description="Prompt; the request may have lines before it.")
    expect: str = Field(description="Regular expression the answer must match.")
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of reasoning and answer."""
    after_lines: int = Field(default=0, ge=0, le=4096)
    """Number of lines before the prompt, to exceed an indexer's budget. Line N contains the value
    N * 7919 modulo 1000."""
    thinking: bool = False
    """on: the model may think before it answers, and a wrong answer is a warning. off: any instruct
    model can answer at once, so a wrong answer means a broken server."""

    @property
    def text(self) -> str:
        """The prompt, after ``after_lines`` numbered lines."""
        lines = (
            f"Line {n}: the value is {n * 7919 % 1000}." for n in range(1, self.after_lines + 1)
        )
        return "\n".join([*lines, self.prompt])


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class ModelCheck:
    """Questions with answers that can be checked."""

    questions: tuple[Question, ...] = ()
    """Greedy answers must match a regular expression; the first runs at every start. Default:
    questions for the model's task."""
    copy: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Strings the model must repeat exactly."""
    tool_call: bool = Field(default=False, description="Require a tool call.")
    reasoning: bool = False
    """Require that reasoning and answer are separate."""
    conversation: bool = False
    """Require correct answers in every turn of a growing conversation."""
    repeat: bool = Field(default=True, description="Require the same greedy answer twice.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Change:
    """A change to all profiles with certain traits."""

    when: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        json_schema_extra={
            "propertyNames": {"enum": list(TRAITS)},
            "additionalProperties": COMPARISON,
        },
    )
    """Conditions on the profile's traits; empty: every profile."""
    set: dict[str, Any] = Field(min_length=1, description="Keys of the profile, merged key by key.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class AnyModel:
    """Keys of every file in catalog/models."""

    name: SkipJsonSchema[str]  # of the file
    based_on: CatalogName | SkipJsonSchema[None] = None
    """Model that this file extends; that model must not extend another."""
    summary: str = Field(max_length=100, description="One line about the model.")
    choose_when: str = Field(max_length=160, description="One line: when to choose it.")
    parsers: Parsers = Field(default_factory=Parsers)
    fixed_template: CatalogName | None = None
    """File of catalog/templates: the model's chat template with fixes, for profiles with
    `template_fixes`."""
    fixed_template_text: SkipJsonSchema[str | None] = None
    image: ModelImage = Field(default_factory=ModelImage)
    memory: ModelMemory = Field()
    check: ModelCheck = Field(default_factory=ModelCheck)
    adapters: dict[str, Adapter] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": SERVED_NAME}
    )
    """LoRA adapters by their model name; each is downloaded, verified and counted."""
    changes: tuple[Change, ...] = ()
    """Changes to profiles for this model; later entries win."""

    def violations(self) -> Iterator[Violation]:
        if self.check.questions and self.check.questions[0].thinking:
            message = "the first question runs at every start and must not require thinking"
            fix = "first, ask a question that any instruct model can answer with thinking: off"
            yield Violation(("check", "questions"), message, fix)


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class HybridModel(AnyModel):
    """A model for which profiles may build a checkpoint from exact tensor sets."""

    kind: Literal["hybrid"] = "hybrid"
    """hybrid: profiles may build a checkpoint."""
    sources: Sources = Field()
    architecture: Architecture = Field()
    tensors: Tensors = Field()

    def violations(self) -> Iterator[Violation]:
        for violation in self.tensors.violations(donor=self.sources.donor):
            yield violation._replace(key=("tensors", *violation.key))
        for violation in self.architecture.violations():
            yield violation._replace(key=("architecture", *violation.key))
        # `super()` fails in dataclasses with slots.
        yield from AnyModel.violations(self)


Task = Literal["chat", "completion", "embedding", "reranking", "classification"]


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class PlainModel(AnyModel):
    """A repository that is served as published."""

    kind: Literal["plain"]
    """plain: a repository that is served as published."""
    repository: HubRepository = Field(description="Repository of the model hub.")
    revision: str = "main"
    """Branch, tag or commit to lock."""
    task: Task = "chat"
    """Task of the model and of the check. completion: a base model."""
    vision: bool = False
    """Accepts images; profiles with vision keep the tower and check it with an image."""
    audio: bool = False
    """Accepts audio; checked with two clips of different length."""
    leave_out: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Shell patterns of files that are not downloaded, such as other formats of the weights."""
    memory: ModelMemory = Field(default_factory=ModelMemory)
    imported: tuple[Text, ...] = ()
    """Sources of this file's values, for a model that this project never ran."""
    # Filled from the lock.
    metadata: SkipJsonSchema[RepoMetadata | None] = None

    @property
    def pools(self) -> bool:
        return self.task not in ("chat", "completion")


Model = HybridModel | PlainModel

# Enough for models that always reason before they answer.
_MAX_TOKENS = 1024

_CHAT = tuple(
    Question(prompt=f"{prompt} Answer with one word.", expect=expect, max_tokens=_MAX_TOKENS)
    for prompt, expect in (
        ("What is the capital of France?", r"\bParis\b"),
        ("How many days has a week?", r"(?i)\b(7|seven)\b"),
        ("What is the capital of Japan?", r"\bTokyo\b"),
    )
)
# A base model only continues a text.
_COMPLETION = (
    Question(prompt="The capital of France is the city of", expect=r"^\W*Paris\b", max_tokens=8),
    Question(prompt="Monday, Tuesday, Wednesday, Thursday,", expect=r"^\W*Friday\b", max_tokens=8),
    Question(prompt="1, 2, 3, 4, 5, 6,", expect=r"^\W*7\b", max_tokens=8),
)
_DEFAULT_QUESTIONS = {"chat": _CHAT, "completion": _COMPLETION}


def check_questions(model: Model) -> tuple[Question, ...]:
    task = model.task if isinstance(model, PlainModel) else "chat"
    return model.check.questions or _DEFAULT_QUESTIONS.get(task, ())
