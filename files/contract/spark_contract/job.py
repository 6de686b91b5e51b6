from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from spark_contract import units
from spark_contract.documents import OPTIONAL
from spark_contract.paths import RECEIPT_NAME, job_dir
from spark_contract.tool import PHASE

FETCH_JOB: Final = "fetch"
REQUANTIZE_JOB: Final = "requantize"
CHECKPOINT_JOB: Final = "checkpoint"
RANK_JOB: Final = "rank"
IMAGE_BUILD_JOB: Final = "image-build"
IMAGE_PULL_JOB: Final = "image-pull"
DISCARD_JOB: Final = "discard"
JobKind = Literal[
    "fetch", "requantize", "checkpoint", "rank", "image-build", "image-pull", "discard"
]
IMAGE_JOBS: Final = (IMAGE_BUILD_JOB, IMAGE_PULL_JOB)


@dataclass(frozen=True, slots=True)
class ReceiptProof:
    """The tree's receipt has the digest, and all file sizes match."""

    receipt: str
    digest: str

    @staticmethod
    def for_tree(tree: str, digest: str) -> "ReceiptProof":
        return ReceiptProof(f"{tree}/{RECEIPT_NAME}", digest)

    @property
    def tree(self) -> str:
        return self.receipt.removesuffix(f"/{RECEIPT_NAME}")


@dataclass(frozen=True, slots=True)
class ImageProof:
    """Docker has the image; built images have the digest as a label."""

    image: str
    label: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class AbsenceProof:
    """The tree was removed, or a release still serves it."""

    absent: str


Proof = ReceiptProof | ImageProof | AbsenceProof


@dataclass(frozen=True, slots=True)
class Job:
    """A unit of slow work, finished only when the proof exists."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str
    kind: JobKind
    title: str
    argv: tuple[str, ...]
    env: dict[str, str]
    proof: Proof
    total_bytes: int | None
    after: tuple[str, ...]  # digest12 of required jobs
    # Skip the job if this tree exists.
    unless: ReceiptProof | None = field(default=None, metadata=OPTIONAL)
    # The base image of an image build.
    base: str | None = field(default=None, metadata=OPTIONAL)

    @property
    def digest12(self) -> str:
        return self.digest[:12]

    @property
    def unit(self) -> str:
        return units.JOB.unit(self.digest12)

    @property
    def dir(self) -> str:
        return job_dir(self.digest)


@dataclass(frozen=True, slots=True)
class JobMemory:
    free_before_bytes: int
    free_after_bytes: int
    cached_before_bytes: int
    cached_after_bytes: int


@dataclass(frozen=True, slots=True)
class JobRun:
    SCHEMA_VERSION: ClassVar[int] = 1

    state: Literal["running", "done", "failed"]
    exit_code: int | None = None
    started_at: str | None = None  # None if the result already existed
    last_lines: tuple[str, ...] = ()
    memory: JobMemory | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Progress:
    phase: str | None
    bytes: int | None
    total: int | None
    rate_bytes_per_s: int | None
    eta_s: int | None

    def line(self) -> str:
        fields = [f"{PHASE}{self.phase}"]
        for name in ("bytes", "total", "rate_bytes_per_s", "eta_s"):
            number = getattr(self, name)
            fields.append(f"{name}={'-' if number is None else number}")
        return " ".join(fields)


def parse_progress(line: str, total_bytes: int | None) -> Progress:
    """Parse a progress line; ``total_bytes`` is used if the line has no total."""
    values = dict(field.split("=", 1) for field in line.split() if "=" in field)
    total = _parse_number(values.get("total"))
    return Progress(
        phase=values.get("phase"),
        bytes=_parse_number(values.get("bytes")),
        total=total_bytes if total is None else total,
        rate_bytes_per_s=_parse_number(values.get("rate_bytes_per_s")),
        eta_s=_parse_number(values.get("eta_s")),
    )


def _parse_number(text: str | None) -> int | None:
    try:
        return None if text is None else int(float(text))
    except (ValueError, OverflowError):  # OverflowError: infinity
        return None


State = Literal["waiting", "running", "done", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class JobState:
    digest: str  # digest12 of an unreadable job
    title: str
    kind: str  # "" if unreadable
    state: State
    result: str
    exit_code: int | None
    elapsed_s: int | None
    progress: Progress | None
    last_line: str | None
    log_tail: tuple[str, ...]
    memory: JobMemory | None = field(default=None, metadata=OPTIONAL)
    donor_sha256: str | None = field(default=None, metadata=OPTIONAL)  # of a built checkpoint
