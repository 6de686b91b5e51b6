"""Settings of services: checkpoint, gateway, memory, checks, additional services."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass
from spark_contract.gateway import EXPOSURES, Expose
from spark_contract.release import EMBEDDINGS, ROUTED
from spark_contract.units import DIGEST12

from spark_deploy.config.documents import CLOSED, GIB, MIB, UNIQUE, Gib, Violation, text_schema
from spark_deploy.config.settings.engine import ServiceEngineSettings
from spark_deploy.config.settings.patterns import SecretOrGenerate, SecretRef, text_field


@dataclass(frozen=True, slots=True, config=CLOSED)
class CheckpointSettings:
    """How the checkpoint of a profile is stored on the host."""

    layout: Literal["overlay", "full"] | None = None
    """overlay: hard links to the base and a small file, built in seconds; needs the plugin. full: a
    complete copy that any tool can read. null: the profile's layout."""
    source: Literal["base", "prebuilt", "requantized"] = "base"
    """base: build from the model's INT4 repository. prebuilt: download the model's hybrid
    repository (sources.hybrid) and compare it with the FP8 source; needs `layout: full`.
    requantized: build from your own INT4 checkpoint, made by `spark-deploy add MODEL
    --requantize`."""
    keep_base: bool = True
    """false: remove the base when a full checkpoint serves. A rebuild then downloads the base
    again. An overlay needs the base."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class RequantizeSettings:
    """How `spark-deploy add MODEL --requantize` makes an INT4 checkpoint with AutoRound.

    The model's tensor sets decide which tensors are packed and which stay in 16 bits.
    """

    iters: int = Field(default=200, ge=0, le=5000)
    """Tuning steps per block; 0 rounds to nearest without calibration."""
    nsamples: int = Field(default=128, ge=1, le=4096)
    """Number of calibration samples."""
    seqlen: int = Field(default=2048, ge=16, le=32768, description="Tokens per sample.")
    batch: int = Field(default=8, ge=1, le=64, description="Samples per step.")
    calibration: str | None = Field(default=None, examples=["calibration.jsonl"])
    """Local file with calibration text that resembles your requests: at least nsamples times seqlen
    tokens in JSON lines, {"text": ...}."""


CATALOG_NAME = text_schema(
    r"^[a-z0-9][a-z0-9._-]*$", "a file name without its folder or the .yml extension", "qwen3.5-35b"
)
SERVED_NAME = text_schema("^[A-Za-z0-9][A-Za-z0-9._/:-]*$", "a word without spaces", "qwen3.5-122b")
_TlsName = Annotated[
    str, text_field("^[A-Za-z0-9.:*-]+$", "a name or an address", "spark.example.org")
]
_File = Annotated[
    str, text_field("^(/|~/).+$", "a path that starts with / or ~/", "~/certificates/spark.pem")
]
CatalogName = Annotated[str, Field(json_schema_extra=CATALOG_NAME)]
ServedName = Annotated[str, Field(json_schema_extra=SERVED_NAME)]
_AUDIENCES = ", ".join(
    f"{exposure.audience or 'only this host'} ({name})" for name, exposure in EXPOSURES.items()
)

# YAML reads an unquoted off as false.
_Tls = Annotated[
    Literal["off", "own-cert", "private-ca"],
    BeforeValidator(
        lambda value: "off" if value is False else value,
        json_schema_input_type=Literal["off", "own-cert", "private-ca", False],
    ),
]


@dataclass(frozen=True, slots=True, config=CLOSED)
class ModelAndProfile:
    """Names of a model and a profile."""

    model: CatalogName = Field(description="Model name.")
    profile: CatalogName = Field(description="Profile name.")


@dataclass(frozen=True, slots=True, config=CLOSED)
class ScheduledSettings(ModelAndProfile):
    """A model and profile, and the time at which a host switches to it."""

    at: str = Field(
        max_length=80,
        examples=["Mon..Fri 08:00", "20:00 Europe/Berlin"],
        json_schema_extra=text_schema(
            "^[A-Za-z0-9*.,:/~_ -]+$",
            "a time in the format of systemd's OnCalendar=",
            "Mon..Fri 08:00",
        ),
    )
    """Time in the format of systemd.time, in the host's time zone unless you add another."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class ReleaseSettings:
    """Rollback targets."""

    keep: int = Field(default=2, ge=0, le=10)
    """Earlier proven releases that `deploys/prune.py` keeps, with their checkpoints and images."""
    rollback_to: str | None = Field(
        default=None,
        examples=["main-0123456789ab"],
        json_schema_extra=text_schema(
            f"^[a-z0-9][a-z0-9-]*-{DIGEST12}$",
            "a release that `spark-deploy status` lists",
            "main-0123456789ab",
        ),
    )
    """Release to roll back to, usually set by `spark-deploy rollback --to NAME`; null: the previous
    release of the main service."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class RolloutSettings:
    """How a change is rolled out across hosts. If no host serves yet, all start at once."""

    at_once: Annotated[int, Field(ge=1)] | Literal["all"] = Field(default=1, examples=[2, "all"])
    """Number of hosts that change at the same time, or all. The other hosts follow once these hosts
    have passed their checks."""
    canary: str | None = Field(default=None, min_length=1, examples=["spark-1"])
    """Inventory name of the host that changes first; null: the first host."""


KEY_NAME = text_schema(
    "^[a-z][a-z0-9-]{0,30}$", "a name of at most 31 lowercase letters, digits and dashes", "anna"
)
_SHA256 = text_schema(
    "^[0-9a-f]{64}$", "64 hexadecimal digits, from `spark-deploy key add`", "0" * 64
)


@dataclass(frozen=True, slots=True, config=CLOSED)
class KeySettings:
    """A named API key; its limits apply to each host and gateway port."""

    sha256: str = Field(json_schema_extra=_SHA256, description="SHA-256 of the key.")
    max_concurrent: int | None = Field(default=None, ge=1, le=1000)
    """Maximum concurrent requests; null: no limit."""
    max_requests_per_min: int | None = Field(default=None, ge=1, le=10000)
    """Average requests per minute; bursts may be as large. null: no limit."""
    max_body_mib: int | None = Field(default=None, ge=1, le=4096)
    """Maximum request body in MiB; bodies without Content-Length are rejected. null:
    serve.max_body_mib."""
    max_output_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """Maximum output tokens per request; null: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class RequestDefaults:
    """Values for requests that omit them; null: the model's own default."""

    thinking: bool | None = Field(default=None, description="Think before the answer.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0: greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most probable tokens whose probabilities add up to this value."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this number of most probable tokens; 0: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Minimum probability, relative to the most probable token."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Values above 0 avoid tokens that are already in the answer."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    """Values above 1 avoid tokens that are in the prompt or answer."""

    @property
    def request(self) -> dict[str, Any]:
        """Fields of a request to vLLM."""
        fields = asdict(self)
        thinking = fields.pop("thinking")
        template = {} if thinking is None else {"enable_thinking": thinking}
        values = {**fields, "chat_template_kwargs": template or None}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, config=CLOSED)
