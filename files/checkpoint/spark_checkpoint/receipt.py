"""Receipts: written last, the only proof that a tree is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from spark_checkpoint import RECIPE_VERSION, TOOL_VERSION
from spark_checkpoint.errors import TransferFailed, TreeDiffers
from spark_checkpoint.pieces import Piece, parse_pieces
from spark_checkpoint.plan import RECEIPT_NAME, BuildPlan, FetchPlan
from spark_checkpoint.storage import write_json

_FIX = "move the directory away and run the deploy again"


@dataclass(frozen=True, slots=True)
class ReceiptFile:
    """One file a receipt vouches for."""

    path: str
    size_bytes: int
    sha256: str | None
    modified_ns: int | None
    pieces: tuple[Piece, ...] | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a finished tree holds."""

    kind: str
    digest: str
    files: tuple[ReceiptFile, ...]
    document: Mapping[str, Any]


def load_receipt(directory: Path) -> Receipt | None:
    """Return the receipt of a tree, None when there is none.

    Raises:
        TreeDiffers: the receipt is there but cannot be one of ours.
    """
    path = directory / RECEIPT_NAME
    try:
        document = json.loads(path.read_bytes())
        files = tuple(
            ReceiptFile(
                str(item["path"]),
                int(item["size_bytes"]),
                item.get("sha256"),
                item.get("modified_ns"),
                parse_pieces(item["pieces"], item["size_bytes"]) if "pieces" in item else None,
            )
            for item in document["files"]
        )
        version, kind = document["schema_version"], document["kind"]
        digest = str(document["digest"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransferFailed(
            str(path), f"cannot be read ({error.strerror})", "see dmesg"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TreeDiffers(str(path), f"is no receipt ({error!r})", _FIX) from error
    if version != 1 or kind not in ("source", "checkpoint"):
        raise TreeDiffers(str(path), f"is a receipt of version {version}, kind {kind!r}", _FIX)
    if any(".." in PurePosixPath(f.path).parts or f.path.startswith("/") for f in files):
        raise TreeDiffers(str(path), "names files outside the tree", _FIX)
    return Receipt(kind, digest, files, document)


def source_receipt(plan: FetchPlan, files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the receipt of a fetched tree."""
    return {
        "schema_version": 1,
        "kind": "source",
        "digest": plan.digest,
        "name": plan.name,
        "commit": plan.commit,
        "files": list(files),
        "tool_version": TOOL_VERSION,
        "written_at": _now(),
    }


def checkpoint_receipt(
    plan: BuildPlan,
    files: Sequence[Mapping[str, Any]],
    tensor_count: int,
    report: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the receipt of a built tree."""
    return {
        "schema_version": 1,
        "kind": "checkpoint",
        "digest": plan.digest,
        "recipe_version": RECIPE_VERSION,
        "plan": dict(plan.document),
        "files": list(files),
        "tensors": tensor_count,
        "report": dict(report),
        "tool_version": TOOL_VERSION,
        "written_at": _now(),
    }


def write_receipt(directory: Path, document: Mapping[str, Any]) -> None:
    """Write the receipt in one step; call it last."""
    growing = directory / f".{RECEIPT_NAME}.part"
    write_json(growing, document)
    growing.rename(directory / RECEIPT_NAME)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
