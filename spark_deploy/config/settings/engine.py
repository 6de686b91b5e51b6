"""Engine settings, which replace values of the profile, and rules for options and variables."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, GIB, Gib, Violation, text_schema


class Option(NamedTuple):
    name: str
    setting: str | None = None  # replaces the profile's value


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Limits:
    """Limits of the engine on a host."""

    max_context_tokens: int | None = Field(default=None, ge=64)
    """Maximum length of prompt and answer; null for the model's native context."""
    max_sequences: int = Field(ge=1, le=1024, description="Requests processed at the same time.")
    max_batched_tokens: int = Field(ge=1)
    """Maximum tokens per engine step; a higher limit speeds up prompts, but needs memory."""
    long_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a prompt per step while other requests run, so that their answers
    continue; null: no limit."""
    memory_fraction: float = Field(gt=0, le=0.95)
    """Share of memory.total_gib that the engine may use."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class KvCache:
    """Type and size of the KV cache."""

    size_gib: Gib | None = Field(default=None, gt=0)
    """Size of the KV cache in GiB; null: derived from limits.memory_fraction."""
    dtype: str = Field(
        default="auto",
        json_schema_extra={"enum": [
            "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "turboquant_k8v4",
            "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
        ]},
    )  # fmt: skip
    """auto (16 bit), fp8 or a turboquant_* preset; the plan computes the size of these."""

    @property
    def size_bytes(self) -> int | None:
        return None if self.size_gib is None else round(self.size_gib * GIB)


# vLLM's option for each key of a profile, and the setting that replaces the profile's value.
_OPTIONS = {
    ("limits", "max_context_tokens"): Option("max-model-len", "engine.max_context_tokens"),
    ("limits", "max_sequences"): Option("max-num-seqs", "engine.max_sequences"),
    ("limits", "max_batched_tokens"): Option("max-num-batched-tokens"),
    ("limits", "long_prompt_tokens"): Option("long-prefill-token-threshold"),
    ("limits", "memory_fraction"): Option("gpu-memory-utilization", "engine.memory_fraction"),
    ("kv_cache", "size_gib"): Option("kv-cache-memory-bytes", "engine.kv_cache_gib"),
    ("kv_cache", "dtype"): Option("kv-cache-dtype"),
}
PROFILE_KEYS = {option.name: key for key, option in _OPTIONS.items()}
SETTINGS_INSTEAD = {
    option.name: f"set {option.setting or f'{section}.{field} in your own profile'}"
    for (section, field), option in _OPTIONS.items()
}


def option_values(limits: Limits, kv_cache: KvCache) -> dict[str, Any]:
    sections = {"limits": limits, "kv_cache": kv_cache}
    values = {
        option.name: getattr(sections[section], field)
        for (section, field), option in _OPTIONS.items()
    }
    return {**values, "kv-cache-memory-bytes": kv_cache.size_bytes}


# Ranges of running requests (first, last), and their draft tokens.
DraftVocabulary = Literal[0] | Annotated[int, Field(ge=1024, multiple_of=64)]
DraftSchedule = tuple[tuple[PositiveInt, PositiveInt, NonNegativeInt], ...]


def check_schedule(schedule: DraftSchedule | None) -> Iterator[Violation]:
    """Check the ranges of ``num_speculative_tokens_per_batch_size``."""
    previous_last = 0
    for first, last, _ in schedule or ():
        if first > last or first <= previous_last or (previous_last == 0 and first > 1):
            message = (
                f"range {first} to {last}: the first range must start at 1, "
                "and ranges must increase without overlapping"
            )
            fix = "write ranges such as [[1, 2, 2], [3, 8, 1], [9, 9, 0]]"
            yield Violation(("num_speculative_tokens_per_batch_size",), message, fix)
        previous_last = last


