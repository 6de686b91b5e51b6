"""A model: one file of ``catalog/models``, declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.catalog.companions import HUB_REPOSITORY, Adapter
from spark_deploy.config.catalog.guard_rails import COMPARISON
from spark_deploy.config.catalog.profile import TRAITS
from spark_deploy.config.catalog.tensor_sets import Tensors
from spark_deploy.config.documents.declare import GIB, Gib, Text, needed, section, setting
from spark_deploy.config.settings.rules import IMAGE_ROLE, Broken
from spark_deploy.config.settings.service import CATALOG_NAME, SERVED_NAME

# Keys of files that people may keep, and how the same is written now.
RENAMED = {
    "gdn_key_heads": "write linear_attention: {key_heads: ...}",
    "gdn_value_heads": "write linear_attention: {value_heads: ...}",
    "gdn_head_width": "write linear_attention: {head_width: ...}",
    "profile_overrides": "write changes, a list of {when: traits of a profile, set: keys}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Repositories of the model hub; the lock adds the commit."""

    base: str = needed("Complete INT4 tree.", **HUB_REPOSITORY)
    donor: str | None = setting(
        None,
        "FP8 tree that shared experts come from; null when there is none.",
        **HUB_REPOSITORY,
    )
    hybrid: str | None = setting(
        None,
        "The base with the donor's shared experts already in it, made by others; null when there "
        "is none.",
        **HUB_REPOSITORY,
    )
    original: str | None = setting(
        None,
        "16-bit repository for `spark-deploy add MODEL --requantize`; null if none.",
        **HUB_REPOSITORY,
    )
    revision: str = setting("main", "Branch or tag the lock starts from.")
    repeats_names: bool = setting(
        False, "The base's files hold some tensors twice, which fastsafetensors refuses."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Sizes of a gated delta net."""

    key_heads: int = needed("linear_num_key_heads.", minimum=1)
    value_heads: int = needed("linear_num_value_heads.", minimum=1)
    head_width: int = needed("linear_key_head_dim and linear_value_head_dim.", minimum=1)
    kernel: int = setting(4, "linear_conv_kernel_dim.", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Numbers of config.json that sizes are computed from."""

    layers: int = needed("Layers of the language model.", minimum=1)
    full_attention_every: int = needed(
        "Every how many layers one has full attention; the others are gated delta nets.",
        minimum=1,
    )
    hidden: int = needed("hidden_size.", minimum=1)
    vocabulary: int = needed("vocab_size.", minimum=1)
    experts: int = needed("Experts of a layer.", minimum=1)
    experts_per_token: int = needed("Routed experts of a token.", minimum=1)
    expert_width: int = needed("moe_intermediate_size.", minimum=1)
    shared_expert_width: int = needed("shared_expert_intermediate_size.", minimum=1)
    attention_heads: int = needed(
        "num_attention_heads; queries are gated, so their projection is twice as wide.", minimum=1
    )
    kv_heads: int = needed("num_key_value_heads.", minimum=1)
    head_width: int = needed("head_dim.", minimum=1)
    linear_attention: LinearAttention | None = setting(
        None, "Sizes of the gated delta nets; null when every layer has full attention."
    )
    mtp_layers: int = needed("Layers of the built-in drafter; 0 for none.", minimum=0)
    mtp_scheme: Literal["bf16", "int4"] = needed("How the MTP experts and attention are stored.")
    vision_bytes: int = needed("Bytes of the vision tower.", minimum=0)
    max_context_tokens: int = needed("max_position_embeddings, in tokens.", minimum=1)

    @property
    def attention_layers(self) -> int:
        """Layers with full attention."""
        return self.layers // self.full_attention_every

    @property
    def linear_layers(self) -> int:
        """Layers with a gated delta net."""
        return self.layers - self.attention_layers

    def broken(self) -> Iterator[Broken]:
        """Yield sizes that are missing."""
        if self.linear_layers and self.linear_attention is None:
            what = f"is missing, and {self.linear_layers} layers have no full attention"
            fix = "give its sizes, or set full_attention_every: 1"
            yield Broken(("linear_attention",), what, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """Names of the engine's parsers."""

    reasoning: str | None = setting(None, "Reasoning parser; null for none.")
    tool_call: str | None = setting(None, "Tool call parser; null for none.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelImage:
    """Which engine image serves the model."""

    role: str = setting("engine", "Key of `images` in the settings.", **IMAGE_ROLE)
    plugin: bool = setting(True, "false: the image is used unchanged whatever the profile says.")
    engine_mode: Literal["native", "portable"] = setting(
        "native",
        "portable: for an engine without kernels for these trees; the plugin dequantises them.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What the engine needs beside weights and KV cache."""

    runtime_bytes: Gib = setting(
        4 * GIB,
        "Process, GPU context, compiled graphs and activations, in GiB; an estimate.",
        key="runtime_gib",
        minimum=0,
    )
    weights_factor: float = setting(
        1.0,
        "Bytes in memory for each byte on disk; above 1 only where weights are dequantised.",
        minimum=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question whose answer can be checked."""

    prompt: str = needed("What is asked.")
    expect: str = needed("Regular expression the answer must match.")
    max_tokens: int = setting(512, "Longest answer, with what is thought before it.", minimum=1)
    thinking: bool = setting(
        False,
        "on: the model may think before it answers, and a wrong answer is a warning. off: any "
        "instruct model answers it at once, and a server that does not is broken.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """Questions with answers that can be checked."""

    questions: tuple[Question, ...] = setting(
        (),
        "Each is asked greedily and judged by a regular expression; the first at every start. "
        "Without any, those are asked that every model of its task answers.",
    )
    copy: tuple[Text, ...] = setting((), "Strings the model must repeat exactly.", uniqueItems=True)
    tool_call: bool = setting(False, "Demand a tool call.")
    reasoning: bool = setting(False, "Demand that reasoning and answer come apart.")
    conversation: bool = setting(
        False, "Demand right answers in each turn of a conversation that grows."
    )
    repeat: bool = setting(True, "Demand the same greedy answer twice.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is changed of every profile with these traits; no file of a model names a profile."""

    when: dict[str, dict[str, Any]] = setting(
        dict,
        "Traits of the profile's file and what each must be; without any, every profile.",
        propertyNames={"enum": list(TRAITS)},
        additionalProperties=COMPARISON,
    )
    set: dict[str, Any] = needed("Keys of the profile, merged key by key.", minProperties=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyModel:
    """What every file of catalog/models says, of whatever kind the model is."""

    name: SkipJsonSchema[str]  # of the file
    based_on: str | SkipJsonSchema[None] = setting(
        None, "Another model whose keys this file changes; one step only.", **CATALOG_NAME
    )
    summary: str = needed("What this model is, in one line.", maxLength=100)
    choose_when: str = needed("Who should take it, in one line.", maxLength=160)
    parsers: Parsers = section(Parsers)
    image: ModelImage = section(ModelImage)
    memory: ModelMemory = needed()
    check: ModelCheck = section(ModelCheck)
    adapters: dict[str, Adapter] = setting(
        dict,
        "LoRA adapters by the name that clients ask for; each is fetched, verified and counted.",
        propertyNames=SERVED_NAME,
    )
    changes: tuple[Change, ...] = setting(
        (), "What this model needs otherwise than profiles say; later ones win."
    )

    def broken(self) -> Iterator[Broken]:
        """Yield what of this file does not fit each other."""
        if self.check.questions and self.check.questions[0].thinking:
            what = "the first question is asked at every start, and this one needs thinking"
            fix = "put one first that any instruct model answers with thinking: off"
            yield Broken(("check", "questions"), what, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModel(AnyModel):
    """A model whose tree profiles may build: exact sets of names, numbers of its architecture."""

    kind: Literal["hybrid"] = setting(
        "hybrid", "hybrid: profiles may build a tree of exact sets of names."
    )
    sources: Sources = needed()
    architecture: Architecture = needed()
    tensors: Tensors = needed()

    def broken(self) -> Iterator[Broken]:
        """Yield what of this file does not fit each other."""
        for one in self.tensors.broken(donor=self.sources.donor):
            yield one._replace(key=("tensors", *one.key))
        for one in self.architecture.broken():
            yield one._replace(key=("architecture", *one.key))
        # Without slots of its own a class made anew by dataclass has no `super()`.
        yield from AnyModel.broken(self)


Task = Literal["chat", "completion", "embedding", "reranking", "classification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainModel(AnyModel):
    """A repository that is served as it was published: its files at a commit, and nothing built."""

    kind: Literal["plain"] = needed("plain: a repository that is served as it was published.")
    repository: str = needed("Repository of the model hub.", **HUB_REPOSITORY)
    revision: str = setting("main", "Branch, tag or commit that the lock starts from.")
    task: Task = setting(
        "chat", "What it is asked for, and what the proof asks. completion: a base model."
    )
    vision: bool = setting(
        False, "It takes pictures; profiles with vision on keep that tower and ask about one."
    )
    audio: bool = setting(
        False, "It takes sounds; the proof asks with two, one longer than the other."
    )
    leave_out: tuple[Text, ...] = setting(
        (),
        "Shell patterns of files that are not fetched: other formats of the same weights.",
        uniqueItems=True,
    )
    memory: ModelMemory = section(ModelMemory)
    imported: tuple[Text, ...] = setting(
        (),
        "Where this file's values are from, of a model that this project never ran; none claims a "
        "speed.",
    )
    # What the files' headers and config.json say at the locked commit; nobody writes it.
    anatomy: SkipJsonSchema[Anatomy | None] = None

    @property
    def pools(self) -> bool:
        """Whether it answers with numbers instead of text."""
        return self.task not in ("chat", "completion")


Model = HybridModel | PlainModel
