"""The code of the release before this one, as a checkout of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

# Move it at each release, to the commit of the one that was just made.
COMMIT = "e2e31aaad0e692abb4bcbb39cfee1fe6e469e5c8"
CHECKOUT = Path(__file__).resolve().parent.parent


def unpacked(target: Path, *, clone: Path = CHECKOUT, commit: str = COMMIT) -> Path:
    """Have the earlier tree in a folder and return it.

    Raises:
        AssertionError: the clone does not hold that commit, as a shallow one does not.
    """
    archive = subprocess.run(
        ["git", "-C", str(clone), "archive", commit], capture_output=True, check=False
    )
    if archive.returncode != 0:
        raise AssertionError(
            f"commit {commit[:12]}, the release before, is not in the clone {clone}: "
            f"{archive.stderr.decode().strip()}; fix: git fetch --unshallow"
        )
    subprocess.run(["tar", "x", "-C", str(target)], input=archive.stdout, check=True)
    return target


def environment(checkout: Path) -> dict[str, str]:
    """Return what makes Python import from a checkout, whatever is installed."""
    return {"PYTHONPATH": f"{checkout}:{checkout}/files/contract"}
