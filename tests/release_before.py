"""The code of the release before this one, as a checkout of its own, and a host it deployed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.labkit import Guest, Site
from tests.runs import Run

# Move it at each release, to the commit of the one that was just made.
COMMIT = "e2e31aaad0e692abb4bcbb39cfee1fe6e469e5c8"
CHECKOUT = Path(__file__).resolve().parent.parent
TOOLS = "/usr/local/lib/spark"


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


@dataclass
class Upgraded:
    """A host of the release before, and the user's files; only the checkout behind them moves."""

    site: Site
    guest: Guest

    def use(self, tree: Path) -> None:
        """Deploy with another tree from now on, as after ``git pull``."""
        self.site.checkout.unlink(missing_ok=True)
        self.site.checkout.symlink_to(tree)

    def deploy(self, deploy: str = "deploy.py", *, dry: bool = False) -> Run:
        run = self.site.deploy(dry=dry, deploy=deploy, env=environment(self.site.checkout))
        assert run.exit_code == 0, f"{run.failed}\n{run.stderr[-4000:]}"
        return run

    def proven(self) -> bool:
        """Return whether the proof is of the engine's present run."""
        release = self.guest.release()
        proof = self.guest.json(f"cat /var/lib/spark/proofs/{release}.json")
        run = self.guest.unit(f"spark-serve@{release}.service", "InvocationID")["InvocationID"]
        return (proof["ok"], proof["invocation_id"]) == (True, run)

    def release_sha256(self) -> str:
        release = self.guest.release()
        return self.guest.run(f"sha256sum /etc/spark/releases/{release}/release.json")

    def tools(self) -> str:
        return self.guest.run(f"readlink {TOOLS}/current")

    def watched_by(self) -> str:
        """Return the folder of tools whose code the watch runs."""
        unit = f"spark-watch@{self.guest.release()}.service"
        pid = self.guest.unit(unit, "MainPID")["MainPID"]
        path = self.guest.run(f"tr '\\0' '\\n' < /proc/{pid}/environ | sed -n 's/^PYTHONPATH=//p'")
        return path.partition(":")[0]
