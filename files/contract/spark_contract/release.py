"""``release.json``: the fixed configuration of a service."""

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

from spark_contract import units
from spark_contract.documents import OPTIONAL
from spark_contract.tool import HostToolError


@dataclass(frozen=True, slots=True)
class Image:
    """The engine's image; proofs are valid for a combination of ``base`` and ``plugin``."""

    tag: str
    digest_label: str | None  # None for an image without our plugin
    base: str
    plugin: str


@dataclass(frozen=True, slots=True)
class Tree:
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Mount:
    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Engine:
    argv: tuple[str, ...]
    env: dict[str, str]
    mounts: tuple[Mount, ...]
    docker_args: tuple[str, ...]
    user: str  # host account
    max_sequences: int
    kv_cache_bytes: int | None  # None means the rest of the engine's memory


@dataclass(frozen=True, slots=True)
class Memory:
    needed_bytes: int
    wait_s: float
    floor_bytes: int  # the watchdog stops the engine below this value


@dataclass(frozen=True, slots=True)
class Timeouts:
    start_s: float
    stop_s: float
    drain_s: float


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    expect: str
    max_tokens: int
    thinking: bool = field(default=False, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Needle:
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """Settings of the prefix cache check."""

    block_tokens: int


@dataclass(frozen=True, slots=True)
class Bench:
    limit_s: float
    worse_percent: float  # report a larger slowdown


@dataclass(frozen=True, slots=True)
class CheckPlan:
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
    width: int | None = field(default=None, metadata=OPTIONAL)  # dimensions of an embedding

    @property
    def plain_questions(self) -> tuple[Question, ...]:
        """Questions without thinking; the first is used at every start."""
        return tuple(question for question in self.questions if not question.thinking)

    def __post_init__(self) -> None:
        expected = (question.expect for question in self.questions)
        for pattern in (*expected, *self.log_required, *self.log_forbidden):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"invalid regular expression {pattern!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class Watch:
    stall_s: float
    interval_s: float
    hot_celsius: float | None


@dataclass(frozen=True, slots=True)
class Member:
    host: str
    address: str  # on the fabric; identifies the member
    argv: tuple[str, ...]
    env: dict[str, str]
    docker_args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that run an engine together, by rank; all have the same release.

    The head has rank 0 and answers requests.
    """

    members: tuple[Member, ...]
    # Derived from the release, so that hosts with a different release cannot join.
    port: int
    join_s: float

    @property
    def head(self) -> Member:
        return self.members[0]

    @property
    def serving_port(self) -> int:
        """Return the port that a member opens while it serves this release."""
        return self.port + 1


@dataclass(frozen=True, slots=True)
class Release:
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
    # Drafter and adapters.
    companions: tuple[Tree, ...] = field(default=(), metadata=OPTIONAL)
    # Computed from the other fields and the limits of the unit.
    name: str = field(default="", metadata=OPTIONAL)
    digest: str = field(default="", metadata=OPTIONAL)

    @property
    def trees(self) -> tuple[Tree, ...]:
        return (self.tree, *self.companions)

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Return the container's mounts; only the compile cache of this release is writable."""
        return tuple(
            mount if mount.read_only else replace(mount, source=f"{mount.source}/{self.name}")
            for mount in self.engine.mounts
        )

    @property
    def cache(self) -> str | None:
        return next((mount.source for mount in self.mounts if not mount.read_only), None)

    @property
    def container(self) -> str:
        return f"spark-{self.name}"

    @property
    def serve_unit(self) -> str:
        return units.SERVE.unit(self.name)


def parse_service(name: str) -> str:
    match = units.RELEASE_NAME.match(name)
    if match is None:
        message = "invalid name, expected <service>-<12 hex digits>"
        fix = "use a name from `spark-host status`"
        raise HostToolError(f"release {name!r}", message, fix, exit_code=2)
    return match["service"]


# Check names
ACCEPTANCE = "acceptance"
CONTEXT_LENGTH = "context length"
COUNTERS = "counters"
HEALTH = "health"
LOG_LINES = "log lines"
MEMORY = "memory"
NEEDLE = "needle"
PREFIX_REUSE = "prefix reuse"  # times a growing conversation
READY = "ready"

# Event kinds of the watchdog.
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

ROUTED = (EMBEDDINGS, RERANK, SCORE, CLASSIFY, POOLING)
