"""Read headers of locked repositories and compare their names with the catalog.

The checkpoint builder reads them in a subprocess, with the rules of hosts and with limits on memory
and output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from spark_contract import documents, orders
from spark_contract.documents import DocumentError, to_json
from spark_contract.errors import parse_problem
from spark_contract.orders import (
    ALL_DOCUMENTS,
    CONFIG,
    DESCRIBE,
    LEAVE_OUT,
    BuildPlan,
    DonorUrl,
    RepositoryDescription,
    SourceCounts,
)

from spark_deploy.config.catalog.anatomy import Anatomy, CacheLayers
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError, SettingsError
from spark_deploy.config.settings.load import read_secret
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock.kv_cache_spec import ModelConfig, UnknownCacheSize, cache_layers
from spark_deploy.lock.types import VerifiedNames

_UNAVAILABLE = 4  # the builder's exit code for failures of network or disk


class HeadersUnavailableError(LockError):
    """The hub did not send the headers."""


def check_sources(names: VerifiedNames, order: BuildPlan, hub: HubSettings) -> VerifiedNames:
    """Check the sources of a build by reading their headers; return ``names`` with counts.

    Raises:
        HeadersUnavailableError: the hub did not send the headers.
        LockError: a host would refuse to build from these sources.
    """
    with temporary_builder(hub) as builder:
        if isinstance(order.donor, DonorUrl):
            order = replace(
                order, donor=DonorUrl(url=order.donor.url, token_file=builder.token_file, tries=3)
            )
        (builder.folder / "plan.json").write_text(to_json(order), encoding="utf-8")
        output = builder.run(orders.CHECK_SOURCES, "plan.json", names.base)
    try:
        result = documents.parse(SourceCounts, output)
    except DocumentError as error:
        what = f"the builder's output is malformed: {error}"
        raise LockError.one(names.base, what, "restore the checkout (git status)") from error
    return replace(
        names,
        base_tensors=result.base_tensors,
        donor_tensors=result.donor_tensors,
        swapped_modules=result.swapped_modules,
        mtp_tensors=result.mtp_tensors,
        mtp_from_donor=result.mtp_from_donor,
    )


@dataclass(frozen=True, slots=True)
class Builder:
    """The checkpoint builder of this checkout, with hub and token file."""

    folder: Path
    endpoint: str
    token_file: str | None

    def run(self, *words: str) -> str:
        """Return the output of a command; the token is passed in a file, never in argv."""
        options = [orders.ENDPOINT, self.endpoint]
        options += [orders.TOKEN_FILE, self.token_file] if self.token_file else []
        homes = (str(CHECKOUT / "files" / home) for home in ("contract", "checkpoint"))
        # In an empty folder, so that no file of the current directory is imported.
        done = subprocess.run(
            [sys.executable, "-m", orders.BUILDER, *words, *options],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(homes)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return done.stdout
        last_line = (done.stderr.strip().splitlines() or [""])[-1]
        problem = parse_problem(last_line)
        if problem is None:
            what = f"the header reader exited with {done.returncode}: {last_line[:200]!r}"
            raise LockError.one(words[-1], what, "check the free memory of this machine")
        raise (HeadersUnavailableError if done.returncode == _UNAVAILABLE else LockError)([problem])


@contextmanager
def temporary_builder(hub: HubSettings) -> Iterator[Builder]:
    """Yield the builder in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="spark-names-") as folder:
        token_file, token = None, read_hub_token(hub)
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
    """Read headers and config.json of a repository at a commit.

    Raises:
        HeadersUnavailableError: the hub did not send them.
        LockError: the repository is not a model.
    """
    described = describe_repository(f"{repository}@{commit}", hub, leave_out=leave_out)
    return replace(parse_anatomy(repository, described), leave_out=leave_out)


def describe_repository(
    place: str, hub: HubSettings, *, leave_out: tuple[str, ...] = (), all_documents: bool = False
) -> RepositoryDescription:
    """Return headers and documents of a repository, read by the builder."""
    words = [f"{LEAVE_OUT}={pattern}" for pattern in leave_out]
    words += [ALL_DOCUMENTS] if all_documents else []
    with temporary_builder(hub) as builder:
        output = builder.run(DESCRIBE, *words, place)
    try:
        return documents.parse(RepositoryDescription, output)
    except DocumentError as error:
        what = f"the reader's output is malformed: {error}"
        raise LockError.one(place, what, "restore the checkout (git status)") from error


def parse_anatomy(repository: str, described: RepositoryDescription) -> Anatomy:
    """Return the numbers that plans need from headers and config.json."""
    where = f"{repository}@{described.commit[:12]}: {CONFIG}"
    config = ModelConfig(where, described.documents.get(CONFIG, {}))
    sizes = {part: sum(by_dtype.values()) for part, by_dtype in described.parts.items()}
    if sum(sizes.values()) > _MAX_BYTES:
        what = f"its headers add up to {sum(sizes.values())} bytes"
        raise LockError.one(where, what, "choose another commit of the repository")
    cache: tuple[CacheLayers, ...] = ()
    unknown = ""
    try:
        cache = cache_layers(config)
    except UnknownCacheSize as missing:
        unknown = str(missing)
    return Anatomy(
        repository=repository,
        commit=described.commit,
        architecture=_architecture(config),
        model_type=config.text("model_type"),
        quantisation=describe_quantisation(config),
        weights=described.parts.get("text", {}),
        repeats_names=described.repeats_names,
        vision_bytes=sizes.get("vision", 0),
        drafter_bytes=sizes.get("drafter", 0),
        context_tokens=config.count("max_position_embeddings", "n_positions", "max_seq_len")
        or None,
        width=config.count("hidden_size", "n_embd", "d_model") or None,
        expert_width=config.count("moe_intermediate_size") or None,
        cache=cache,
        cache_unknown=unknown,
    )


def _architecture(config: ModelConfig) -> str:
    # Of the top level: a section may name another class.
    names = config.outer("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    is_valid = isinstance(first, str) and len(first) <= 100 and first.isidentifier()
    return first if is_valid else ""


def describe_quantisation(config: ModelConfig) -> str:
    """Return the quantisation of weights as text, or an empty string."""
    section = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(section, dict):
        return ""
    fields = ModelConfig(config.where, section)
    names = (fields.text(key) for key in ("quant_method", "quant_algo", "format", "fmt"))
    bits = section.get("bits")
    width = f"{bits} bit" if type(bits) is int and 0 < bits < 64 else ""
    return ", ".join(dict.fromkeys(word for word in (*names, width) if word))


_TOKEN = re.compile(r"[!-~]{1,512}")


def read_hub_token(hub: HubSettings) -> str | None:
    if hub.token is None:
        return _read_login(hub.endpoint)
    token = read_secret(hub.token, setting="hub.token")
    if not _TOKEN.fullmatch(token):
        what = f"the value of {hub.token.kind} {hub.token.value[0]} is not a token"
        raise SettingsError.one(
            "hub.token", what, "store only the token, on a single line without spaces"
        )
    return token


def _read_login(endpoint: str) -> str | None:
    # Importing the library takes 0.3 s, and most runs do not need it.
    from huggingface_hub import constants, get_token

    # Only to the hub that the library itself would send it to.
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or endpoint.rstrip("/") != constants.ENDPOINT:
        return None
    token = get_token()
    return token if token and _TOKEN.fullmatch(token) else None