# Options that are set elsewhere, and how to set them.
OWNED_OPTIONS = {
    "model": "set model",
    "served-model-name": "set serve.names",
    "host": "set serve.expose, because only the gateway is reachable",
    "port": "set serve.port, because only the gateway is reachable",
    "uds": "remove it: the gateway uses a fixed socket",
    "api-key": "set serve.api_key, because the gateway checks the key",
    "ssl-keyfile": "remove it: TLS terminates at the gateway",
    "ssl-certfile": "remove it: TLS terminates at the gateway",
    **SETTINGS_INSTEAD,
    "device-memory-utilization": "set engine.memory_fraction",
    "num-gpu-blocks-override": "set engine.kv_cache_gib",
    "language-model-only": "set engine.vision",
    "enable-prefix-caching": "set prefix_caching in your own profile, or choose profile agent",
    "runner": "set task in the model's file (only with kind: plain)",
    "quantization": "remove it: the checkpoint states its quantization",
    "hf-token": "set hub.token",
    "cpu-offload-gb": "remove it: CPU and GPU share their memory",
    "kv-offloading-size": "remove it: CPU and GPU share their memory",
    "kv-transfer-config": "remove it: this project has never tested external prefix caches",
    "config": "list the options here, because options in a file are not checked",
}
# Options that guard rails read: allowed, but only with their full names.
CHECKED_OPTIONS = (
    "additional-config", "async-scheduling", "attention-backend", "attention-config",
    "compilation-config", "data-parallel-size",
    "distributed-executor-backend", "enable-expert-parallel", "enforce-eager", "hf-overrides",
    "kernel-config", "linear-backend", "load-format", "moe-backend", "nnodes",
    "pipeline-parallel-size", "prefill-context-parallel-size", "quantization-config",
    "reasoning-parser", "spec-method", "spec-model", "spec-tokens", "speculative-config",
    "tensor-parallel-size", "trust-remote-code",
)  # fmt: skip
# Options that set a number of processes, each with a separate GPU.
DEVICE_OPTIONS = (
    "data-parallel-size", "nnodes", "pipeline-parallel-size", "prefill-context-parallel-size",
    "tensor-parallel-size",
)  # fmt: skip
# Folders in the engine's container: checkpoint, cache and image.
_IN_CONTAINER = re.compile(r"/(model|cache|vllm-workspace|usr|opt|etc|dev|tmp)(/|$)")
_PATH = re.compile(r"(/|~/|\.{1,2}/).*|[^{}\s]+\.(jinja2?|py)")
_NO_FILES = ("root-path", "middleware", "allowed-origins")  # values with / that are not files


def canonical_name(name: str) -> str:
    return name.replace("_", "-")


def option_problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (option, message, fix) for each option that users cannot set here."""
    for option in sorted(options):
        name = canonical_name(option).removeprefix("no-")
        # argparse accepts abbreviations, which no rule would recognize.
        completions = [
            known for known in (*OWNED_OPTIONS, *CHECKED_OPTIONS) if known.startswith(name)
        ]
        value = options[option]
        if name in OWNED_OPTIONS:
            yield option, "is set elsewhere", OWNED_OPTIONS[name]
        elif completions and name not in CHECKED_OPTIONS:
            full_name = completions[0]
            yield option, f"is an abbreviation of {full_name}", f"write {full_name} in full"
        elif name in DEVICE_OPTIONS and value is not None and parse_whole_number(value) is None:
            yield option, f"{value!r} is not a whole number", "write a number such as 1"
        elif name not in _NO_FILES and (file := _missing_file(decode_mapping(value))):
            fix = "use a file of the image (/vllm-workspace/...) or checkpoint (/model/...)"
            if name == "chat-template":
                fix = "set engine.chat_template to a local file"
            yield option, f"{file} is not in the engine's container", fix


def _missing_file(value: Any) -> str | None:
    """Return the first path in a value that the engine's container does not have."""
    if isinstance(value, Mapping):
        return _missing_file(list(value.values()))
    if isinstance(value, list):
        return next(filter(None, map(_missing_file, value)), None)
    if not isinstance(value, str) or "{" in value:
        return None
    words = re.split(r"[=,\s]", value)  # adapters are written as `name=/path,...`
    paths = (word for word in words if _PATH.fullmatch(word) and not _IN_CONTAINER.match(word))
    return next(paths, None)


