"""Documents and commands of the checkpoint builder, and patterns of tensor names.

Patterns use shell braces, which cannot nest: ``layers.{3..47..4}.{gate,up}_proj``.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from spark_contract.documents import (
    OPTIONAL,
    DocumentError,
    check_pattern,
    check_plain_directory,
    check_range,
)
from spark_contract.fetching import FetchPlan, TransferOptions
from spark_contract.tool import HostToolError
from spark_contract.units import COMMIT, SHA256

NAME_LIMIT = 2_000_000
_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.([1-9]\d*))?")


class PatternError(HostToolError):
    """A pattern is malformed, or two patterns expand to the same name."""

    def __init__(self, pattern: str, what: str):
        super().__init__(f"pattern {pattern!r}", what, "correct the pattern", exit_code=2)


def expand(pattern: str) -> Iterator[str]:
    return map("".join, itertools.product(*_alternatives(pattern)))


def count_names(pattern: str) -> int:
    return math.prod(map(len, _alternatives(pattern)))


def remove_exact_matches(names: set[str], patterns: Iterable[str]) -> bool:
    """Return whether the patterns expand to exactly these names; remove the ones that match."""
    for pattern in patterns:
        for name in expand(pattern):
            if name not in names:
                return False
            names.remove(name)
    return not names


def expand_all(patterns: Iterable[str]) -> set[str]:
    names: set[str] = set()
    for pattern in patterns:
        for name in expand(pattern):
            if name in names:
                raise PatternError(pattern, f"repeats the name {name!r}")
            names.add(name)
    return names


def _alternatives(pattern: str) -> list[list[str]]:
    """Split a pattern into parts, and list the alternatives of each; literal text has only one."""
    alternatives: list[list[str]] = []
    # Because _BRACE has a group, split alternates between literal text and brace contents.
    for index, part in enumerate(_BRACE.split(pattern)):
        if index % 2:
            alternatives.append(_expand_brace(part, pattern))
        elif "{" in part or "}" in part:
            raise PatternError(pattern, "a brace is not closed, or braces are nested")
        else:
            alternatives.append([part])
    if math.prod(map(len, alternatives)) > NAME_LIMIT:
        raise PatternError(pattern, f"expands to more than {NAME_LIMIT} names")
    return alternatives


def _expand_brace(body: str, pattern: str) -> list[str]:
    match = _RANGE.fullmatch(body)
    if match:
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if first > last or last - first > NAME_LIMIT:
            raise PatternError(pattern, f"the range {{{body}}} is empty or too long")
        return [str(number) for number in range(first, last + 1, step)]
    alternatives = body.split(",")
    if len(alternatives) < 2 or len(set(alternatives)) != len(alternatives):
        raise PatternError(pattern, f"{{{body}}} must list at least two distinct alternatives")
    return alternatives


# Increase it if a build writes different bytes for the same plan
# (tests/unit/checkpoint/test_builder_build.py).
RECIPE_VERSION = 1
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
_DIRECTORY = "/.+"

Scheme = Literal["fp8-donor", "fp8-base", "fp8-self", "int8-g128", "keep"]
WITH_DONOR = ("fp8-donor", "fp8-base")


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that supplies all tensors except the replaced ones."""

    dir: str
    # Commit or digest in the receipt; None: the directory has no receipt, so the build hashes it.
    revision: str | None


@dataclass(frozen=True, slots=True)
class DonorDir:
    dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorUrl(TransferOptions):
    """A donor on a hub: ``{endpoint}/{org}/{repo}/resolve/{commit}``, read in byte ranges."""

    url: str
    # Locked hash of all tensors that the build reads; if None, the first build records it.
    sha256: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class DonorShape:
    """Expected shape (rows, columns) of modules in the donor."""

    modules: str
    weight: tuple[int, int]
    scale: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """``plan.json``: base, donor and exact tensor names, as patterns.

    Module names do not include ``.weight``.
    """

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the inputs, computed by the controller
    recipe_version: int | None = field(default=None, metadata=OPTIONAL)
    name: str
    base: Base
    donor: DonorDir | DonorUrl | None = field(default=None, metadata=OPTIONAL)
    swap: tuple[str, ...]  # modules
    block_shape: tuple[int, int]  # of an FP8 scale
    base_tensors: tuple[str, ...]
    donor_unmatched: tuple[str, ...]  # names that the base lacks, except routed experts
    donor_shapes: tuple[DonorShape, ...]
    mtp_tensors: tuple[str, ...]
    # fp8-donor: use the donor's FP8 weights. fp8-base: the base is a prebuilt hybrid, which is
    # compared with the donor. fp8-self: quantize the base's weights to FP8. int8-g128: quantize
    # them to INT8 in groups of 128, which needs no plugin.
    shared_experts: Scheme
    head: Literal["keep", "int8-g128"]
    # 16-bit modules of the MTP layer to round to INT4 in groups of 128
    drafter_int4: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    # Format of the file for n-gram embedding tables; with keep, they remain tensors.
    ngram_table: Literal["keep", "e2m1", "e4m3"] = field(default="keep", metadata=OPTIONAL)
    layout: Literal["overlay", "full"]  # an overlay has hard links and a small shard
    out: str  # created atomically
    extra: Mapping[str, Any]  # deep-merged into config.json last

    def __post_init__(self) -> None:
        check_pattern("digest", self.digest, SHA256)
        check_pattern("name", self.name, _NAME)
        check_pattern("base.dir", self.base.dir, _DIRECTORY)
        check_pattern("base.revision", self.base.revision, f"{COMMIT}|{SHA256}")
        check_plain_directory("out", self.out)
        if isinstance(self.donor, DonorUrl):
            check_pattern("donor.url", self.donor.url, f"https?://.+/resolve/{COMMIT}/?")
            check_pattern("donor.sha256", self.donor.sha256, SHA256)
        elif self.donor is not None:
            check_pattern("donor.dir", self.donor.dir, _DIRECTORY)
        for size in self.block_shape:
            check_range("block_shape", size, 1)
        for shape in self.donor_shapes:
            for size in (*shape.weight, *shape.scale):
                check_range(f"donor_shapes: {shape.modules}", size, 1)
        if not self.base_tensors:
            raise DocumentError("base_tensors: empty")
        if self.compares_with_donor and self.donor is None:
            raise DocumentError(f"shared_experts: {self.shared_experts} requires a donor")
        # An overlay lacks the replaced names, which only the plugin handles.
        if self.shared_experts in ("fp8-base", "int8-g128") and self.layout == "overlay":
            raise DocumentError(
                f"layout: overlay does not support {self.shared_experts}; set layout: full"
            )
        if any(pattern.endswith(".weight") for pattern in (*self.swap, *self.drafter_int4)):
            raise DocumentError("swap, drafter_int4: remove .weight from the names")

    @property
    def out_dir(self) -> Path:
        return Path(self.out)

    @property
    def base_dir(self) -> Path:
        return Path(self.base.dir)

    @property
    def donor_sha256(self) -> str | None:
        return self.donor.sha256 if isinstance(self.donor, DonorUrl) else None

    @property
    def compares_with_donor(self) -> bool:
        """Whether the donor's FP8 weights are compared with the base's."""
        return self.shared_experts in WITH_DONOR


