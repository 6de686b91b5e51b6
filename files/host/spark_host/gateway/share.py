"""Lends files of trees to other hosts: an nginx of its own, read-only, with a key.

Runs as an account of its unit's making, which can read what everybody can.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths, job_dir
from spark_contract.sharing import SHARE_SETTINGS, Share, SharedTree, growing_tree

from spark_host.gateway import nginx


def run(paths: Paths) -> int:
    """Render the configuration and become its nginx."""
    share = files.load(Share, paths.below(SHARE_SETTINGS), "nothing is lent")
    try:
        # systemd.exec(5): where the unit may write, and what it was given to read.
        directory = Path(os.environ["RUNTIME_DIRECTORY"])
        key = (Path(os.environ["CREDENTIALS_DIRECTORY"]) / "key").read_text().strip()
    except (KeyError, FileNotFoundError) as error:
        fix = "start spark-share@trees instead"
        raise HostToolError("share", f"only its unit runs it ({error})", fix) from error
    files.write_text(directory / "keys.conf", nginx.keys_text(key), 0o600)
    files.write_text(directory / "nginx.conf", config_text(share, directory, paths), 0o600)
    program = nginx.program(paths)
    words = [program, "-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", "stderr"]
    os.execv(program, words)


def config_text(share: Share, directory: Path, paths: Paths) -> str:
    """Return the configuration of nginx."""
    address = f"[{share.address}]" if ":" in share.address else share.address
    values = {
        "RUN": str(directory),
        "LISTEN": f"{address}:{share.port}",
        "TREES": "\n        ".join(_locations(tree, paths) for tree in share.trees),
    }
    template = resources.files("spark_host.gateway").joinpath("templates/share.conf").read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def _locations(tree: SharedTree, paths: Paths) -> str:
    """Return what one tree answers: its files as far as they are proven, and how far it is."""
    out = paths.below(tree.dir)
    places = [out, growing_tree(out)] if tree.unfinished else [out]
    progress = paths.below(job_dir(tree.job)) / "progress"
    files_of = " ".join(nginx.quoted(place, "/$1") for place in places)
    return (
        f"location ~ ^/{tree.digest}/files/(.+)$ {{ try_files {files_of} =404; }}\n"
        f"        location = /{tree.digest}/progress {{ try_files {nginx.quoted(progress)} =404; }}"
    )
