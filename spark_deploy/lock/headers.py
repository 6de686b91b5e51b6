"""Read the headers of locked repositories and compare tensor names with the catalog.

The checkpoint builder reads them in a subprocess, with the same rules and limits as on hosts.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

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
from spark_contract.documents import DocumentError, to_json, to_plain
from spark_contract.errors import parse_problem

from spark_deploy.config.catalog.architecture import Anatomy, CacheLayers
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError, SettingsError
from spark_deploy.config.settings.load import read_secret
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock.kv_cache_spec import ModelConfig, UnknownCacheSizeError, cache_layers
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
        if self.token_file:  # never in argv
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
            what = f"the header reader exited with {code}: {last_line[:200]!r}"
            raise LockError.one(arguments[-1], what, "check the free memory of this machine")
        raise (HeadersUnavailableError if code == _UNAVAILABLE else LockError)([problem])

    def read(self, kind: type[_Document], *arguments: str) -> _Document:
        try:
            return documents.parse(kind, self.run(*arguments))
        except DocumentError as error:
            what = f"the header reader's output is malformed: {error}"
            raise LockError.one(arguments[-1], what, "restore the checkout (git status)") from error


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


def read_anatomy(
    repository: str, commit: str, hub: HubSettings, *, leave_out: tuple[str, ...] = ()
) -> Anatomy:
    """Return the anatomy of a repository at a commit, from headers and config.json."""
    description = describe_repository(f"{repository}@{commit}", hub, leave_out=leave_out)
    return replace(make_anatomy(repository, description), leave_out=leave_out)


def describe_repository(
    version: str, hub: HubSettings, *, leave_out: tuple[str, ...] = (), all_documents: bool = False
) -> RepositoryDescription:
    """Return headers and documents of a repository's ``version``, as ORG/NAME@REVISION."""
    arguments = [f"{LEAVE_OUT}={pattern}" for pattern in leave_out]
    arguments += [ALL_DOCUMENTS] if all_documents else []
    with temporary_builder(hub) as builder:
        return builder.read(RepositoryDescription, DESCRIBE, *arguments, version)


def make_anatomy(repository: str, description: RepositoryDescription) -> Anatomy:
    """Return the facts about a model that plans need."""
    where = f"{repository}@{description.commit[:12]}: {CONFIG}"
    config = ModelConfig(where, description.documents.get(CONFIG, {}))
    sizes = {part: sum(by_dtype.values()) for part, by_dtype in description.parts.items()}
    if sum(sizes.values()) > _MAX_BYTES:
        what = f"the tensors in its headers add up to {sum(sizes.values())} bytes"
        raise LockError.one(where, what, "choose another commit of the repository")
    cache: tuple[CacheLayers, ...] = ()
    cache_unknown = ""
    try:
        cache = cache_layers(config)
    except UnknownCacheSizeError as error:
        cache_unknown = str(error)
    return Anatomy(
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
        cache_unknown=cache_unknown,
    )


def _architecture(config: ModelConfig) -> str:
    # Not from the language model's section, which may name a different class.
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


_TOKEN = re.compile(r"[!-~]{1,512}")


def read_hub_token(hub: HubSettings) -> str | None:
    if hub.token is None:
        return _read_login(hub.endpoint)
    token = read_secret(hub.token, setting="hub.token")
    if not _TOKEN.fullmatch(token):
        what = f"{hub.token.kind} {hub.token.value[0]} does not contain a valid token"
        raise SettingsError.one(
            "hub.token", what, "store only the token, on a single line without spaces"
        )
    return token


def _read_login(endpoint: str) -> str | None:
    # Imported late, because it takes 0.3 s.
    from huggingface_hub import constants, get_token

    # The login is valid only for the hub of the library.
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or endpoint.rstrip("/") != constants.ENDPOINT:
        return None
    token = get_token()
    return token if token and _TOKEN.fullmatch(token) else None
