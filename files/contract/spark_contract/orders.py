"""Documents of the checkpoint builder, its commands, and patterns of tensor names."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from spark_contract.documents import OPTIONAL, DocumentError, in_range, of_form, plain_directory
from spark_contract.errors import HostToolError
from spark_contract.fetching import FetchPlan, Wire
from spark_contract.units import COMMIT, SHA256

NAME_LIMIT = 2_000_000
_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.([1-9]\d*))?")


class PatternError(HostToolError):
    """A pattern cannot be expanded, or two patterns give the same name."""

    def __init__(self, pattern: str, what: str):
        super().__init__(f"pattern {pattern!r}", what, "correct the pattern", exit_code=2)


def expand(pattern: str) -> Iterator[str]:
    """Yield every name of ``pattern``, in its own order."""
    return map("".join, itertools.product(*_parts(pattern)))


def count(pattern: str) -> int:
    """Return how many names ``pattern`` stands for, without making them."""
    return math.prod(len(part) for part in _parts(pattern))


def uses_up(names: set[str], patterns: Iterable[str]) -> bool:
    """Whether the patterns give exactly these names, each once; ``names`` is taken apart.

    The set is all the memory this takes: no pattern is ever expanded as a whole.
    """
    for pattern in patterns:
        for name in expand(pattern):
            if name not in names:
                return False
            names.remove(name)
    return not names


def expand_all(patterns: Iterable[str]) -> set[str]:
    """Return all names of ``patterns``; a name given twice is a mistake."""
    names: set[str] = set()
    for pattern in patterns:
        for name in expand(pattern):
            if name in names:
                raise PatternError(pattern, f"gives {name!r} a second time")
            names.add(name)
    return names


def _parts(pattern: str) -> list[list[str]]:
    """Split into literal text (one choice) and braces (several)."""
    parts: list[list[str]] = []
    position = 0
    for match in _BRACE.finditer(pattern):
        parts += [[pattern[position : match.start()]], _choices(match[1], pattern)]
        position = match.end()
    parts.append([pattern[position:]])
    if any("{" in part[0] or "}" in part[0] for part in parts if len(part) == 1):
        raise PatternError(pattern, "a brace is not closed, or braces are nested")
    if math.prod(map(len, parts)) > NAME_LIMIT:
        raise PatternError(pattern, f"stands for more than {NAME_LIMIT} names")
    return parts


def _choices(body: str, pattern: str) -> list[str]:
    match = _RANGE.fullmatch(body)
    if match:
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if first > last or last - first > NAME_LIMIT:
            raise PatternError(pattern, f"the range {{{body}}} is empty or too long")
        return [str(number) for number in range(first, last + 1, step)]
    words = body.split(",")
    if len(words) < 2 or len(set(words)) != len(words):
        raise PatternError(pattern, f"{{{body}}} needs two or more different words")
    return words


# Of the builder. Raise it exactly when the bytes of a built tree change for the same plan; a
# golden-hash test (tests/unit/checkpoint/test_builder_golden.py) fails when one happens without
# the other.
RECIPE_VERSION = 1
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
_DIRECTORY = "/.+"

Scheme = Literal["fp8-donor", "fp8-base", "fp8-self", "int8-g128", "keep"]
WITH_DONOR = ("fp8-donor", "fp8-base")


@dataclass(frozen=True, slots=True)
class Base:
    """The complete tree that everything but the replaced tensors comes from."""

    dir: str
    # Its receipt must name the same: the commit of what was fetched, the digest of what was
    # quantised here. None hashes a tree without receipt.
    revision: str | None


@dataclass(frozen=True, slots=True)
class DonorDir:
    """A donor that lies on this host."""

    dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorUrl(Wire):
    """A donor on a hub, ``{endpoint}/{org}/{repo}/resolve/{commit}``: only ranges are read."""

    url: str


@dataclass(frozen=True, slots=True)
class DonorShape:
    """What a donor's headers must say of the modules of a pattern: rows and columns."""

    modules: str
    weight: tuple[int, int]
    scale: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """``plan.json``: what is made of a base and a donor, and the exact sets found on the way.

    Names are patterns (:mod:`spark_contract.orders`); modules are named without ``.weight``.
    """

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the plan's inputs, made by the controller
    recipe_version: int | None = field(default=None, metadata=OPTIONAL)
    name: str
    base: Base
    donor: DonorDir | DonorUrl | None = field(default=None, metadata=OPTIONAL)
    swap: tuple[str, ...]  # modules
    block_shape: tuple[int, int]  # rows and columns that share an FP8 scale
    base_tensors: tuple[str, ...]  # every name outside mtp.* of the base, no more and no less
    donor_unmatched: tuple[str, ...]  # names outside .mlp.experts. neither in the base nor swapped
    donor_shapes: tuple[DonorShape, ...]  # none: the base's own shapes are demanded
    mtp_tensors: tuple[str, ...]  # every mtp.* name of the result
    # fp8-donor: the donor's FP8; fp8-base: the base is a prebuilt hybrid, held against the donor;
    # fp8-self: our FP8 of the base's weights; int8-g128: INT8 in groups of 128, without a plugin.
    shared_experts: Scheme
    head: Literal["keep", "int8-g128"]
    layout: Literal["overlay", "full"]  # links and one small shard, or rewritten shards
    out: str  # appears complete or not at all
    extra: Mapping[str, Any]  # merged into config.json, deeply and last

    def __post_init__(self) -> None:
        """Refuse a plan that no tree can be built by."""
        of_form("digest", self.digest, SHA256)
        of_form("name", self.name, _NAME)
        of_form("base.dir", self.base.dir, _DIRECTORY)
        of_form("base.revision", self.base.revision, f"{COMMIT}|{SHA256}")
        plain_directory("out", self.out)
        if isinstance(self.donor, DonorUrl):
            of_form("donor.url", self.donor.url, f"https?://.+/resolve/{COMMIT}/?")
        elif self.donor is not None:
            of_form("donor.dir", self.donor.dir, _DIRECTORY)
        for where, sizes in self._shapes():
            for size in sizes:
                in_range(where, size, 1)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if not self.base_tensors:
            raise DocumentError("base_tensors: names no tensor")
        if self.compares_with_donor and self.donor is None:
            raise DocumentError(f"shared_experts: {self.shared_experts}, but there is no donor")
        # An overlay drops plain names, and without a plugin nothing reads one.
        if self.shared_experts in ("fp8-base", "int8-g128") and self.layout == "overlay":
            said = f"layout: {self.shared_experts} fits no overlay, set layout to full"
            raise DocumentError(said)
        if any(pattern.endswith(".weight") for pattern in self.swap):
            raise DocumentError("swap: names tensors, not modules without .weight")

    def _shapes(self) -> list[tuple[str, tuple[int, int]]]:
        donor = [(f"donor_shapes: {s.modules}", shape) for s in self.donor_shapes
                 for shape in (s.weight, s.scale)]  # fmt: skip
        return [("block_shape", self.block_shape), *donor]

    @property
    def out_dir(self) -> Path:
        """The directory to make."""
        return Path(self.out)

    @property
    def base_dir(self) -> Path:
        """The directory of the base."""
        return Path(self.base.dir)

    @property
    def compares_with_donor(self) -> bool:
        """Whether a donor's FP8 weights are held against the base's, taken or not."""
        return self.shared_experts in WITH_DONOR


