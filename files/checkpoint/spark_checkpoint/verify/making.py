"""Has a tree in its place: found there, or written aside, verified and renamed once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from spark_contract.fetching import FetchPlan
from spark_contract.orders import BuildPlan, RequantizePlan
from spark_contract.sharing import growing_dir, growing_tree

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import load_receipt
from spark_checkpoint.storage import clear, publish, sole_use
from spark_checkpoint.verify.verify import verify_tree


def make_tree(
    plan: FetchPlan | BuildPlan | RequantizePlan,
    what: str,
    progress: Progress,
    write: Callable[[Path, Path], None],
) -> bool:
    """Have the tree of a plan where it says; return False when it was already there.

    Args:
        plan: Says where, and which digest the receipt must name.
        what: The tree in words, for people.
        progress: Told about every phase.
        write: Given a work directory and a tree to make in it, writes that tree with its receipt.
            What else it leaves in the work directory is there again when it is interrupted.
    """
    work = growing_dir(plan.out_dir)
    if _is_there(plan, what, progress):
        shutil.rmtree(work, ignore_errors=True)
        return False
    with sole_use(work):
        # Another process may have finished just before this one had the lock.
        if _is_there(plan, what, progress):
            return False
        tree_dir = growing_tree(plan.out_dir)
        write(work, tree_dir)
        verify_tree(tree_dir, progress, full=False)
        publish(tree_dir, plan.out_dir)
        clear(work)
        work.rmdir()
    return True


def _is_there(plan: FetchPlan | BuildPlan | RequantizePlan, what: str, progress: Progress) -> bool:
    if not plan.out_dir.exists():
        return False
    receipt = load_receipt(plan.out_dir)
    if receipt is None or receipt.digest != plan.digest:
        found = "has no receipt" if receipt is None else f"holds digest {receipt.digest[:12]}"
        raise GateRefused(
            str(plan.out_dir), f"{found}, so it is not ours to replace", "move it away, run again"
        )
    verify_tree(plan.out_dir, progress, full=False)
    note(f"{plan.out_dir}: already holds {what}")
    return True
