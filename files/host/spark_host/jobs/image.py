"""``spark-host image``: pulls an image, through other hosts if they share it, then runs a command.

Shared blobs are served to docker by a local nginx without TLS on the loopback address, so that
every image store gets the identity that the registry gave. If that fails, docker pulls missing
layers from the registry.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.fetching import MANIFEST_TYPES, LayersPlan, parse_reference
from spark_contract.job import Progress
from spark_contract.orders import BUILDER, LAYERS
from spark_contract.paths import Paths
from spark_contract.tool import LAYERS_OPTION

from spark_host.gateway import nginx
from spark_host.jobs.pull import pull
from spark_host.system import docker
from spark_host.system.programs import log

_START_S = 10.0


def main(words: list[str], paths: Paths) -> int:
    """Pull the image, through the blobs of ``LAYERS.json`` if given; then become the command."""
    layers, words = (words[1], words[2:]) if words[:1] == [LAYERS_OPTION] else (None, words)
    if not words or words[0].startswith("-"):
        usage = f"image [{LAYERS_OPTION} LAYERS.json] REFERENCE [COMMAND...]"
        raise HostToolError("image", f"unknown words {words}", usage, 2)
    reference, *command = words
    try:
        if layers is not None:
            _pull_from_peers(Path(layers), paths)
    except (HostToolError, OSError) as error:
        print(f"image: not pulled from other hosts: {error}", file=sys.stderr, flush=True)
    if docker.image(reference) is None:
        pull(reference)
    if not command:
        return 0
    log(Progress("build", None, None, None, None).line())
    os.execvp(command[0], command)


def _pull_from_peers(order: Path, paths: Paths) -> None:
    plan = files.load(LayersPlan, order, "no such order")
    blobs, manifests = Path(plan.out), order.parent / "manifests"
    fetch = [sys.executable, "-m", BUILDER, LAYERS, str(order), str(manifests)]
    if subprocess.run(fetch, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise HostToolError(plan.reference, "the blobs were not fetched", "see the lines above")
    reference = parse_reference(plan.reference)
    with _local_registry(blobs, manifests, paths) as address:
        local = f"{address}/{reference.name}@{reference.version}"
        pull(local)
    # This pulls only the manifest: the layers are local, but releases use the registry's name.
    pull(plan.reference)
    docker.client("image", "rm", local)
    if not plan.keep:
        shutil.rmtree(blobs)


@contextmanager
def _local_registry(blobs: Path, manifests: Path, paths: Paths) -> Iterator[str]:
    """Serve an image's files to docker; yield the address to pull from."""
    with TemporaryDirectory(prefix="spark-image-") as run, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        config = Path(run) / "nginx.conf"
        files.write_text(config, _config_text(run, port, blobs, manifests), 0o600)
        words = [nginx.program(paths), "-p", run, "-c", str(config), "-e", "stderr"]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL) as server:
            try:
                _wait_for_port(port, server)
                yield f"127.0.0.1:{port}"
            finally:
                server.terminate()


def _wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise HostToolError("nginx", "does not answer on the loopback address", "see the lines above")


def _config_text(run: str, port: int, blobs: Path, manifests: Path) -> str:
    locations = map(_manifest_location, sorted(manifests.glob("sha256:*")))
    values = {
        "RUN": run,
        "PORT": str(port),
        "TREE": nginx.quoted(blobs),
        "MANIFESTS": "\n        ".join(locations),
    }
    return nginx.fill("image.conf", values)


def _manifest_location(path: Path) -> str:
    manifest = json.loads(path.read_text())
    kinds = MANIFEST_TYPES[:2] if "manifests" in manifest else MANIFEST_TYPES[2:]
    kind = manifest.get("mediaType") if manifest.get("mediaType") in kinds else kinds[0]
    return (
        f"location ~ /manifests/{path.name}$ {{ root {nginx.quoted(path.parent)}; "
        f"default_type {kind}; try_files /{path.name} =404; "
        f"add_header Docker-Content-Digest {path.name}; }}"
    )
