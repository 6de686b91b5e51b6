"""The image and checkpoints of a release, verified before each start."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from spark_contract import receipts
from spark_contract.errors import HostToolError, problem_in
from spark_contract.orders import BUILDER, VERIFY
from spark_contract.release import Release, Tree
from spark_contract.tool import PHASE
from spark_contract.units import DIGEST_LABEL

from spark_host.engine import metrics
from spark_host.system import docker
from spark_host.system.programs import Report

_FIX = "run the deploy again"


def check(release: Release) -> None:
    """Check image, receipts and file permissions, without hashing.

    Raises:
        HostToolError: Something is missing or differs from the release.
    """
    metrics.dialect_of(release)
    _check_image(release)
    check_checkpoints(release)


def check_checkpoints(release: Release) -> None:
    """Check receipts, ownership and permissions of the checkpoints.

    Raises:
        HostToolError: A checkpoint differs from the release, or is writable by a non-root user.
    """
    for tree in release.trees:
        _check_receipt(tree)
    for tree in release.trees:
        _check_readable(Path(tree.path), release.engine.user)


def _check_image(release: Release) -> None:
    image = release.image
    if docker.image(image.tag) is None:
        raise HostToolError(f"image {image.tag}", "not on this host", _FIX)
    if image.digest_label is None:
        return
    label = docker.image_label(image.tag)
    if label != image.digest_label:
        message = f"label {DIGEST_LABEL} is {label!r}, the release wants {image.digest_label!r}"
        raise HostToolError(f"image {image.tag}", message, _FIX)


def _check_receipt(tree: Tree) -> None:
    where, path = f"checkpoint {tree.path}", Path(tree.path)
    receipt = receipts.found(path)
    digest = receipt.digest if receipt else None
    if digest != tree.digest:
        message = f"receipt digest is {digest!r}, the release wants {tree.digest!r}"
        raise HostToolError(where, message, _FIX)
    exposed = receipts.exposed(path)
    if exposed is not None:
        raise HostToolError(where, exposed, f"{_FIX}: it rebuilds it from files that root owns")


def _check_readable(root: Path, user: str) -> None:
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            needed = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
            if path.stat().st_mode & needed != needed:
                raise HostToolError(
                    str(path),
                    f"cannot be read by {user}, the account of the engine",
                    f"chmod o+rX {path}, then deploy again",
                )


def verify_checkpoints(release: Release, report: Report) -> None:
    """Have the builder hash files that changed (by stat) since they were last hashed.

    The builder writes the new stat of intact files into the receipt.

    Raises:
        HostToolError: A file is missing or has other bytes.
    """
    for tree in release.trees:
        _verify(Path(tree.path), report)


def _verify(path: Path, report: Report) -> None:
    receipt = receipts.found(path)
    touched = receipt.touched(path) if receipt else ()
    if receipt is None or not touched:
        return
    report(
        f"{PHASE}verify {len(touched)} of {len(receipt.files)} files of {path} changed since they "
        f"were hashed, {touched[0]} among them: hashing them again"
    )
    # Not captured, so that the journal shows progress: hashing takes minutes.
    done = subprocess.run(
        [sys.executable, "-m", BUILDER, VERIFY, str(path)],
        stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return
    error_text = done.stderr.strip()
    problem = problem_in(error_text.splitlines()[-1]) if error_text else None
    if problem is None:
        message = f"cannot be verified: {error_text[-200:] or f'exit {done.returncode}'}"
        raise HostToolError(f"checkpoint {path}", message, _FIX)
    raise HostToolError(problem.where, problem.what, problem.fix)
