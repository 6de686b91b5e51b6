"""An engine reads the bytes that the receipts of its trees vouch for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spark_contract import receipts
from spark_contract.errors import HostToolError, problem_in
from spark_contract.orders import BUILDER, VERIFY
from spark_contract.release import Release, Tree
from spark_contract.tool import PHASE

from spark_host.system.programs import Report


def problem(release: Release) -> HostToolError | None:
    """Return why a tree is not the release's, by its receipt, or not root's alone to write."""
    return next(filter(None, map(_problem, release.trees)), None)


def _problem(tree: Tree) -> HostToolError | None:
    where, path = f"tree {tree.path}", Path(tree.path)
    receipt = receipts.found(path)
    found = None if receipt is None else receipt.digest
    if found != tree.digest:
        what = f"receipt digest is {found!r}, the release wants {tree.digest!r}"
        return HostToolError(where, what, "run the deploy again")
    exposed = receipts.exposed(path)
    if exposed is not None:
        fix = "run the deploy again: it makes the tree anew from files that are root's"
        return HostToolError(where, exposed, fix)
    return None


def prove(release: Release, report: Report) -> None:
    """Have what somebody touched since it was last hashed hashed again, by the tree's builder.

    Files that turn out right are touched no more: the builder writes their stat into the receipt.

    Raises:
        HostToolError: A file is gone, or its bytes are others.
    """
    for tree in release.trees:
        _prove(Path(tree.path), report)


def _prove(path: Path, report: Report) -> None:
    receipt = receipts.found(path)
    touched = () if receipt is None else receipt.touched(path)
    if receipt is None or not touched:
        return
    report(
        f"{PHASE}verify {len(touched)} of {len(receipt.files)} files of {path} are not known to be "
        f"what was hashed, {touched[0]} among them: they are hashed again"
    )
    # Its output goes to the journal as it comes: hashing all of a large tree takes minutes.
    done = subprocess.run(
        [sys.executable, "-m", BUILDER, VERIFY, str(path)],
        stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return
    said = problem_in(done.stderr.strip().splitlines()[-1]) if done.stderr.strip() else None
    if said is None:
        what = f"cannot be verified: {done.stderr.strip()[-200:] or f'exit {done.returncode}'}"
        raise HostToolError(f"tree {path}", what, "run the deploy again")
    raise HostToolError(said.where, said.what, said.fix)
