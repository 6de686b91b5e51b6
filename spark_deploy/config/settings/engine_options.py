"""Options of ``vllm serve``: those a key of a profile decides, and those owners must not give.

vLLM's parser takes ``_`` for ``-``, ``--no-x`` for a false ``--x``, JSON text for a mapping, a
second name for some options, and any unambiguous beginning of a name. An option that the plan
decides or a guard rail judges must not pass under such a spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, GIB, Gib


class Option(NamedTuple):
    name: str
    setting: str | None = None  # replaces the profile's value


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Limits:
    """What one host serves."""

    max_context_tokens: int | None = Field(default=None, ge=64)
    """Longest prompt plus answer; null for the model's native context."""
    max_sequences: int = Field(ge=1, le=1024, description="Requests computed at the same time.")
    max_batched_tokens: int = Field(ge=1)
    """Tokens of one engine step; more speeds up prompts and needs memory."""
    memory_fraction: float = Field(gt=0, le=0.95)
    """Share of memory.total_gib the engine may take in all."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class KvCache:
    """Type and size of the KV cache."""

    size_gib: Gib | None = Field(default=None, gt=0)
    """Pins the cache to this size in GiB; null derives it from limits.memory_fraction."""
    dtype: str = Field(
        default="auto",
        json_schema_extra={
            "enum": [
                "auto",
                "bfloat16",
                "float16",
                "fp8",
                "fp8_e4m3",
                "fp8_e5m2",
                "turboquant_k8v4",
                "turboquant_4bit_nc",
                "turboquant_k3v4_nc",
                "turboquant_3bit_nc",
            ]
        },
    )
    """auto (16 bit), fp8 or a turboquant_* preset; of others the plan cannot count the bytes."""

    @property
    def size_bytes(self) -> int | None:
        return None if self.size_gib is None else round(self.size_gib * GIB)


# What each key of a profile is called by the engine, and the setting that replaces it.
_OPTIONS = {
    ("limits", "max_context_tokens"): Option("max-model-len", "engine.max_context_tokens"),
    ("limits", "max_sequences"): Option("max-num-seqs", "engine.max_sequences"),
    ("limits", "max_batched_tokens"): Option("max-num-batched-tokens"),
    ("limits", "memory_fraction"): Option("gpu-memory-utilization", "engine.memory_fraction"),
    ("kv_cache", "size_gib"): Option("kv-cache-memory-bytes", "engine.kv_cache_gib"),
    ("kv_cache", "dtype"): Option("kv-cache-dtype"),
}
DECIDING = {option.name: key for key, option in _OPTIONS.items()}
INSTEAD = {
    option.name: f"set {option.setting or f'{section}.{field} in a profile of your own'}"
    for (section, field), option in _OPTIONS.items()
}


def option_values(limits: Limits, kv_cache: KvCache) -> dict[str, Any]:
    """Return the engine's options with the values of a profile."""
    sections = {"limits": limits, "kv_cache": kv_cache}
    values = {
        option.name: getattr(sections[section], field)
        for (section, field), option in _OPTIONS.items()
    }
    return {**values, "kv-cache-memory-bytes": kv_cache.size_bytes}


# Options that a setting or the gateway already decides.
OWNED_OPTIONS = {
    "model": "set model",
    "served-model-name": "set serve.names",
    "host": "set serve.expose: the gateway is the only way in",
    "port": "set serve.port: the gateway is the only way in",
    "uds": "leave it out: the gateway talks to this socket",
    "api-key": "set serve.api_key: the gateway holds the key",
    "ssl-keyfile": "leave it out: the gateway ends TLS",
    "ssl-certfile": "leave it out: the gateway ends TLS",
    **INSTEAD,
    "device-memory-utilization": "set engine.memory_fraction",
    "num-gpu-blocks-override": "set engine.kv_cache_gib",
    "language-model-only": "set engine.vision",
    "enable-prefix-caching": "set prefix_caching in a profile of your own, or choose agent",
    "runner": "set task in the model's file, of kind: plain",
    "quantization": "leave it out: the checkpoint names its own",
    "hf-token": "set hub.token",
    "cpu-offload-gb": "leave it out: CPU and GPU share one pool, and nobody would count it",
    "kv-offloading-size": "leave it out: CPU and GPU share one pool, and nobody would count it",
    "kv-transfer-config": "leave it out: beginnings would be found again by a way nobody ran here",
    "config": "write its options out: nobody would look at what a file sets",
}
# Options that name classes or files of Python for the engine to run.
CODE_OPTIONS = (
    "io-processor-plugin",
    "logits-processors",
    "middleware",
    "model-class-overrides",
    "reasoning-parser-plugin",
    "scheduler-cls",
    "tool-parser-plugin",
    "worker-cls",
    "worker-extension-cls",
)
# Options whose values the guard rails look at: free, but under their whole names only.
JUDGED_OPTIONS = (
    *CODE_OPTIONS,
    "additional-config",
    "async-scheduling",
    "attention-backend",
    "attention-config",
    "compilation-config",
    "data-parallel-size",
    "distributed-executor-backend",
    "enable-expert-parallel",
    "enforce-eager",
    "hf-overrides",
    "kernel-config",
    "linear-backend",
    "load-format",
    "moe-backend",
    "nnodes",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "quantization-config",
    "reasoning-parser",  # begins another one's name
    "spec-method",
    "spec-model",
    "spec-tokens",
    "speculative-config",
    "tensor-parallel-size",
    "trust-remote-code",
)
# How many processes, each with a GPU of its own, the engine would start.
DEVICE_OPTIONS = (
    "data-parallel-size",
    "nnodes",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "tensor-parallel-size",
)
# Folders of the engine's container: the tree, its cache, and what images bring along.
_IN_CONTAINER = re.compile(r"/(model|cache|vllm-workspace|usr|opt|etc|dev|tmp)(/|$)")
_PATH = re.compile(r"(/|~/|\.{1,2}/).*|[^{}\s]+\.(jinja2?|py)")
_NO_FILES = ("root-path", "middleware", "allowed-origins")  # begin with / as addresses do


