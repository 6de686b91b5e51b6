"""Read headers and config.json of locked repositories: tensor names, sizes and KV cache.

The checkpoint builder reads them in a subprocess, with the same rules and limits as on hosts.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from spark_contract import builder_api, documents
from spark_contract.builder_api import (
    ALL_DOCUMENTS,
    CONFIG,
    DESCRIBE,
    LEAVE_OUT,
    BuildPlan,
    DonorUrl,
    RepositoryDescription,
    SourceCounts,
)
from spark_contract.documents import DocumentError, shorten, to_json, to_plain
from spark_contract.tool import parse_problem

from spark_deploy.config.catalog.architecture import CacheLayers, RepoMetadata
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock.resolve import read_hub_token
from spark_deploy.lock.types import VerifiedNames

_Document = TypeVar("_Document")
_UNAVAILABLE = 4  # exit code of the builder for network and disk failures


class HeadersUnavailableError(LockError):
    """The hub did not send the headers."""


def check_sources(names: VerifiedNames, build: BuildPlan, hub: HubSettings) -> VerifiedNames:
    """Check the headers of a build's sources; return ``names`` with tensor counts.

    Raises LockError if a host would reject these sources.
    """
    with temporary_builder(hub) as builder:
        if isinstance(build.donor, DonorUrl):
            build = replace(
                build, donor=DonorUrl(url=build.donor.url, token_file=builder.token_file, tries=3)
            )
        (builder.folder / "plan.json").write_text(to_json(build), encoding="utf-8")
        counts = builder.read(SourceCounts, builder_api.CHECK_SOURCES, "plan.json", names.base)
    return replace(names, **to_plain(counts))


@dataclass(frozen=True, slots=True)
class Builder:
    folder: Path
    endpoint: str
    token_file: str | None

    def run(self, *arguments: str) -> str:
        """Return the output of a command; the last argument must be the repository."""
        options = [builder_api.ENDPOINT, self.endpoint]
        if self.token_file:  # the token itself must not be in argv
            options += [builder_api.TOKEN_FILE, self.token_file]
        packages = (str(CHECKOUT / "files" / name) for name in ("contract", "checkpoint"))
        # Run in an empty directory, because Python imports modules from the current one.
        result = subprocess.run(
            [sys.executable, "-m", builder_api.BUILDER, *arguments, *options],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        code = result.returncode
        if code == 0:
            return result.stdout
        last_line = (result.stderr.strip().splitlines() or [""])[-1]
        problem = parse_problem(last_line)
        if problem is None:
            message = f"the header reader exited with {code}: {last_line[:200]!r}"
            raise LockError.single(arguments[-1], message, "check the free memory of this machine")
        raise (HeadersUnavailableError if code == _UNAVAILABLE else LockError)([problem])

    def read(self, kind: type[_Document], *arguments: str) -> _Document:
        try:
            return documents.parse(kind, self.run(*arguments))
        except DocumentError as error:
            message = f"the header reader's output is malformed: {error}"
            raise LockError.single(
                arguments[-1], message, "restore the checkout (git status)"
            ) from error


@contextmanager
def temporary_builder(hub: HubSettings) -> Iterator[Builder]:
    """Yield a builder with a temporary directory and token file."""
    with tempfile.TemporaryDirectory(prefix="spark-names-") as folder:
        token_file = None
        token = read_hub_token(hub)
        if token is not None:
            token_file = f"{folder}/token"
            descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(token)
        yield Builder(Path(folder), hub.endpoint, token_file)


_MAX_BYTES = 1 << 50


def read_metadata(
    repository: str, commit: str, hub: HubSettings, *, leave_out: tuple[str, ...] = ()
) -> RepoMetadata:
    """Describe a repository at a commit, from its headers and config.json."""
    description = describe_repository(f"{repository}@{commit}", hub, leave_out=leave_out)
    return replace(make_metadata(repository, description), leave_out=leave_out)


def describe_repository(
    version: str, hub: HubSettings, *, leave_out: tuple[str, ...] = (), all_documents: bool = False
) -> RepositoryDescription:
    """Return headers and documents of ``version``, given as ORG/NAME@REVISION."""
    arguments = [f"{LEAVE_OUT}={pattern}" for pattern in leave_out]
    arguments += [ALL_DOCUMENTS] if all_documents else []
    with temporary_builder(hub) as builder:
        return builder.read(RepositoryDescription, DESCRIBE, *arguments, version)


# --- size of KV cache and recurrent state per layer; unknown layer types or fields make it unknown

_COUNT_LIMIT = 1 << 32
# Sections of the language model in multimodal configurations.
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")


class UnknownCacheSizeError(Exception):
    """The cache size cannot be computed from the configuration."""


class ModelConfig:
    """Values of config.json; the section of the language model takes precedence."""

    def __init__(self, where: str, config: Mapping[str, Any]) -> None:
        self.where = where
        sections = [config[key] for key in _TEXT_SECTIONS if isinstance(config.get(key), dict)]
        self._levels = (*sections[:1], config)  # most specific first

    def get(self, name: str) -> Any:
        """Return the first value that is not null."""
        return next((level[name] for level in self._levels if level.get(name) is not None), None)

    def top_level(self, name: str) -> Any:
        return self._levels[-1].get(name)

    def first_count(self, *names: str) -> int | None:
        """Return the value of the first of these fields that is set."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value < _COUNT_LIMIT:
                allowed = f"a number from 0 to {_COUNT_LIMIT - 1}"
                message = f"{name} is {shorten(value)}, but must be {allowed}"
                fix = "choose another commit of the repository"
                raise LockError.single(self.where, message, fix)
            return value
        return None

    def require(self, *names: str) -> int:
        """Return a count above zero, or raise UnknownCacheSizeError."""
        value = self.first_count(*names)
        if not value:
            raise UnknownCacheSizeError(f"config.json lacks {names[0]}")
        return value

    def text(self, name: str) -> str:
        """Return the value if it is a short printable string, otherwise an empty string."""
        value = self.get(name)
        is_valid = isinstance(value, str) and len(value) <= 100 and value.isprintable()
        return str(value) if is_valid else ""

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        return tuple(map(str, value)) if isinstance(value, list) and len(value) < 4096 else ()


