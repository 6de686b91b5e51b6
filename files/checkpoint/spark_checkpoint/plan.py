"""Turns PLAN.json and FETCH.json into checked, frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from spark_checkpoint import RECIPE_VERSION
from spark_checkpoint.errors import InputRefused
from spark_checkpoint.format.schema import load_schema, problems

RECEIPT_NAME = "receipt.json"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
# Some exporters repeat config.json's quantization_config in a file of its own.
QUANTIZATION_NAME = "quantization_config.json"


@dataclass(frozen=True, slots=True)
class Wire:
    """How patiently and how widely the network is used."""

    token_file: Path | None = None
    parallel: int = 4
    tries: int = 8
    backoff_s: float = 1.0
    timeout_s: float = 30.0
    rate_limit_bytes_per_s: int | None = None


# What replaces the swapped weights and is proven by a donor: its tensors, or a hybrid's own.
WITH_DONOR = ("fp8-donor", "fp8-base")


@dataclass(frozen=True, slots=True)
class DonorPlan:
    """Where FP8 tensors come from: exactly one of ``dir`` and ``url`` is set."""

    dir: Path | None
    url: str | None
    wire: Wire


@dataclass(frozen=True, slots=True)
class DonorShape:
    """What a donor's headers must say of the modules of a pattern."""

    modules: str
    weight: tuple[int, ...]
    scale: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A checked PLAN.json; ``document`` is what the receipt will quote."""

    digest: str
    name: str
    base_dir: Path
    base_revision: str | None
    donor: DonorPlan | None
    swap: tuple[str, ...]
    block_shape: tuple[int, int]
    base_tensors: tuple[str, ...]
    donor_unmatched: tuple[str, ...]
    donor_shapes: tuple[DonorShape, ...]
    mtp_tensors: tuple[str, ...]
    shared_experts: str
    head: str
    layout: str
    out: Path
    extra: Mapping[str, Any]
    document: Mapping[str, Any] = field(repr=False)

    @property
    def compares_with_donor(self) -> bool:
        """Whether a donor's FP8 weights are held against the base's, taken or not."""
        return self.shared_experts in WITH_DONOR


@dataclass(frozen=True, slots=True)
class FetchFile:
    """One file to fetch; at least one of the hashes is set."""

    path: str
    size_bytes: int
    sha256: str | None
    git_sha1: str | None
    with_pieces: bool = False


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """A checked FETCH.json."""

    digest: str
    name: str
    commit: str
    out: Path
    files: tuple[FetchFile, ...]
    urls: tuple[str, ...]
    look_in: tuple[str, ...]
    wire: Wire

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(file.size_bytes for file in self.files)


def load_build_plan(path: Path) -> BuildPlan:
    """Read and check PLAN.json; all problems are reported at once."""
    document = _load(path, "checkpoint-plan.schema.json")
    recipe = document.get("recipe_version", RECIPE_VERSION)
    if recipe != RECIPE_VERSION:
        raise InputRefused(
            str(path),
            f"made for recipe version {recipe}, this builder has {RECIPE_VERSION}",
            "install the host tools that belong to the plan, or plan again",
        )
    donor = _donor(document.get("donor"))
    scheme = document["shared_experts"]
    if scheme in WITH_DONOR and donor is None:
        raise InputRefused(
            str(path), f"shared_experts is {scheme} but there is no donor", "name a donor"
        )
    if scheme == "fp8-base" and document["layout"] == "overlay":
        raise InputRefused(
            str(path),
            "shared_experts fp8-base holds them under their plain names, which an overlay drops",
            "set layout to full",
        )
    if scheme == "int8-g128" and document["layout"] == "overlay":
        raise InputRefused(
            str(path),
            "shared_experts int8-g128 is for engines without a plugin, which cannot read overlays",
            "set layout to full",
        )
    if any(pattern.endswith(".weight") for pattern in document["swap"]):
        raise InputRefused(str(path), "swap names tensors", "name modules, without .weight")
    return BuildPlan(
        digest=document["digest"],
        name=document["name"],
        base_dir=Path(document["base"]["dir"]),
        base_revision=document["base"].get("revision"),
        donor=donor,
        swap=tuple(document["swap"]),
        block_shape=(document["block_shape"][0], document["block_shape"][1]),
        base_tensors=tuple(document["base_tensors"]),
        donor_unmatched=tuple(document["donor_unmatched"]),
        donor_shapes=tuple(
            DonorShape(part["modules"], tuple(part["weight"]), tuple(part["scale"]))
            for part in document.get("donor_shapes", ())
        ),
        mtp_tensors=tuple(document["mtp_tensors"]),
        shared_experts=scheme,
        head=document["head"],
        layout=document["layout"],
        out=_out_dir(document["out"], path),
        extra=document.get("extra", {}),
        document=document,
    )


def load_fetch_plan(path: Path) -> FetchPlan:
    """Read and check FETCH.json; all problems are reported at once."""
    document = _load(path, "fetch.schema.json")
    files = tuple(
        FetchFile(
            item["path"],
            item["size_bytes"],
            item.get("sha256"),
            item.get("git_sha1"),
            with_pieces=document.get("pieces", False),
        )
        for item in document["files"]
    )
    _check_paths([file.path for file in files], path)
    look_in = tuple(document.get("look_in", ()))
    if not document["urls"] and not look_in:
        raise InputRefused(str(path), "names no source", "give urls, look_in or both")
    return FetchPlan(
        digest=document["digest"],
        name=document["name"],
        commit=document["commit"],
        out=_out_dir(document["out"], path),
        files=files,
        urls=tuple(document["urls"]),
        look_in=look_in,
        wire=_wire(document),
    )


def _load(path: Path, schema_name: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputRefused(str(path), f"cannot be read ({error.strerror})", "check it") from error
    except (ValueError, RecursionError) as error:
        raise InputRefused(str(path), f"is not JSON ({error})", "write it again") from error
    found = problems(document, load_schema(schema_name))
    if found:
        raise InputRefused(str(path), "; ".join(found), f"follow schema/{schema_name}")
    checked: dict[str, Any] = document
    return checked


def _donor(document: Mapping[str, Any] | None) -> DonorPlan | None:
    if document is None:
        return None
    directory = document.get("dir")
    return DonorPlan(Path(directory) if directory else None, document.get("url"), _wire(document))


def _wire(document: Mapping[str, Any]) -> Wire:
    default = Wire()
    token_file = document.get("token_file")
    return Wire(
        token_file=Path(token_file) if token_file else None,
        parallel=document.get("parallel", default.parallel),
        tries=document.get("tries", default.tries),
        backoff_s=document.get("backoff_s", default.backoff_s),
        timeout_s=document.get("timeout_s", default.timeout_s),
        rate_limit_bytes_per_s=document.get("rate_limit_bytes_per_s"),
    )


def _out_dir(text: str, path: Path) -> Path:
    out = PurePosixPath(text)
    if ".." in out.parts or out.name.startswith("."):
        raise InputRefused(str(path), f"out {text!r} is not a plain path", "name it plainly")
    return Path(out)


def _check_paths(paths: list[str], where: Path) -> None:
    seen: set[str] = set()
    for text in paths:
        relative = PurePosixPath(text)
        parts = relative.parts
        if relative.is_absolute() or ".." in parts or str(relative) != text or "\0" in text:
            raise InputRefused(str(where), f"path {text!r} leaves the tree", "make it relative")
        if text in seen or text == RECEIPT_NAME or text.endswith(".part"):
            raise InputRefused(str(where), f"path {text!r} is taken", "name each file once")
        seen.add(text)