def canonical(name: str) -> str:
    """Return the option as the engine writes it."""
    return name.replace("_", "-")


def option_problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (option, what, fix) for each that must not be given, or not in this form."""
    for option in sorted(options):
        name = canonical(option).removeprefix("no-")
        meant = [known for known in (*OWNED_OPTIONS, *JUDGED_OPTIONS) if known.startswith(name)]
        value = options[option]
        if name in OWNED_OPTIONS:
            yield option, "is decided elsewhere", OWNED_OPTIONS[name]
        elif meant and name not in JUDGED_OPTIONS:
            yield option, f"is taken by the engine for {meant[0]}", f"write {meant[0]} in full"
        elif name in DEVICE_OPTIONS and value is not None and whole(value) is None:
            yield option, f"{value!r} is no whole number", "write a number such as 1"
        elif name not in _NO_FILES and (file := _file_of_nobody(structure(value))):
            message = f"{file} would not be found: no file of yours is in the engine's container"
            fix = "name one of the image (/vllm-workspace/...) or the tree (/model/...), or drop it"
            if name == "chat-template":
                fix = "set engine.chat_template: FILE, which takes a file of this machine"
            yield option, message, fix


def _file_of_nobody(value: Any) -> str | None:
    """Return the first path in a value that is neither in the image nor in a mount."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return next(filter(None, map(_file_of_nobody, value)), None)
    # `name=/path,...` as for adapters.
    words = re.split(r"[=,\s]", value) if isinstance(value, str) and "{" not in value else ()
    paths = (word for word in words if _PATH.fullmatch(word) and not _IN_CONTAINER.match(word))
    return next(paths, None)


def meaning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine will take ``options`` for: one name each, mappings for JSON text."""
    found: dict[str, Any] = {}
    for option, value in options.items():
        name = canonical(option)
        if name.startswith("no-") and value is True:
            found[name.removeprefix("no-")] = False
        else:
            found[name] = structure(value)
    return found


def structure(value: Any) -> Any:
    """Return the mapping that JSON text stands for; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def whole(value: Any) -> int | None:
    """Return a whole number that the engine would read from ``value``; ``None``: none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() else None


_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY)")
# Each is about a name as a whole.
_REFUSED = (
    (
        re.compile(
            r"LD_.*|GLIBC_TUNABLES|GCONV_PATH|GETCONF_DIR|LOCPATH|NLSPATH|MALLOC_.*|HOSTALIASES|"
            r"PYTHON.*|BASH_ENV|ENV|IFS|PATH"
        ),
        "has programs load or run other code than their own",
        "put what is needed into the image",
    ),
    (
        re.compile(r"(DOCKER|BUILDKIT|BUILDX|COMPOSE|CONTAINERD|RUNC|NVIDIA)_.*"),
        "is read by docker and its runtimes, which are root",
        "leave it out: the plan says how the engine gets the GPU",
    ),
    (
        re.compile(r"VLLM_SERVER_DEV_MODE"),
        "opens paths that change a running engine",
        "leave it out",
    ),
)
_MAX_BYTES = 32_768


def environment_problems(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, what, fix) for each variable that must not be given."""
    for name in sorted(environment):
        if _SECRET.search(name):
            message = "looks like a secret; the environment of a unit can be read by others"
            yield name, message, "use hub.token or serve.api_key with {env|file|command: ...}"
        for pattern, message, fix in _REFUSED:
            if pattern.fullmatch(name):
                yield name, message, fix
        value = environment[name]
        if any(letter in value for letter in "\n\r\0"):
            yield name, "is more than one line", "write it in one line"
        elif len(value.encode()) > _MAX_BYTES:
            yield name, f"is longer than {_MAX_BYTES} bytes", "put it into a file of the image"