_SIXTEEN_BIT_BYTES = 2
_MAX_LAYERS = 1024
# All layers are full attention unless `layer_types` differs.
_ALL_FULL = frozenset((
    "apertus", "arcee", "cohere", "ernie4_5", "ernie4_5_moe", "exaone", "gemma", "glm", "glm4",
    "glm4_moe", "granite", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2",
    "internlm3", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "nemotron", "olmo",
    "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_5_vl_text", "qwen2_moe",
    "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "seed_oss",
    "smollm3", "solar", "stablelm", "starcoder2",
))  # fmt: skip
_ENCODERS = frozenset((
    "bert", "deberta-v2", "distilbert", "electra", "gte", "jina_bert", "modernbert", "mpnet",
    "new", "nomic_bert", "roberta", "snowflake_arctic_embed", "xlm-roberta",
))  # fmt: skip
# Fields that affect the cache size in ways that are not computed here.
_UNSUPPORTED = (
    "attention_k_eq_v", "compress_ratios", "cross_attention_layers", "index_head_dim",
    "indexer_n_heads", "index_topk", "num_kv_shared_layers", "num_global_key_value_heads",
    "global_head_dim", "per_layer_config", "block_configs",
)  # fmt: skip


def cache_layers(config: ModelConfig) -> tuple[CacheLayers, ...]:
    """Return the cache size per layer type, or raise UnknownCacheSizeError."""
    model_type = config.text("model_type")
    if model_type in _ENCODERS:
        return ()
    for name in _UNSUPPORTED:
        if config.get(name):
            raise UnknownCacheSizeError(
                f"the effect of {name} in config.json on the cache size is unknown"
            )
    layer_types = Counter(_list_layer_types(config, model_type))
    return tuple(_CACHES[name](config, layers) for name, layers in sorted(layer_types.items()))