@dataclass(frozen=True, slots=True, kw_only=True)
class RequantizePlan:
    """``requantize.json``: create an INT4 checkpoint with AutoRound in the engine's image."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the inputs, computed by the controller
    name: str
    original: FetchPlan  # the 16-bit tree
    base_tensors: tuple[str, ...]
    mtp_tensors: tuple[str, ...]
    layers: int
    image: str
    packages: str  # folder with AutoRound and its dependencies
    calibration: str  # file of JSON lines
    gpu: str  # receipt of the GPU container check
    iters: int  # 0 means rounding to nearest, without calibration
    nsamples: int
    seqlen: int
    batch: int
    memory_bytes: int  # must be available before the container starts
    work_bytes: int  # disk space in addition to the result
    out: str

    def __post_init__(self) -> None:
        check_pattern("digest", self.digest, SHA256)
        check_pattern("name", self.name, _NAME)
        check_pattern("packages", self.packages, _DIRECTORY)
        check_pattern("calibration", self.calibration, _DIRECTORY)
        check_pattern("gpu", self.gpu, _DIRECTORY)
        check_plain_directory("out", self.out)
        check_range("iters", self.iters, 0)
        for name in ("layers", "nsamples", "seqlen", "batch"):
            check_range(name, getattr(self, name), 1)
        if not self.base_tensors:
            raise DocumentError("base_tensors: empty")

    @property
    def out_dir(self) -> Path:
        return Path(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """``rank.json``: list the most frequent tokens in a text."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the inputs, computed by the controller
    name: str
    tokenizer: str  # tokenizer.json
    text: str  # file
    vocabulary: int  # token ids of the model
    tokens: int
    out: str

    def __post_init__(self) -> None:
        check_pattern("digest", self.digest, SHA256)
        check_pattern("name", self.name, _NAME)
        check_pattern("tokenizer", self.tokenizer, _DIRECTORY)
        check_pattern("text", self.text, _DIRECTORY)
        check_plain_directory("out", self.out)
        for name in ("vocabulary", "tokens"):
            check_range(name, getattr(self, name), 1)

    @property
    def out_dir(self) -> Path:
        return Path(self.out)


@dataclass(frozen=True, slots=True)
class SourceCounts:
    base_tensors: int
    donor_tensors: int
    swapped_modules: int
    mtp_tensors: int
    mtp_from_donor: int


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class RepositoryDescription:
    commit: str
    parts: dict[str, dict[str, int]]
    tensors: int
    repeats_names: bool
    files: dict[str, int | None]  # sizes as the hub reports them
    documents: dict[str, dict[str, Any]]


TOKEN_IDS = "token_ids.json"  # result of a RankPlan: a list, most frequent first

BUILDER = "spark_checkpoint"  # the package, run as `python3 -m`

BUILD = "build"
CHECK_SOURCES = "check-sources"
DESCRIBE = "describe"
DISCARD = "discard"
FETCH = "fetch"
INSPECT = "inspect"
LAYERS = "layers"
RANK = "rank"
REQUANTIZE = "requantize"
VERIFY = "verify"

AGAINST = "--against"
ALL_DOCUMENTS = "--all-documents"
ENDPOINT = "--endpoint"
JSON = "--json"
LEAVE_OUT = "--leave-out"
OR_COPY = "--or-copy"
TOKEN_FILE = "--token-file"
TREE = "--tree"


def builder_argv(command: str, *args: str) -> tuple[str, ...]:
    return ("python3", "-m", BUILDER, command, *args)
