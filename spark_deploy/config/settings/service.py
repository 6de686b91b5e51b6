"""Settings of what is served: one service, more beside it, and hosts together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator
from spark_contract.gateway import EXPOSURES, Expose
from spark_contract.units import DIGEST12

from spark_deploy.config.documents.declare import (
    GIB,
    MIB,
    Gib,
    Mib,
    about,
    form,
    in_gib,
    needed,
    setting,
)
from spark_deploy.config.settings.rules import Broken
from spark_deploy.config.settings.secrets import GENERATED, OwnSecret


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """How the tree that a profile asks for is kept on the host."""

    layout: Literal["overlay", "full"] | None = setting(
        None,
        "overlay: hard links to the base and one small file, for the plugin; takes seconds. full: "
        "every file written anew, readable by any tool. null keeps the profile's.",
    )
    prebuilt: bool = setting(
        False,
        "true starts from the model's ready hybrid repository (sources.hybrid) instead of the INT4 "
        "base: it passes the same gates and is held against the donor. Only with layout full.",
    )
    requantized: bool = setting(
        False,
        "Build from your own INT4 checkpoint, made from sources.original by "
        "`spark-deploy add MODEL --requantize`.",
    )
    keep_base: bool = setting(
        True,
        "false removes the downloaded base once a full tree was proven byte by byte and serves: "
        "disk for one tree instead of two, and a rebuild downloads it again (`plan` says how "
        "much). An overlay needs its base.",
    )


@dataclass(frozen=True, slots=True)
class RequantizeSettings:
    """How `spark-deploy add MODEL --requantize` has AutoRound make an INT4 tree.

    What is packed and what stays in 16 bits is said by the model's exact sets of names.
    """

    iters: int = setting(
        200,
        "Steps of tuning for each block; 0 rounds to nearest and needs no text.",
        minimum=0,
        maximum=5000,
    )
    nsamples: int = setting(128, "Pieces of text that it tunes with.", minimum=1, maximum=4096)
    seqlen: int = setting(2048, "Tokens of a piece.", minimum=16, maximum=32768)
    batch: int = setting(8, "Pieces of one step.", minimum=1, maximum=64)
    calibration: str | None = setting(
        None,
        'File of this machine with the text: JSON lines, each {"text": ...}, best of what the '
        "model will be asked; together at least nsamples times seqlen tokens. Its content is part "
        "of what the tree is named by.",
        examples=["calibration.jsonl"],
    )


CATALOG_NAME = form(
    r"^[a-z0-9][a-z0-9._-]*$", "the name of its file, without folder and .yml", "qwen3.5-35b"
)
SERVED_NAME = form(
    "^[A-Za-z0-9][A-Za-z0-9._/:-]*$", "one word that clients ask with", "qwen3.5-122b"
)
_TLS_NAME = form("^[A-Za-z0-9.:*-]+$", "a name or an address alone", "spark.example.org")
_FILE = form("^(/|~/).+$", "a path that begins with / or ~/", "~/certificates/spark.pem")
_AUDIENCES = ", ".join(f"{one.audience or 'nobody'} ({name})" for name, one in EXPOSURES.items())

# YAML reads the bare word off as false.
_Tls = Annotated[
    Literal["off", "own-cert", "private-ca"],
    BeforeValidator(
        lambda value: "off" if value is False else value,
        json_schema_input_type=Literal["off", "own-cert", "private-ca", False],
    ),
]


@dataclass(frozen=True, slots=True)
class PairSettings:
    """A model and a profile by name."""

    model: str = needed("The stem of a file in catalog/models.", **CATALOG_NAME)
    profile: str = needed("The stem of a file in catalog/profiles.", **CATALOG_NAME)


@dataclass(frozen=True, slots=True)
class ScheduledSettings(PairSettings):
    """A pair and when a host changes to it by itself."""

    at: str = needed(
        "When, as systemd.time writes it, in the host's time zone unless one is named.",
        **form(
            "^[A-Za-z0-9*.,:/~_ -]+$",
            "a time as systemd's OnCalendar= takes it",
            "Mon..Fri 08:00",
        ),
        maxLength=80,
        examples=["Mon..Fri 08:00", "20:00 Europe/Berlin"],
    )


@dataclass(frozen=True, slots=True)
class ReleaseSettings:
    """Ways back to releases that were proven before."""

    keep: int = setting(
        2,
        "How many earlier proven releases `deploys/prune.py` leaves on a host, with their trees "
        "and images.",
        minimum=0,
        maximum=10,
    )
    rollback_to: str | None = setting(
        None,
        "Where a rollback goes: a release by name, usually given by `spark-deploy rollback --to "
        "NAME`; null means the main service's before this one.",
        **form(
            f"^[a-z0-9][a-z0-9-]*-{DIGEST12}$",
            "a release as `spark-deploy status` names it",
            "main-0123456789ab",
        ),
        examples=["main-0123456789ab"],
    )


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How a change goes over several hosts; where nothing is served, all hosts start at once."""

    at_once: Annotated[int, about(minimum=1)] | Literal["all"] = setting(
        1,
        "How many hosts replace what they serve at the same time, or all; the next ones follow "
        "when these are proven, and a failure leaves the rest as they are.",
        examples=[2, "all"],
    )
    canary: str | None = setting(
        None,
        "The host that replaces what it serves first and alone, by its name in the inventory; "
        "null: the first of the inventory.",
        minLength=1,
        examples=["spark-1"],
    )


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Names, gateway and time limits of the service."""

    names: tuple[Annotated[str, about(**SERVED_NAME)], ...] = setting(
        (),
        "Names clients may use for the model, all served at once. The first is what `connect` "
        "prints and should stay the same when model or profile change. Empty: the model's catalog "
        "name.",
        uniqueItems=True,
        examples=[["assistant", "qwen"]],
    )
    port: int = setting(8000, "Port of the gateway.", minimum=1, maximum=65535)
    expose: Expose = setting(
        "loopback",
        f"Who reaches the gateway beside this host: {_AUDIENCES}; lan listens on every address. "
        "The API key is demanded in all cases. Takes effect without restarting the engine.",
    )
    address: str | None = setting(
        None,
        "Name or address under which clients of the network reach this host; certificates cover "
        "it. null: ssh.hostname, else the name in the inventory.",
        **form("^[A-Za-z0-9.:-]+$", "a name or an address alone", "spark.example.org"),
        examples=["spark.example.org"],
    )
    tls: _Tls = setting(
        "off",
        "With expose: lan. off; own-cert: the two files below; private-ca: this machine makes a CA "
        "once in ca_dir, and a certificate for each host that later runs renew in time. The host "
        "itself is always spoken to over plain HTTP on 127.0.0.1.",
    )
    tls_certificate: str | None = setting(
        None,
        "With own-cert: PEM file on the controller with the certificate and its chain.",
        **_FILE,
    )
    tls_key: str | None = setting(
        None,
        "With own-cert: PEM file on the controller with the unencrypted key.",
        **_FILE,
    )
    tls_names: tuple[Annotated[str, about(**_TLS_NAME)], ...] = setting(
        (),
        "With private-ca: names and addresses that certificates cover beside serve.address.",
        uniqueItems=True,
    )
    ca_dir: str = setting(
        "~/.config/spark-deploy/ca",
        "With private-ca: folder on the controller that holds the CA, ca.pem for clients and "
        "ca-key.pem. Made when absent; keep a copy.",
        **_FILE,
    )
    api_key: OwnSecret = setting(
        GENERATED,
        "generate: the host makes a random key once and keeps it. Or where the controller reads "
        "it: {env: NAME}, {file: PATH} or {command: [PROGRAM, ARGUMENT]}.",
    )
    max_body_bytes: Mib = setting(
        32 * MIB,
        "Largest request body, in MiB; images travel in it as base64.",
        key="max_body_mib",
        type="integer",
        minimum=1,
        maximum=4096,
    )
    max_requests_per_s: int | None = setting(
        50,
        "Requests that one client address may send per second on average, with bursts of twice "
        "that, those with a wrong key included; null for no limit.",
        minimum=1,
    )
    max_connections: int | None = setting(
        256,
        "Requests of one client address that may be under way at once, those without a key "
        "included; null for no limit. A proxy before the gateway is one address.",
        minimum=1,
    )
    start_timeout_s: int = setting(
        2400,
        "Seconds an engine may take from start to its first proven answer; the first start "
        "compiles kernels and loads 70 GB.",
        minimum=10,
    )
    stop_timeout_s: int = setting(
        120, "Seconds an engine may take to stop before it is killed.", minimum=5
    )
    drain_s: int = setting(
        30,
        "Seconds that answers in flight may take before a change of release stops the old engine; "
        "longer ones are cut off.",
        minimum=0,
    )

    def broken(self) -> Iterator[Broken]:
        """Yield what is wrong with TLS."""
        if self.tls != "off" and not EXPOSURES[self.expose].open:
            what = f"{self.tls} with expose: {self.expose}"
            yield Broken(
                ("tls",),
                f"{what}; TLS is for what leaves the host in the open",
                "set serve.expose: lan, or serve.tls: off",
            )
        for key in ("tls_certificate", "tls_key"):
            if self.tls == "own-cert" and not getattr(self, key):
                what = "is needed with tls: own-cert"
                yield Broken((key,), what, "name a PEM file of this machine", set_by=("tls",))


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The one memory pool that CPU and GPU share."""

    total_bytes: Gib = setting(
        round(119.7 * GIB),
        "What MemTotal of the host shows, never the number on the box: 119.7 on a 128 GB Spark; "
        "newer units show 121.7.",
        key="total_gib",
        exclusiveMinimum=0,
    )
    reserve_bytes: Gib = setting(
        12 * GIB,
        "Left to the system and to other workloads; raise it for them.",
        key="reserve_gib",
        minimum=0,
    )
    start_wait_s: int = setting(
        300,
        "Seconds to wait before a start for memory that a stopped engine gives back late.",
        minimum=0,
    )
    floor_bytes: Gib = setting(
        4 * GIB,
        "Less available memory than this, while the engine starts or serves, and it is stopped "
        "before the host dies.",
        key="floor_gib",
        minimum=0,
    )

    def broken(self) -> Iterator[Broken]:
        """Yield what does not add up."""
        reserve, total, floor = map(
            in_gib, (self.reserve_bytes, self.total_bytes, self.floor_bytes)
        )
        if reserve >= total:
            what = f"reserve_gib {reserve} leaves nothing of {total} GiB"
            yield Broken(("reserve_gib",), what, "lower it below memory.total_gib")
        if floor > reserve:
            what = f"the watch would stop every engine: floor {floor} GiB is above the"
            fix = "keep floor_gib at or below memory.reserve_gib"
            yield Broken(("floor_gib",), f"{what} reserve {reserve} GiB", fix)


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """When a serving engine is restarted."""

    stall_s: int = setting(
        120,
        "Seconds with running requests and no progress, or without any answer, before a restart; "
        "never less than a second per 1000 tokens of context, because a long prompt is counted "
        "only when all of it was read.",
        minimum=5,
    )
    interval_s: int = setting(10, "Seconds between two looks.", minimum=1)
    hot_celsius: int = setting(
        90,
        "Temperature of the GPU from which on the watch writes an event; it stops nothing for it. "
        "Boards switch themselves off without a word near 105.",
        minimum=40,
        maximum=110,
    )


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The proof after every start, and the measurement after it."""

    timeout_s: int = setting(
        600,
        "Seconds each check of the proof may take; one that runs out of them ends the proof.",
        minimum=5,
    )
    bench_s: int = setting(
        120,
        "Seconds the speed is measured for, with the gateway open, after a proof under new "
        "versions of driver, kernel, docker, toolkit, image or plugin; 0 leaves it out.",
        minimum=0,
        maximum=1800,
    )
    bench_worse_percent: int = setting(
        15,
        "A speed that is worse than at the last proof by more than this is reported, with a way "
        "back.",
        minimum=1,
        maximum=90,
    )
