"""Settings of what is served: one service, more beside it, and hosts together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass
from spark_contract.gateway import EXPOSURES, Expose
from spark_contract.release import EMBEDDINGS, ROUTED
from spark_contract.units import DIGEST12

from spark_deploy.config.documents import CLOSED, GIB, MIB, UNIQUE, Gib, Violation, form
from spark_deploy.config.settings.engine import ServiceEngineSettings
from spark_deploy.config.settings.patterns import text
from spark_deploy.config.settings.secrets import OwnSecret, SecretRef


@dataclass(frozen=True, slots=True, config=CLOSED)
class CheckpointSettings:
    """How the tree that a profile asks for is kept on the host."""

    layout: Literal["overlay", "full"] | None = None
    """overlay: hard links to the base and one small file, for the plugin; takes seconds. full:
    every file written anew, readable by any tool. null keeps the profile's."""
    prebuilt: bool = False
    """true starts from the model's ready hybrid repository (sources.hybrid) instead of the INT4
    base: it passes the same gates and is held against the donor. Only with layout full."""
    requantized: bool = False
    """Build from your own INT4 checkpoint, made from sources.original by `spark-deploy add MODEL
    --requantize`."""
    keep_base: bool = True
    """false removes the downloaded base once a full tree was proven byte by byte and serves: disk
    for one tree instead of two, and a rebuild downloads it again (`plan` says how much). An overlay
    needs its base."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class RequantizeSettings:
    """How `spark-deploy add MODEL --requantize` has AutoRound make an INT4 tree.

    What is packed and what stays in 16 bits is said by the model's exact sets of names.
    """

    iters: int = Field(default=200, ge=0, le=5000)
    """Steps of tuning for each block; 0 rounds to nearest and needs no text."""
    nsamples: int = Field(default=128, ge=1, le=4096)
    """Pieces of text that it tunes with."""
    seqlen: int = Field(default=2048, ge=16, le=32768, description="Tokens of a piece.")
    batch: int = Field(default=8, ge=1, le=64, description="Pieces of one step.")
    calibration: str | None = Field(default=None, examples=["calibration.jsonl"])
    """File of this machine with the text: JSON lines, each {"text": ...}, best of what the model
    will be asked; together at least nsamples times seqlen tokens. Its content is part of what the
    tree is named by."""


CATALOG_NAME = form(
    r"^[a-z0-9][a-z0-9._-]*$", "the name of its file, without folder and .yml", "qwen3.5-35b"
)
SERVED_NAME = form(
    "^[A-Za-z0-9][A-Za-z0-9._/:-]*$", "one word that clients ask with", "qwen3.5-122b"
)
_TlsName = Annotated[
    str, text("^[A-Za-z0-9.:*-]+$", "a name or an address alone", "spark.example.org")
]
_File = Annotated[
    str, text("^(/|~/).+$", "a path that begins with / or ~/", "~/certificates/spark.pem")
]
CatalogName = Annotated[str, Field(json_schema_extra=CATALOG_NAME)]
ServedName = Annotated[str, Field(json_schema_extra=SERVED_NAME)]
_AUDIENCES = ", ".join(
    f"{exposure.audience or 'nobody'} ({name})" for name, exposure in EXPOSURES.items()
)

# YAML reads the bare word off as false.
_Tls = Annotated[
    Literal["off", "own-cert", "private-ca"],
    BeforeValidator(
        lambda value: "off" if value is False else value,
        json_schema_input_type=Literal["off", "own-cert", "private-ca", False],
    ),
]


@dataclass(frozen=True, slots=True, config=CLOSED)
class PairSettings:
    """A model and a profile by name."""

    model: CatalogName = Field(description="The stem of a file in catalog/models.")
    profile: CatalogName = Field(description="The stem of a file in catalog/profiles.")


@dataclass(frozen=True, slots=True, config=CLOSED)
class ScheduledSettings(PairSettings):
    """A pair and when a host changes to it by itself."""

    at: str = Field(
        max_length=80,
        examples=["Mon..Fri 08:00", "20:00 Europe/Berlin"],
        json_schema_extra=form(
            "^[A-Za-z0-9*.,:/~_ -]+$",
            "a time as systemd's OnCalendar= takes it",
            "Mon..Fri 08:00",
        ),
    )
    """When, as systemd.time writes it, in the host's time zone unless one is named."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class ReleaseSettings:
    """Ways back to releases that were proven before."""

    keep: int = Field(default=2, ge=0, le=10)
    """How many earlier proven releases `deploys/prune.py` leaves on a host, with their trees and
    images."""
    rollback_to: str | None = Field(
        default=None,
        examples=["main-0123456789ab"],
        json_schema_extra=form(
            f"^[a-z0-9][a-z0-9-]*-{DIGEST12}$",
            "a release as `spark-deploy status` names it",
            "main-0123456789ab",
        ),
    )
    """Where a rollback goes: a release by name, usually given by `spark-deploy rollback --to NAME`;
    null means the main service's before this one."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class RolloutSettings:
    """How a change goes over several hosts; where nothing is served, all hosts start at once."""

    at_once: Annotated[int, Field(ge=1)] | Literal["all"] = Field(default=1, examples=[2, "all"])
    """How many hosts replace what they serve at the same time, or all; the next ones follow when
    these are proven, and a failure leaves the rest as they are."""
    canary: str | None = Field(default=None, min_length=1, examples=["spark-1"])
    """The host that replaces what it serves first and alone, by its name in the inventory; null:
    the first of the inventory."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class ServeSettings:
    """Names, gateway and time limits of the service."""

    names: tuple[ServedName, ...] = Field(
        default=(), examples=[["assistant", "qwen"]], json_schema_extra=UNIQUE
    )
    """Names clients may use for the model, all served at once. The first is what `connect` prints
    and should stay the same when model or profile change. Empty: the model's catalog name."""
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the gateway.")
    expose: Expose = Field(
        default="loopback",
        description=f"Who reaches the gateway apart from this host: {_AUDIENCES}; lan listens on "
        "every address. The API key is always required. The engine is not restarted.",
    )
    address: str | None = Field(
        default=None,
        examples=["spark.example.org"],
        json_schema_extra=form(
            "^[A-Za-z0-9.:-]+$", "a name or an address alone", "spark.example.org"
        ),
    )
    """Name or address under which clients of the network reach this host; certificates cover it.
    null: ssh.hostname, else the name in the inventory."""
    tls: _Tls = "off"
    """With expose: lan. off; own-cert: the two files below; private-ca: this machine makes a CA
    once in ca_dir, and a certificate for each host that later runs renew in time. The host itself
    is always spoken to over plain HTTP on 127.0.0.1."""
    tls_certificate: _File | None = None
    """With own-cert: PEM file on the controller with the certificate and its chain."""
    tls_key: _File | None = None
    """With own-cert: PEM file on the controller with the unencrypted key."""
    tls_names: tuple[_TlsName, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """With private-ca: names and addresses that certificates cover beside serve.address."""
    ca_dir: _File = "~/.config/spark-deploy/ca"
    """With private-ca: folder on the controller that holds the CA, ca.pem for clients and
    ca-key.pem. Made when absent; keep a copy."""
    api_key: OwnSecret = Field(default_factory=SecretRef)
    """generate: the host makes a random key once and keeps it. Or where the controller reads it:
    {env: NAME}, {file: PATH} or {command: [PROGRAM, ARGUMENT]}."""
    max_body_mib: int = Field(default=32, ge=1, le=4096)
    """Largest request body, in MiB; images travel in it as base64."""
    max_requests_per_s: int | None = Field(default=50, ge=1)
    """Requests that one client address may send per second on average, with bursts of twice that,
    those with a wrong key included; null for no limit."""
    start_timeout_s: int = Field(default=2400, ge=10)
    """Seconds an engine may take from start to its first proven answer; the first start compiles
    kernels and loads 70 GB."""
    stop_timeout_s: int = Field(default=120, ge=5)
    """Seconds an engine may take to stop before it is killed."""
    drain_s: int = Field(default=30, ge=0)
    """Seconds that answers in flight may take before a change of release stops the old engine;
    longer ones are cut off."""

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * MIB

    def broken(self) -> Iterator[Violation]:
        """Yield what is wrong with TLS."""
        if self.tls != "off" and not EXPOSURES[self.expose].open:
            what = f"{self.tls} with expose: {self.expose}"
            yield Violation(
                ("tls",),
                f"{what}; TLS is for what leaves the host in the open",
                "set serve.expose: lan, or serve.tls: off",
            )
        for key in ("tls_certificate", "tls_key"):
            if self.tls == "own-cert" and not getattr(self, key):
                what = "is needed with tls: own-cert"
                yield Violation((key,), what, "name a PEM file of this machine", set_by=("tls",))


@dataclass(frozen=True, slots=True, config=CLOSED)
class MemorySettings:
    """The one memory pool that CPU and GPU share."""

    total_gib: Gib = Field(default=119.7, gt=0)
    """What MemTotal of the host shows, never the number on the box: 119.7 on a 128 GB Spark; newer
    units show 121.7."""
    reserve_gib: Gib = Field(default=12, ge=0)
    """Left to the system and to other workloads; raise it for them."""
    start_wait_s: int = Field(default=300, ge=0)
    """Seconds to wait before a start for memory that a stopped engine gives back late."""
    floor_gib: Gib = Field(default=4, ge=0)
    """Less available memory than this, while the engine starts or serves, and it is stopped before
    the host dies."""

    @property
    def total_bytes(self) -> int:
        return round(self.total_gib * GIB)

    @property
    def reserve_bytes(self) -> int:
        return round(self.reserve_gib * GIB)

    @property
    def floor_bytes(self) -> int:
        return round(self.floor_gib * GIB)

    def broken(self) -> Iterator[Violation]:
        """Yield what does not add up."""
        reserve, total, floor = self.reserve_gib, self.total_gib, self.floor_gib
        if reserve >= total:
            what = f"reserve_gib {reserve:g} leaves nothing of {total:g} GiB"
            yield Violation(("reserve_gib",), what, "lower it below memory.total_gib")
        if floor > reserve:
            what = f"the watch would stop every engine: floor {floor:g} GiB is above the"
            fix = "keep floor_gib at or below memory.reserve_gib"
            yield Violation(("floor_gib",), f"{what} reserve {reserve:g} GiB", fix)


@dataclass(frozen=True, slots=True, config=CLOSED)
class WatchSettings:
    """When a serving engine is restarted."""

    stall_s: int = Field(default=120, ge=5)
    """Seconds with running requests and no progress, or without any answer, before a restart; never
    less than a second per 1000 tokens of context, because a long prompt is counted only when all of
    it was read."""
    interval_s: int = Field(default=10, ge=1, description="Seconds between two looks.")


@dataclass(frozen=True, slots=True, config=CLOSED)
class CheckSettings:
    """The proof after every start, and the measurement after it."""

    timeout_s: int = Field(default=600, ge=5)
    """Seconds each check of the proof may take; one that runs out of them ends the proof."""
    bench_s: int = Field(default=120, ge=0, le=1800)
    """Seconds the speed is measured for, with the gateway open, after a proof under new versions of
    driver, kernel, docker, toolkit, image or plugin; 0 leaves it out."""


SERVICE_NAME = form(
    "^[a-z][a-z0-9-]{0,30}$", "a name of at most 31 small letters, digits and dashes", "search"
)
# What the engine is told is a share in hundredths of the whole memory.
_SHARES = 100


@dataclass(frozen=True, slots=True, config=CLOSED)
class ServiceSettings:
    """One more service of a host: release, proof, watch, gateway and way back of its own."""

    model: CatalogName = Field(description="The stem of a file in catalog/models.")
    profile: CatalogName = Field(description="The stem of a file in catalog/profiles.")
    port: int = Field(ge=1, le=65535, description="Port of its gateway.")
    memory_gib: Gib = Field(gt=0)
    """What its engine may take in all; the main one gets that much less. Rounded down to a
    hundredth of memory.total_gib."""
    names: tuple[ServedName, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """As serve.names."""
    paths: tuple[Literal[ROUTED], ...] = Field(  # type: ignore[valid-type]
        default=(), examples=[[EMBEDDINGS]], json_schema_extra=UNIQUE
    )
    """Paths of the main service's gateway that this one answers when a request names no model; one
    that does goes to the service of that name."""
    engine: ServiceEngineSettings = Field(default_factory=ServiceEngineSettings)

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    def broken(self, total_gib: Gib) -> Iterator[Violation]:
        """Yield what does not add up; keys are seen from the service."""
        if self.memory_gib * _SHARES < total_gib:
            what = f"{self.memory_gib:g} GiB are less than a hundredth of the memory"
            fix = f"give it {total_gib / _SHARES:.3f} GiB or more"
            yield Violation(("memory_gib",), what, fix)
        yield from (each._replace(key=("engine", *each.key)) for each in self.engine.broken())