def _list_layer_types(config: ModelConfig, model_type: str) -> list[str]:
    """Return the type of each layer. Models store it in different fields."""
    layers = config.require("num_hidden_layers", "n_layer", "num_layers")
    if layers > _MAX_LAYERS:
        raise UnknownCacheSizeError(f"config.json has {layers} layers")
    if config.get("kv_lora_rank") is not None:
        return ["latent"] * layers
    if layer_types := config.strings("layer_types"):
        return _check_layer_types(layer_types, layers)
    if config.first_count("full_attention_interval") and config.get("linear_num_key_heads"):
        full = layers // config.require("full_attention_interval")
        return ["full_attention"] * full + ["linear_attention"] * (layers - full)
    if pattern := config.text("hybrid_override_pattern"):
        return _parse_pattern(pattern, layers)
    if model_type not in _ALL_FULL:
        model = model_type or "a model without model_type"
        raise UnknownCacheSizeError(f"the layer types of {model} are unknown")
    if config.first_count("sliding_window") is None or config.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    return ["sliding_attention"] * layers


def _check_layer_types(layer_types: tuple[str, ...], layers: int) -> list[str]:
    if len(layer_types) != layers:
        raise UnknownCacheSizeError(
            f"layer_types lists {len(layer_types)} layers, but the model has {layers}"
        )
    for name in layer_types:
        if name not in _CACHES:
            raise UnknownCacheSizeError(f"unknown layer type {name[:40]!r}")
    return list(layer_types)


def _parse_pattern(pattern: str, layers: int) -> list[str]:
    """Parse a Nemotron-H pattern: M is Mamba-2, * is attention, - and E have no cache."""
    if len(pattern) != layers or set(pattern) - set("M*-E"):
        raise UnknownCacheSizeError("hybrid_override_pattern has an unknown format")
    return [{"M": "mamba", "*": "full_attention"}[char] for char in pattern if char in "M*"]


def _kv_bytes_per_token(config: ModelConfig) -> int:
    heads = config.require("num_attention_heads", "n_head")
    head_dim = config.first_count("head_dim") or config.require("hidden_size", "n_embd") // heads
    kv_heads = config.first_count("num_key_value_heads") or heads
    return 2 * kv_heads * head_dim * _SIXTEEN_BIT_BYTES  # keys and values


def _full(config: ModelConfig, layers: int) -> CacheLayers:
    return CacheLayers(kind="full", layers=layers, token_bytes=_kv_bytes_per_token(config))


def _sliding(config: ModelConfig, layers: int) -> CacheLayers:
    window = config.require("sliding_window")
    return CacheLayers(
        kind="sliding", layers=layers, token_bytes=_kv_bytes_per_token(config), window_tokens=window
    )


def _latent(config: ModelConfig, layers: int) -> CacheLayers:
    width = config.require("kv_lora_rank") + config.require("qk_rope_head_dim")
    return CacheLayers(kind="latent", layers=layers, token_bytes=width * _SIXTEEN_BIT_BYTES)


def _delta_net(config: ModelConfig, layers: int) -> CacheLayers:
    key_dim = config.require("linear_key_head_dim")
    keys_width = config.require("linear_num_key_heads") * key_dim
    value_dim = config.require("linear_value_head_dim")
    values_width = config.require("linear_num_value_heads") * value_dim
    kernel = config.require("linear_conv_kernel_dim")
    conv_row_bytes = (2 * keys_width + values_width) * _SIXTEEN_BIT_BYTES
    state_bytes = _state_bytes(config.text("mamba_ssm_dtype"))
    return _state(layers, values_width * key_dim * state_bytes, kernel, conv_row_bytes)


