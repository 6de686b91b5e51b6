"""Has an image in docker, and then runs what is made from it.

Where hosts lend each other its blobs, docker first pulls them by digest from an nginx on the
loopback address, to which it speaks without TLS; so any image store arrives at the identity that
the registry gave. When something of that fails, docker goes on with what it has, from the registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.host.paths import Paths
from spark_contract.host.tool import LAYERS_OPTION
from spark_contract.work.builder import BUILDER, LAYERS
from spark_contract.work.images import MANIFEST_TYPES, LayersPlan, parse_reference

from spark_host.gateway import nginx
from spark_host.jobs.pull import begins, pull
from spark_host.system import docker

_START_S = 10.0


def main(words: list[str], paths: Paths) -> int:
    """Have the image, by way of the blobs of ``LAYERS.json`` if given, then become the program."""
    layers, words = (words[1], words[2:]) if words[:1] == [LAYERS_OPTION] else (None, words)
    if not words or words[0].startswith("-"):
        fix = f"image [{LAYERS_OPTION} LAYERS.json] REFERENCE [COMMAND...]"
        raise HostToolError("image", f"unknown words {words}", fix, 2)
    reference, *command = words
    try:
        if layers is not None:
            _take(Path(layers), paths)
    except (HostToolError, OSError) as error:
        print(f"image: not by way of other hosts: {error}", file=sys.stderr, flush=True)
    if docker.image(reference) is None:
        pull(reference)
    if not command:
        return 0
    begins("build")
    os.execvp(command[0], command)


def _take(order: Path, paths: Paths) -> None:
    plan = files.load(LayersPlan, order, "no such order")
    tree, manifests = Path(plan.out), order.parent / "manifests"
    fetched = [sys.executable, "-m", BUILDER, LAYERS, str(order), str(manifests)]
    if subprocess.run(fetched, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise HostToolError(plan.reference, "its blobs were not fetched", "see the lines above")
    reference = parse_reference(plan.reference)
    with _served(tree, manifests, paths) as address:
        here = f"{address}/{reference.name}@{reference.version}"
        pull(here)
    # All layers are there, so this costs the manifest, and gives the name that releases use.
    pull(plan.reference)
    docker.client("image", "rm", here)
    if not plan.keep:
        shutil.rmtree(tree)


@contextmanager
def _served(tree: Path, manifests: Path, paths: Paths) -> Iterator[str]:
    """Answer docker's questions from files; yield the address to pull from."""
    with TemporaryDirectory(prefix="spark-image-") as run, socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
        asked.close()
        config = Path(run) / "nginx.conf"
        files.write_text(config, config_text(Path(run), port, tree, manifests), 0o600)
        words = [nginx.program(paths), "-p", run, "-c", str(config), "-e", "stderr"]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL) as server:
            try:
                _wait_for(port, server)
                yield f"127.0.0.1:{port}"
            finally:
                server.terminate()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise HostToolError("nginx", "does not answer on the loopback address", "see the lines above")


def config_text(run: Path, port: int, tree: Path, manifests: Path) -> str:
    """Return the configuration of nginx: the part of a registry that a pull by digest asks."""
    values = {
        "RUN": str(run),
        "PORT": str(port),
        "TREE": nginx.quoted(tree),
        "MANIFESTS": "\n        ".join(
            _manifest(path) for path in sorted(manifests.glob("sha256:*"))
        ),
    }
    template = resources.files("spark_host.jobs").joinpath("image.conf").read_text()
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], template)


def _manifest(path: Path) -> str:
    data = json.loads(path.read_text())
    kinds = MANIFEST_TYPES[:2] if "manifests" in data else MANIFEST_TYPES[2:]
    kind = data.get("mediaType") if data.get("mediaType") in kinds else kinds[0]
    return (
        f"location ~ /manifests/{path.name}$ {{ root {nginx.quoted(path.parent)}; "
        f"default_type {kind}; try_files /{path.name} =404; "
        f"add_header Docker-Content-Digest {path.name}; }}"
    )
