"""A release: one complete, frozen way of serving, as its ``release.json`` states it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

from spark_contract import units
from spark_contract.documents import OPTIONAL
from spark_contract.errors import HostToolError


@dataclass(frozen=True, slots=True)
class Image:
    """The engine's image; ``base`` and ``plugin`` are what a proof holds for."""

    tag: str
    digest_label: str | None  # None: an image without our plugin carries none
    base: str
    plugin: str


@dataclass(frozen=True, slots=True)
class Tree:
    """The checkpoint, and the digest its receipt must carry."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the host inside the engine's container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """How the engine's container is started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    mounts: tuple[Mount, ...]
    docker_args: tuple[str, ...]
    user: str  # account of the host that runs the engine
    max_sequences: int  # requests that are computed at once
    kv_cache_bytes: int | None  # None: what is left of the engine's share of the memory
    kind: str = field(default="vllm", metadata=OPTIONAL)  # in whose words it counts


@dataclass(frozen=True, slots=True)
class Memory:
    """What a start needs, and the floor the watch defends."""

    needed_bytes: int
    wait_s: float
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Upper bounds of a start, a stop and a drain."""

    start_s: float
    stop_s: float
    drain_s: float


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt whose answer must match a regular expression."""

    prompt: str
    expect: str
    max_tokens: int
    thinking: bool = field(default=False, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Needle:
    """How deep the context is in which a fact must be found again."""

    context_tokens: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the engine finds again of a conversation: blocks of so many tokens."""

    block_tokens: int


@dataclass(frozen=True, slots=True)
class Bench:
    """How long the speed is measured, and from where on it counts as clearly worse."""

    limit_s: float
    worse_percent: float


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What the check asks and demands."""

    timeout_s: float
    max_model_len: int
    questions: tuple[Question, ...]
    copy: tuple[str, ...]
    tool_call: bool
    reasoning: bool
    repeat: bool
    conversation: bool
    needle: Needle | None
    image: bool
    acceptance_floor: float | None
    prefix: Prefix | None
    log_required: tuple[str, ...]
    log_forbidden: tuple[str, ...]
    portable: bool
    metrics_required: dict[str, Any]
    bench: Bench | None
    task: Literal["chat", "completion", "embedding", "reranking", "classification"] = field(
        default="chat", metadata=OPTIONAL
    )
    sound: bool = field(default=False, metadata=OPTIONAL)
    width: int | None = field(default=None, metadata=OPTIONAL)  # numbers of an embedding

    @property
    def plain_questions(self) -> tuple[Question, ...]:
        """Those that any instruct model answers without thinking; the first at every start."""
        return tuple(one for one in self.questions if not one.thinking)

    def __post_init__(self) -> None:
        """Refuse what is no regular expression before an engine is started for it."""
        expected = (question.expect for question in self.questions)
        for pattern in (*expected, *self.log_required, *self.log_forbidden):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


@dataclass(frozen=True, slots=True)
class Watch:
    """When the watch acts."""

    stall_s: float
    interval_s: float
    hot_celsius: float | None


@dataclass(frozen=True, slots=True)
class Member:
    """One host of a cluster, and what its rank of the engine is told beside the others."""

    host: str  # in the inventory
    address: str  # on the fabric; by it a host knows which of the members it is
    argv: tuple[str, ...]
    env: dict[str, str]
    docker_args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that run one engine together, by rank: the first is the head, which answers.

    All of them hold the same release, so its name says that they do.
    """

    members: tuple[Member, ...]
    # Only members of the same release have the same: others cannot join by mistake.
    port: int
    join_s: float

    @property
    def head(self) -> Member:
        """The member that clients talk to."""
        return self.members[0]

    @property
    def proven_port(self) -> int:
        """Where a member lets itself be connected to while it boots and serves this release."""
        return self.port + 1


@dataclass(frozen=True, slots=True)
class Release:
    """Everything that decides how one service runs."""

    SCHEMA_VERSION: ClassVar[int] = 1

    service: str
    model: str
    profile: str
    names: tuple[str, ...]
    image: Image
    tree: Tree
    engine: Engine
    memory: Memory
    timeouts: Timeouts
    check: CheckPlan
    watch: Watch
    cluster: Cluster | None = field(default=None, metadata=OPTIONAL)
    # What the engine reads beside the tree: a drafter's, adapters'.
    beside: tuple[Tree, ...] = field(default=(), metadata=OPTIONAL)
    # Made from all of the above and the limits of its unit, so a plan adds them last.
    name: str = field(default="", metadata=OPTIONAL)
    digest: str = field(default="", metadata=OPTIONAL)

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Everything whose receipt has to hold before the engine starts."""
        return (self.tree, *self.beside)

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """The container's directories; the writable one is this release's own compile cache."""
        return tuple(
            mount if mount.read_only else replace(mount, source=f"{mount.source}/{self.name}")
            for mount in self.engine.mounts
        )

    @property
    def cache(self) -> str | None:
        """The directory of its compile cache."""
        return next((mount.source for mount in self.mounts if not mount.read_only), None)

    @property
    def container(self) -> str:
        """The engine container's name."""
        return f"spark-{self.name}"

    @property
    def serve_unit(self) -> str:
        """The unit whose activity means that this release runs."""
        return units.SERVE.of(self.name)


def service_of(name: str) -> str:
    """Return the service in a release name such as ``main-0123456789ab``."""
    match = units.RELEASE_NAME.match(name)
    if match is None:
        raise HostToolError(
            f"release {name!r}",
            "not of the form <service>-<12 hex digits>",
            "name one of those that `spark-host status` lists",
            exit_code=2,
        )
    return match["service"]


# Checks, as a proof names them; the others are named where they are declared, and nowhere else.
ACCEPTANCE = "acceptance"
CONTEXT_LENGTH = "context length"
COUNTERS = "counters"
HEALTH = "health"
LOG_LINES = "log lines"
MEMORY = "memory"
NEEDLE = "needle"
PREFIX_REUSE = "prefix reuse"  # times a growing conversation
READY = "ready"

# Events, as the watch tells them.
COOLED = "cooled"
FRAGMENTED = "fragmented"
HOT = "hot"
KILLED = "kill"
POWER = "power"
STALLED = "stalled"
STARVING = "starving"


CHAT: Final = "/v1/chat/completions"
CLASSIFY: Final = "/v1/classify"
COMPLETIONS: Final = "/v1/completions"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
EMBEDDINGS: Final = "/v1/embeddings"
MESSAGES: Final = "/v1/messages"
MODELS: Final = "/v1/models"
POOLING: Final = "/v1/pooling"
RERANK: Final = "/v1/rerank"
RESPONSES: Final = "/v1/responses"
SCORE: Final = "/v1/score"

# Those that a service beside the main one may answer on the main one's gateway.
ROUTED = (EMBEDDINGS, RERANK, SCORE, CLASSIFY, POOLING)