def canonical_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as the engine reads them: canonical names, mappings instead of JSON text."""
    result: dict[str, Any] = {}
    for option, value in options.items():
        name = canonical_name(option)
        if name.startswith("no-") and value is True:
            result[name.removeprefix("no-")] = False
        else:
            result[name] = decode_mapping(value)
    return result


def decode_mapping(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def parse_whole_number(value: Any) -> int | None:
    """Return the integer that the engine would read from ``value``, if any."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() else None


_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY)")
_LOADER = (
    r"LD_.*|GLIBC_TUNABLES|GCONV_PATH|GETCONF_DIR|LOCPATH|NLSPATH|MALLOC_.*|HOSTALIASES|"
    r"PYTHON.*|BASH_ENV|ENV|IFS|PATH"
)
_RUNTIMES = r"(DOCKER|BUILDKIT|BUILDX|COMPOSE|CONTAINERD|RUNC|NVIDIA)_.*"
# Patterns of whole names.
_REJECTED = {
    _LOADER: ("this variable makes programs load or run other code", "put it in the image"),
    _RUNTIMES: (
        "docker and container runtimes read this variable and run as root",
        "remove it: the plan configures the GPU",
    ),
    "VLLM_SERVER_DEV_MODE": (
        "this variable enables HTTP endpoints that change a running engine",
        "remove it",
    ),
}
_MAX_BYTES = 32_768


def environment_problems(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, message, fix) for each variable that users cannot set."""
    for name in sorted(environment):
        if _SECRET.search(name):
            message = "this may be a secret, but other users can read the environment of a unit"
            yield name, message, "use hub.token or serve.api_key with {env|file|command: ...}"
        for pattern, (message, fix) in _REJECTED.items():
            if re.fullmatch(pattern, name):
                yield name, message, fix
        value = environment[name]
        if any(character in value for character in "\n\r\0"):
            yield name, "spans several lines", "write a single line"
        elif len(value.encode()) > _MAX_BYTES:
            yield name, f"is longer than {_MAX_BYTES} bytes", "put it in a file in the image"


ENVIRONMENT_NAMES = text_schema(
    "^[A-Z_][A-Z0-9_]*$", "a name of uppercase letters, digits and _", "NCCL_DEBUG"
)
# vLLM's names, accepted for settings of the engine.
VLLM_NAMES = {
    "max_model_len": "max_context_tokens",
    "max_num_seqs": "max_sequences",
    "gpu_memory_utilization": "memory_fraction",
    "num_speculative_tokens": "drafts",
}


def names_of(key: str) -> list[str]:
    """Return the names of a setting as dotted keys: ours, then vLLM's if it has one."""
    section, dot, name = key.rpartition(".")
    if section.rpartition(".")[2] != "engine":
        return [key]
    name = VLLM_NAMES.get(name, name)
    names = [name, *(alias for alias, ours in VLLM_NAMES.items() if ours == name)]
    return [f"{section}{dot}{name}" for name in names]


OPTION_NAMES = text_schema(
    "^[a-z][a-z0-9_-]*$", "an option's name without leading dashes", "max-log-len"
)


