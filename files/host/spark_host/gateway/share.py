"""Peer downloads: a read-only nginx with a key that serves checkpoint files to other hosts.

The unit runs it under a dynamic account, which can read only world-readable files.
"""

from __future__ import annotations

import os
from pathlib import Path

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.fetching import SHARE_SETTINGS, Share, SharedTree, growing_tree
from spark_contract.paths import Paths, job_dir

from spark_host.gateway import nginx


def run(paths: Paths) -> int:
    share = files.load(Share, paths.below(SHARE_SETTINGS), "nothing is shared")
    try:
        # systemd.exec(5): the writable folder of the unit, and the credentials.
        folder = Path(os.environ["RUNTIME_DIRECTORY"])
        key = (Path(os.environ["CREDENTIALS_DIRECTORY"]) / "key").read_text().strip()
    except (KeyError, FileNotFoundError) as error:
        fix = "start spark-share@trees instead"
        raise HostToolError("share", f"only the unit can run it ({error})", fix) from error
    config = folder / "nginx.conf"
    files.write_text(folder / "keys.conf", nginx.keys_text(key), 0o600)
    files.write_text(config, config_text(share, folder, paths), 0o600)
    program = nginx.program(paths)
    os.execv(program, [program, "-p", str(folder), "-c", str(config), "-e", "stderr"])


def config_text(share: Share, folder: Path, paths: Paths) -> str:
    address = f"[{share.address}]" if ":" in share.address else share.address
    values = {
        "RUN": str(folder),
        "LISTEN": f"{address}:{share.port}",
        "TREES": "\n        ".join(_locations(tree, paths) for tree in share.trees),
    }
    return nginx.fill("share.conf", values)


def _locations(tree: SharedTree, paths: Paths) -> str:
    """Return the locations of a checkpoint: verified files and progress."""
    out = paths.below(tree.dir)
    folders = [out, growing_tree(out)] if tree.unfinished else [out]
    progress = paths.below(job_dir(tree.job)) / "progress"
    candidates = " ".join(nginx.quoted(folder, "/$1") for folder in folders)
    return (
        f"location ~ ^/{tree.digest}/files/(.+)$ {{ try_files {candidates} =404; }}\n"
        f"        location = /{tree.digest}/progress {{ try_files {nginx.quoted(progress)} =404; }}"
    )