@dataclass(frozen=True, slots=True, kw_only=True)
class RequantizePlan:
    """``requantize.json``: an INT4 tree of a 16-bit one, made by AutoRound in the engine's image.

    What is packed and what stays as it is follows from the names: these, and no other.
    """

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the plan's inputs, made by the controller
    name: str
    original: FetchPlan  # the 16-bit tree
    base_tensors: tuple[str, ...]  # every name outside mtp.* of the result, no more and no less
    mtp_tensors: tuple[str, ...]  # every mtp.* name of the result
    layers: int
    image: str
    packages: str  # a folder of this host with AutoRound and what the image lacks for it
    calibration: str  # JSON lines of this host, a text each
    gpu: str  # this host's proof of how a container gets at the GPU
    iters: int  # 0 rounds to nearest and reads no text
    nsamples: int
    seqlen: int
    batch: int
    memory_bytes: int  # that must be available before the container starts
    work_bytes: int  # on disk beside the result
    out: str  # appears complete or not at all

    def __post_init__(self) -> None:
        """Refuse a plan that no tree can be made by."""
        of_form("digest", self.digest, SHA256)
        of_form("name", self.name, _NAME)
        of_form("packages", self.packages, _DIRECTORY)
        of_form("calibration", self.calibration, _DIRECTORY)
        of_form("gpu", self.gpu, _DIRECTORY)
        plain_directory("out", self.out)
        in_range("iters", self.iters, 0)
        for where in ("layers", "nsamples", "seqlen", "batch"):
            in_range(where, getattr(self, where), 1)
        if not self.base_tensors:
            raise DocumentError("base_tensors: names no tensor")

    @property
    def out_dir(self) -> Path:
        """The directory to make."""
        return Path(self.out)


@dataclass(frozen=True, slots=True)
class Held:
    """Base and donor of a build, found to be what its order says, by their headers alone."""

    base_tensors: int
    donor_tensors: int
    swapped_modules: int
    mtp_tensors: int
    mtp_from_donor: int


# Documents of a repository that describe it, beside the headers of its weights.
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Described:
    """What a repository says of itself: sums of its headers, and its small documents."""

    commit: str
    parts: dict[str, dict[str, int]]  # text, vision and drafter: bytes by dtype
    tensors: int
    repeats_names: bool
    files: dict[str, int | None]  # sizes, as the hub says them
    documents: dict[str, dict[str, Any]]  # by name, those there are


BUILDER = "spark_checkpoint"  # the package, run as `python3 -m`

BUILD = "build"
DESCRIBE = "describe"
DISCARD = "discard"
FETCH = "fetch"
HOLD = "hold"
INSPECT = "inspect"
LAYERS = "layers"
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


def argv(command: str, *words: str) -> tuple[str, ...]:
    """Return how a host runs one of these commands."""
    return ("python3", "-m", BUILDER, command, *words)
