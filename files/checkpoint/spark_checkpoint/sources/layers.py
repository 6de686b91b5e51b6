"""The blobs of a container image as a tree, from the registry or from peers.

Its manifests are few bytes and always come from the registry, each held against its digest; what
they name is fetched like the files of a repository.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from spark_contract import files
from spark_contract.fetching import (
    ARCHITECTURES,
    MANIFEST_TYPES,
    FetchFile,
    FetchPlan,
    LayersPlan,
    Wire,
    parse_reference,
)

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.progress import Progress
from spark_checkpoint.sources.fetch import fetch
from spark_checkpoint.sources.transport import Transport

_LIMIT_BYTES = 4 << 20


def fetch_layers(plan: LayersPlan, manifests: Path, progress: Progress) -> None:
    """Have an image's blobs in the plan's tree, and its manifests in a directory of their own.

    Both are named by their digests. Of a list of platforms that of this machine is taken.
    """
    reference = parse_reference(plan.reference)
    base = reference.base_url(plain=plan.plain)
    transport = Transport(plan, (base,), accept=", ".join(MANIFEST_TYPES))
    manifests.mkdir(parents=True, exist_ok=True)
    found = list(_manifests(transport, base, reference.version))
    for digest, body in found:
        files.write_pieces(manifests / digest, (body,))
    order = FetchPlan(
        **{one.name: getattr(plan, one.name) for one in fields(Wire)},
        digest=plan.digest,
        name=plan.reference,
        commit=reference.version.removeprefix("sha256:")[:40],
        out=plan.out,
        files=_blobs(json.loads(found[-1][1]), plan.reference),
        urls=(f"{base}/blobs",),
        peers=plan.peers,
        pieces=False,
        look_in=(),
    )
    fetch(order, progress)


def _manifests(transport: Transport, base: str, digest: str) -> Iterator[tuple[str, bytes]]:
    """Yield the manifest of a digest, after the list that leads to it where there is one."""
    body = transport.read_whole(f"{base}/manifests/{digest}", _LIMIT_BYTES)
    found = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if found != digest:
        raise GateRefused(f"{base}/manifests/{digest}", f"is {found}", "check for a proxy")
    yield digest, body
    listed = _object(body, digest).get("manifests")
    if listed is None:
        return
    machine = ARCHITECTURES.get(platform.machine(), platform.machine())
    wanted = {"os": "linux", "architecture": machine}
    for entry in listed if isinstance(listed, list) else ():
        at = entry.get("platform") or {}
        if all(at.get(name) == value for name, value in wanted.items()):
            yield from _manifests(transport, base, str(entry["digest"]))
            return
    raise GateRefused(digest, f"has no linux/{machine} image", "choose an image built for it")


def _object(body: bytes, name: str) -> Mapping[str, Any]:
    try:
        data = json.loads(body)
    except ValueError as error:
        raise GateRefused(name, f"is no JSON ({error})", "check the registry") from error
    if not isinstance(data, dict):
        raise GateRefused(name, "is no manifest", "check the registry")
    return data


def _blobs(manifest: Mapping[str, Any], name: str) -> tuple[FetchFile, ...]:
    """Return configuration and layers, each once."""
    try:
        blobs: Sequence[Mapping[str, Any]] = [manifest["config"], *manifest["layers"]]
        sizes = {str(one["digest"]): int(one["size"]) for one in blobs}
    except (KeyError, TypeError, ValueError) as error:
        raise GateRefused(name, f"its manifest lacks {error}", "check the registry") from error
    return tuple(
        FetchFile(digest, size, digest.removeprefix("sha256:")) for digest, size in sizes.items()
    )