def _mamba(config: ModelConfig, layers: int) -> CacheLayers:
    heads = config.require("mamba_num_heads", "mamba_n_heads", "num_heads")
    width = heads * config.require("mamba_head_dim", "mamba_d_head", "head_dim")
    state = config.require("ssm_state_size", "mamba_d_state", "state_size")
    groups = config.require("n_groups", "mamba_n_groups")
    kernel = config.require("conv_kernel", "mamba_d_conv")
    default = "float32" if config.text("model_type").startswith("nemotron_h") else ""
    state_bytes = _state_bytes(config.text("mamba_ssm_cache_dtype") or default)
    conv_row_bytes = (width + 2 * groups * state) * _SIXTEEN_BIT_BYTES
    return _state(layers, width * state * state_bytes, kernel, conv_row_bytes)


def _state_bytes(dtype: str) -> int:
    """Return the bytes of a recurrent state's number; the default is the activations' format."""
    return 4 if dtype == "float32" else _SIXTEEN_BIT_BYTES


def _state(layers: int, recurrence_bytes: int, kernel: int, conv_row_bytes: int) -> CacheLayers:
    """Return layers with a recurrent state and the inputs of a convolution."""
    return CacheLayers(
        kind="state",
        layers=layers,
        state_bytes=recurrence_bytes + (kernel - 1) * conv_row_bytes,
        draft_state_bytes=conv_row_bytes,
    )


# By the values of `layer_types`.
_CACHES: dict[str, Callable[[ModelConfig, int], CacheLayers]] = {
    "full_attention": _full,
    "attention": _full,
    "sliding_attention": _sliding,
    "latent": _latent,
    "linear_attention": _delta_net,
    "mamba": _mamba,
}


# --- facts about a model that plans need


def make_metadata(repository: str, description: RepositoryDescription) -> RepoMetadata:
    where = f"{repository}@{description.commit[:12]}: {CONFIG}"
    config = ModelConfig(where, description.documents.get(CONFIG, {}))
    sizes = {part: sum(by_dtype.values()) for part, by_dtype in description.parts.items()}
    if sum(sizes.values()) > _MAX_BYTES:
        message = f"the tensors in the headers would take {sum(sizes.values())} bytes"
        raise LockError.single(where, message, "choose another commit of the repository")
    cache: tuple[CacheLayers, ...] = ()
    unknown_reason = ""
    try:
        cache = cache_layers(config)
    except UnknownCacheSizeError as error:
        unknown_reason = str(error)
    return RepoMetadata(
        repository=repository,
        commit=description.commit,
        architecture=_architecture(config),
        model_type=config.text("model_type"),
        quantization=describe_quantization(config),
        weights=description.parts.get("text", {}),
        repeats_names=description.repeats_names,
        vision_bytes=sizes.get("vision", 0),
        drafter_bytes=sizes.get("drafter", 0),
        context_tokens=config.first_count("max_position_embeddings", "n_positions", "max_seq_len")
        or None,
        width=config.first_count("hidden_size", "n_embd", "d_model") or None,
        expert_width=config.first_count("moe_intermediate_size") or None,
        cache=cache,
        cache_unknown=unknown_reason,
    )


def _architecture(config: ModelConfig) -> str:
    # The section of the language model may name a different class.
    names = config.top_level("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    is_valid = isinstance(first, str) and len(first) <= 100 and first.isidentifier()
    return first if is_valid else ""


def describe_quantization(config: ModelConfig) -> str:
    """Describe the quantization of the weights; return an empty string if there is none."""
    section = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(section, dict):
        return ""
    fields = ModelConfig(config.where, section)
    parts = [fields.text(key) for key in ("quant_method", "quant_algo", "format", "fmt")]
    bits = section.get("bits")
    if type(bits) is int and 0 < bits < 64:
        parts.append(f"{bits} bit")
    return ", ".join(dict.fromkeys(part for part in parts if part))
