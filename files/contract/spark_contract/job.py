"""Slow work: how a job is stated in its ``job.json``, and what is told of it while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from spark_contract import units
from spark_contract.documents import OPTIONAL
from spark_contract.paths import RECEIPT_NAME, job_dir
from spark_contract.tool import PHASE

FETCH_JOB: Final = "fetch"
REQUANTIZE_JOB: Final = "requantize"
CHECKPOINT_JOB: Final = "checkpoint"
IMAGE_BUILD_JOB: Final = "image-build"
IMAGE_PULL_JOB: Final = "image-pull"
DISCARD_JOB: Final = "discard"
JobKind = Literal["fetch", "requantize", "checkpoint", "image-build", "image-pull", "discard"]
IMAGE_JOBS: Final = (IMAGE_BUILD_JOB, IMAGE_PULL_JOB)


@dataclass(frozen=True, slots=True)
class ReceiptProof:
    """A tree is whole: its receipt carries the digest and every file has its size."""

    receipt: str
    digest: str

    @staticmethod
    def of(tree: str, digest: str) -> ReceiptProof:
        """Return the proof of a tree."""
        return ReceiptProof(f"{tree}/{RECEIPT_NAME}", digest)

    @property
    def tree(self) -> str:
        """The tree that the receipt lies in."""
        return self.receipt.removesuffix(f"/{RECEIPT_NAME}")


@dataclass(frozen=True, slots=True)
class ImageProof:
    """Docker has the image; one that we build carries its digest as a label."""

    image: str
    label: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class AbsentProof:
    """A tree is gone, unless a release can serve it."""

    absent: str


Proof = ReceiptProof | ImageProof | AbsentProof


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of slow work, finished only when its proof is there."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str
    kind: JobKind
    title: str
    argv: tuple[str, ...]
    env: dict[str, str]
    proof: Proof
    total_bytes: int | None
    after: tuple[str, ...]  # digest12 of jobs that must have succeeded before
    # A tree that makes the work needless.
    unless: ReceiptProof | None = field(default=None, metadata=OPTIONAL)
    # The image that the build of one starts from.
    base: str | None = field(default=None, metadata=OPTIONAL)

    @property
    def digest12(self) -> str:
        """The instance name of the job's unit."""
        return self.digest[:12]

    @property
    def unit(self) -> str:
        """Name of the systemd unit."""
        return units.JOB.of(self.digest12)

    @property
    def dir(self) -> str:
        """The directory of its documents on a host."""
        return job_dir(self.digest)


@dataclass(frozen=True, slots=True)
class JobMemory:
    """MemFree and Cached of /proc/meminfo around a job: its files shall not stay in memory."""

    free_before_bytes: int
    free_after_bytes: int
    cached_before_bytes: int
    cached_after_bytes: int


@dataclass(frozen=True, slots=True)
class JobRun:
    """``status.json``: how the work on a job went the last time."""

    SCHEMA_VERSION: ClassVar[int] = 1

    state: Literal["running", "done", "failed"]
    exit_code: int | None = None
    started_at: str | None = None  # None: it was found done
    last_lines: tuple[str, ...] = ()
    memory: JobMemory | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase of a job is; what is not known is ``None``."""

    phase: str | None
    bytes: int | None
    total: int | None
    rate_bytes_per_s: int | None
    eta_s: int | None

    def line(self) -> str:
        """Return it as a line of the tool's output."""
        told = {"bytes": self.bytes, "total": self.total,
                "rate_bytes_per_s": self.rate_bytes_per_s, "eta_s": self.eta_s}  # fmt: skip
        numbers = (f"{name}={'-' if one is None else one}" for name, one in told.items())
        return " ".join([f"{PHASE}{self.phase}", *numbers])


def read_progress(line: str, total_bytes: int | None) -> Progress:
    """Read a line that begins with ``PHASE``; what it lacks of the total is ``total_bytes``."""
    pairs = dict(word.split("=", 1) for word in line.split() if "=" in word)
    total = _number(pairs.get("total"))
    return Progress(
        phase=pairs.get("phase"),
        bytes=_number(pairs.get("bytes")),
        total=total_bytes if total is None else total,
        rate_bytes_per_s=_number(pairs.get("rate_bytes_per_s")),
        eta_s=_number(pairs.get("eta_s")),
    )


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(float(text))
    except ValueError:
        return None


State = Literal["waiting", "running", "done", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class JobState:
    """Where a job stands, as ``spark-host job poll`` tells it."""

    digest: str  # twelve digits of it for a job that cannot be read
    title: str
    kind: str  # "" for one that cannot be read
    state: State
    result: str
    exit_code: int | None
    elapsed_s: int | None
    progress: Progress | None
    last_line: str | None
    log_tail: tuple[str, ...]
    memory: JobMemory | None = field(default=None, metadata=OPTIONAL)
