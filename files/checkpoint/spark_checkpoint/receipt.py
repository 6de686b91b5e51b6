"""Receipts of this builder: read before a tree is trusted, written last into a new one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spark_contract import documents
from spark_contract.files import now
from spark_contract.orders import RECEIPT_NAME, RECIPE_VERSION, BuildPlan, FetchPlan
from spark_contract.receipts import CheckpointReceipt, Receipt, ReceiptFile, SourceReceipt, parse

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.errors import TransferFailed, TreeDiffers
from spark_checkpoint.format.pieces import pieces_of
from spark_checkpoint.storage import write_json


def load_receipt(directory: Path) -> SourceReceipt | CheckpointReceipt | None:
    """Return the receipt of a tree, None when there is none.

    Raises:
        TreeDiffers: the receipt is there but cannot be one of ours.
    """
    path = directory / RECEIPT_NAME
    try:
        receipt = parse(path.read_bytes())
        for file in receipt.files:
            pieces_of(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransferFailed(
            str(path), f"cannot be read ({error.strerror})", "see dmesg"
        ) from error
    except ValueError as error:
        fix = "move the directory away and run the deploy again"
        raise TreeDiffers(str(path), f"is no receipt ({error})", fix) from error
    return receipt


def source_receipt(plan: FetchPlan, files: Sequence[ReceiptFile]) -> SourceReceipt:
    """Return the receipt of a fetched tree."""
    return SourceReceipt(
        kind="source",
        digest=plan.digest,
        files=tuple(files),
        tool_version=TOOL_VERSION,
        written_at=now(),
        name=plan.name,
        commit=plan.commit,
    )


def checkpoint_receipt(
    plan: BuildPlan, files: Sequence[ReceiptFile], tensors: int, report: dict[str, Any]
) -> CheckpointReceipt:
    """Return the receipt of a built tree of so many ``tensors``."""
    return CheckpointReceipt(
        kind="checkpoint",
        digest=plan.digest,
        files=tuple(files),
        tool_version=TOOL_VERSION,
        written_at=now(),
        recipe_version=RECIPE_VERSION,
        plan=plan,
        tensors=tensors,
        report=report,
    )


def write_receipt(directory: Path, receipt: Receipt) -> None:
    """Write the receipt in one step; call it last."""
    write_json(directory / RECEIPT_NAME, documents.plain(receipt))