class ServeSettings:
    """Names, gateway and time limits of the service."""

    names: tuple[ServedName, ...] = Field(
        default=(), examples=[["assistant", "qwen"]], json_schema_extra=UNIQUE
    )
    """Model names that clients may use. `connect` prints the first name, so keep this name when the
    model or profile changes. Empty: the model's catalog name."""
    defaults: dict[str, RequestDefaults] = Field(
        default_factory=dict,
        examples=[{"qwen-fast": {"thinking": False, "temperature": 0.7}}],
        json_schema_extra={"propertyNames": SERVED_NAME},
    )
    """Request defaults for each model name, if one engine serves several model names. Needs a
    profile with our plugin."""
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the gateway.")
    expose: Expose = Field(
        default="loopback",
        description=f"Which clients can reach the gateway: {_AUDIENCES}; lan listens on every "
        "address. Clients always need the API key. Changing this does not restart the engine.",
    )
    address: str | None = Field(
        default=None,
        examples=["spark.example.org"],
        json_schema_extra=text_schema(
            "^[A-Za-z0-9.:-]+$", "a name or an address", "spark.example.org"
        ),
    )
    """Name or address that clients on the network use for this host; certificates include it. null:
    ssh.hostname, otherwise the inventory name."""
    tls: _Tls = "off"
    """Only with expose: lan. own-cert: your certificate and key files; private-ca: this machine
    creates a CA in ca_dir and renews a certificate for each host. On the host, 127.0.0.1 stays
    plain HTTP."""
    tls_certificate: _File | None = None
    """With own-cert: PEM file on the controller with certificate and chain."""
    tls_key: _File | None = None
    """With own-cert: PEM file on the controller with the unencrypted key."""
    tls_names: tuple[_TlsName, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """With private-ca: additional names and addresses in the certificates."""
    ca_dir: _File = "~/.config/spark-deploy/ca"
    """With private-ca: local folder with ca.pem, which clients need, and ca-key.pem. Created if
    missing; keep a backup."""
    api_key: SecretOrGenerate = Field(default_factory=SecretRef)
    """generate: the host makes a random key once. Otherwise the controller reads the key from {env:
    NAME}, {file: PATH} or {command: [PROGRAM, ARGUMENT]}."""
    keys: dict[str, KeySettings] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": KEY_NAME}
    )
    """More API keys by name, for people and programs. `spark-deploy key add NAME` creates a key,
    prints it once and writes only its digest."""
    max_body_mib: int = Field(default=32, ge=1, le=4096)
    """Maximum request body in MiB, including images in base64."""
    max_requests_per_s: int | None = Field(default=50, ge=1)
    """Average requests per second from a client address, with bursts of twice that. The same limit
    applies to requests without a valid key. null: no limit."""
    start_timeout_s: int = Field(default=2400, ge=10)
    """Maximum seconds from a start to the first checked answer. The first start compiles kernels
    and loads 70 GB."""
    drain_s: int = Field(default=30, ge=0)
    """Seconds that running requests get to finish before a release change stops the engine."""

    def names_of(self, model: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*(self.names or (model,)), *self.defaults)))

    @property
    def stop_timeout_s(self) -> int:
        return max(30, self.start_timeout_s // 20)

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * MIB

    def violations(self) -> Iterator[Violation]:
        if self.tls != "off" and not EXPOSURES[self.expose].needs_tls:
            message = f"tls: {self.tls} requires expose: lan, but expose is {self.expose}"
            yield Violation(("tls",), message, "set serve.expose: lan, or serve.tls: off")
        if len({key.sha256 for key in self.keys.values()}) < len(self.keys):
            fix = "run `spark-deploy key add NAME` for each name"
            yield Violation(("keys",), "two names have the same key", fix)
        for key in ("tls_certificate", "tls_key"):
            if self.tls == "own-cert" and not getattr(self, key):
                message = "is required by tls: own-cert"
                fix = "set it to a PEM file on this machine"
                yield Violation((key,), message, fix, set_by=("tls",))


@dataclass(frozen=True, slots=True, config=CLOSED)
class MemorySettings:
    """Memory that CPU and GPU share."""

    total_gib: Gib = Field(default=119.7, gt=0)
    """MemTotal of the host: 119.7 on a 128 GB Spark; newer units show 121.7."""
    reserve_gib: Gib = Field(default=12, ge=1)
    """Memory for the system and other workloads. The engine stops if available memory falls
    below 4 GiB or half of this reserve, whichever is smaller."""
    start_wait_s: int = Field(default=300, ge=0)
    """Maximum seconds to wait before a start until a stopped engine has freed memory."""

    @property
    def total_bytes(self) -> int:
        return round(self.total_gib * GIB)

    @property
    def reserve_bytes(self) -> int:
        return round(self.reserve_gib * GIB)

    @property
    def floor_bytes(self) -> int:
        """Available memory below which the watchdog stops the engine."""
        return round(min(4, self.reserve_gib / 2) * GIB)

    def violations(self) -> Iterator[Violation]:
        if self.reserve_gib >= self.total_gib:
            message = (
                f"{self.reserve_gib:g} GiB is not less than the total of {self.total_gib:g} GiB"
            )
            yield Violation(("reserve_gib",), message, "set it below memory.total_gib")


@dataclass(frozen=True, slots=True, config=CLOSED)
class WatchSettings:
    """When a serving engine is restarted."""

    stall_s: int = Field(default=120, ge=5)
    """Seconds before a restart, if running requests make no progress or the engine does not
    respond. Long contexts get at least a second per 1000 tokens."""

    @property
    def interval_s(self) -> int:
        return max(1, self.stall_s // 12)


@dataclass(frozen=True, slots=True, config=CLOSED)
class CheckSettings:
    """The check after every start, and the speed measurement after it."""

    timeout_s: int = Field(default=600, ge=5)
    """Seconds for each check; a check that takes longer fails."""
    bench_s: int = Field(default=120, ge=0, le=1800)
    """Seconds of the speed measurement after a driver, kernel, docker, toolkit, image or plugin
    change; 0: none."""


SERVICE_NAME = text_schema(
    "^[a-z][a-z0-9-]{0,30}$", "a name of at most 31 lowercase letters, digits and dashes", "search"
)
# The memory of an engine is set in hundredths of the total.
_SHARES = 100


@dataclass(frozen=True, slots=True, config=CLOSED)
class ServiceSettings(ModelAndProfile):
    """An additional service of a host, with its own release, check, watchdog and gateway."""

    port: int = Field(ge=1, le=65535, description="Port of the gateway.")
    memory_gib: Gib = Field(gt=0)
    """Memory of the engine, taken from the main service. Rounded down to 1 % of
    memory.total_gib."""
    names: tuple[ServedName, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """As serve.names."""
    paths: tuple[Literal[ROUTED], ...] = Field(  # type: ignore[valid-type]
        default=(), examples=[[EMBEDDINGS]], json_schema_extra=UNIQUE
    )
    """Paths that the main gateway routes to this service if a request names no model."""
    start: Literal["always", "on-request"] = "always"
    """on-request: the first request starts the service, and it stops when another service needs its
    memory. On-demand services share memory: only the largest counts."""
    idle_stop_s: int = Field(default=0, ge=0, examples=[1800])
    """With on-request: seconds without a request before the service stops; 0: no limit."""
    engine: ServiceEngineSettings = Field(default_factory=ServiceEngineSettings)

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    def violations(self, total_gib: Gib) -> Iterator[Violation]:
        if self.memory_gib * _SHARES < total_gib:
            message = f"{self.memory_gib:g} GiB is less than 1 % of memory.total_gib"
            fix = f"set it to {total_gib / _SHARES:.3f} GiB or more"
            yield Violation(("memory_gib",), message, fix)
        if self.idle_stop_s and self.start == "always":
            fix = "set start: on-request, or remove idle_stop_s"
            yield Violation(("idle_stop_s",), "idle_stop_s has no effect with start: always", fix)
        yield from (
            violation._replace(key=("engine", *violation.key))
            for violation in self.engine.violations()
        )