def _accept_vllm_names(schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    for alias, name in VLLM_NAMES.items():
        if name in properties:
            text = f"vLLM's name for `{name}`."
            properties[alias] = {**properties[name], "description": text}


_CONFIG = ConfigDict(extra="forbid", json_schema_extra=_accept_vllm_names)


def engine_violations(
    options: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Violation]:
    for option, message, fix in option_problems(options):
        yield Violation(("options", option), message, fix)
    for name, message, fix in environment_problems(environment):
        yield Violation(("environment", name), message, fix)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class ServiceEngineSettings:
    """Engine settings of a service; null: the profile's value."""

    max_context_tokens: int | None = Field(default=None, ge=64)
    """Maximum tokens of prompt plus answer."""
    max_sequences: int | None = Field(default=None, ge=1, le=1024)
    """Maximum requests processed at the same time."""
    kv_cache_gib: Gib | None = Field(default=None, gt=0)
    """Size of the KV cache in GiB; null: derived from the memory fraction."""
    drafts: int | None = Field(default=None, ge=0, le=3, examples=[1])
    """Draft tokens per step from the model's MTP layer; 0: none. The check warns if the model
    accepts fewer than half of them."""
    head: Literal["keep", "int8-g128", "int8-triton"] | None = None
    """Format of the LM head, as in a profile's `head`. May need a new checkpoint."""
    drafter: Literal["keep", "int4-g128"] | None = None
    """Format of the MTP layer, as in a profile's `drafter`. May need a new checkpoint."""
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    """How drafts are sampled, as in a profile's `speculation`."""
    rejection_sample_method: Literal["standard", "block"] | None = None
    """How drafts are verified, as in a profile's `speculation`."""
    draft_vocabulary_tokens: DraftVocabulary | None = Field(default=None, examples=[32768])
    """Number of frequent tokens from which drafts are chosen, as in a profile's `speculation`: a
    multiple of 64, at least 1024. 0: all tokens."""
    num_speculative_tokens_per_batch_size: DraftSchedule | None = Field(
        default=None, examples=[[[1, 2, 2], [3, 4, 1]]]
    )
    """Number of drafts for each number of running requests, as in a profile's `speculation`."""
    chat_template: str | None = Field(default=None, min_length=1, examples=["templates/chat.jinja"])
    """Local file with a Jinja chat template, relative to the inventory's folder. Changing the file
    creates a new release."""
    template_fixes: bool | None = None
    """true: use this project's fixes of the model's chat template, if `chat_template` is not set;
    false: use the checkpoint's template."""
    cpuset_cpus: str | None = Field(
        default=None,
        examples=["5-9,15-19"],
        json_schema_extra=text_schema(
            r"^\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*$", "CPU numbers and ranges", "5-9,15-19"
        ),
    )
    """CPUs of the engine's container (`docker run --cpuset-cpus`); null: all. The
    fast cores (X925) of a GB10 are 5-9 and 15-19; a recipe reports 2 to 3 % more speed with
    these. Measure it with `bench --compare`."""
    vision: bool | None = None
    """true: keep the vision tower (0.8 GiB for Qwen3.5). false: serve text only."""
    options: dict[str, Any] = Field(
        default_factory=dict,
        examples=[{"seed": 1}],
        json_schema_extra={"propertyNames": OPTION_NAMES},
    )
    """More options of `vllm serve`: name without leading dashes, and value. true gives a bare flag,
    null drops the profile's option. Options outside `spark_deploy/config/settings/allowed.py`
    need override_rails."""
    environment: dict[str, str] = Field(
        default_factory=dict,
        examples=[{"VLLM_LOG_STATS_INTERVAL": "30"}],
        json_schema_extra={"propertyNames": ENVIRONMENT_NAMES},
    )
    """More environment variables of the engine, with the same limits. Never use secrets, which
    are visible on the host."""

    def violations(self) -> Iterator[Violation]:
        yield from engine_violations(self.options, self.environment)
        yield from check_schedule(self.num_speculative_tokens_per_batch_size)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class EngineSettings(ServiceEngineSettings):
    """Engine settings; null: the profile's value."""

    memory_fraction: float | None = Field(default=None, gt=0, le=0.95)
    """Fraction of memory.total_gib that the engine may use. Users report freezes above 0.82."""
    draft_vocabulary_text: str | None = Field(default=None, min_length=1, examples=["answers.txt"])
    """Local UTF-8 text of up to 64 MiB, similar to your answers; hosts rank draft tokens by it."""
