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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.images import (
    MANIFEST_TYPES,
    PULL_LEAST_BYTES_PER_S,
    PULL_STALL_S,
    LayersPlan,
    parse_reference,
)
from spark_contract.job import Progress
from spark_contract.orders import BUILDER, LAYERS
from spark_contract.paths import Paths
from spark_contract.tool import LAYERS_OPTION

from spark_host.gateway import nginx
from spark_host.jobs.login import registry_auth
from spark_host.system import docker
from spark_host.system.programs import log

_EXISTS, _UNPACKING, _ARRIVED = "Already exists", "Extracting", "Download complete"
# A layer of which docker says this needs the registry no more.
_HERE = frozenset({"Verifying Checksum", _ARRIVED, _UNPACKING, "Pull complete", _EXISTS})
# Either store of docker can be silent while it unpacks gigabytes.
_LOCAL_S = 3600.0


class Layers:
    """What was told of each layer; a thread may look while another one takes.

    A sign of life is a status that a layer did not have before, or enough bytes: of a registry
    that sends a byte a minute nobody gets an image.
    """

    def __init__(self, now: float, stall_s: float):
        self._lock = threading.Lock()
        self._stall_s = stall_s
        self._status: dict[str, str] = {}
        self._seen: set[tuple[str, str]] = set()
        # By layer: bytes that came, bytes that were unpacked, and how many there are.
        self._came: dict[str, int] = {}
        self._unpacked: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._sign_at, self._sign_bytes = now, 0
        self._phase, self._phase_at = "pull", now

    def take(self, said: dict[str, Any], now: float) -> None:
        """Note one object of docker's answer."""
        name, status = str(said.get("id")), str(said.get("status"))
        with self._lock:
            if "progressDetail" in said:
                self._status[name] = status
                self._count(name, status, said["progressDetail"])
            kind = (name, re.sub(r"\d+", "#", status))  # "Retrying in 5 seconds", "in 4 seconds"
            bytes_now = sum(self._came.values()) + sum(self._unpacked.values())
            least = PULL_LEAST_BYTES_PER_S * self._stall_s if self._outstanding() else 1
            if kind not in self._seen or bytes_now - self._sign_bytes >= least:
                self._sign_at, self._sign_bytes = now, bytes_now
            self._seen.add(kind)

    def _count(self, name: str, status: str, detail: object) -> None:
        told = detail if isinstance(detail, dict) else {}
        current, total = told.get("current"), told.get("total")
        if isinstance(total, int) and total > 0:
            self._totals[name] = total
        counted = self._unpacked if status == _UNPACKING else self._came
        if status == _ARRIVED:
            current = self._totals.get(name)
        # Seconds are no bytes; and a layer that is tried again brings nothing new at first.
        if isinstance(current, int) and not told.get("units"):
            counted[name] = max(current, counted.get(name, 0))

    def _outstanding(self) -> bool:
        return not self._status or any(one not in _HERE for one in self._status.values())

    def stalled(self, now: float) -> str | None:
        """Return what is wrong when nothing goes on any more."""
        with self._lock:
            since_s = now - self._sign_at
            if not self._outstanding():
                what = f"docker has all bytes, and nothing went on for {_LOCAL_S / 60:.0f} minutes"
                return what if since_s > max(_LOCAL_S, self._stall_s) else None
            if since_s <= self._stall_s:
                return None
            waits = [name for name, one in sorted(self._status.items()) if one not in _HERE]
            which = f" of layer {waits[0]}" if waits else ""
            got = f"{sum(self._came.values()) / 1e6:,.1f} MB"
            return f"the pull stalls: nothing{which} came in {since_s:.0f} s, after {got}"

    def progress(self, now: float) -> Progress:
        """Return how far it is; a total is known once each layer has told its own."""
        with self._lock:
            here = not self._outstanding()
            counted, phase = (self._unpacked, "unpack") if here else (self._came, "pull")
            if phase != self._phase:
                self._phase, self._phase_at = phase, now
            wanted = [name for name, one in self._status.items() if one != _EXISTS]
            known = wanted and all(name in self._totals for name in wanted)
            total = sum(self._totals[name] for name in wanted) if known else None
            done = sum(counted.values())
            rate = None if here else round(done / max(now - self._phase_at, 1.0))
            left_s = round((total - done) / rate) if total and rate else None
            return Progress(phase, done if counted else None, total, rate, left_s)


# Asked over docker's API, which tells the bytes of each layer; its client tells them to a
# terminal only. What counts is what changes: the store of containerd repeats itself ten times a
# second.


_SHOW_S = 2.0
_LOOK_S = 0.2
_LINE_BYTES = 1 << 20  # of what docker says of a layer; a line has some two hundred
_WORDS = 300
_RUN_AGAIN = "`journalctl -u docker`; then run again: whole layers stay"


def pull(reference: str, *, stall_s: float = PULL_STALL_S) -> None:
    """Have docker hold an image, by a name with a digest.

    Raises:
        HostToolError: docker, or the registry behind it, failed or brings nothing any more.
    """
    watched = _Watched(reference, stall_s)
    try:
        with watched:
            for said in watched.answers():
                _refuse(reference, said)
                watched.layers.take(said, time.monotonic())
    except (OSError, HTTPException) as error:
        if watched.stalled is not None:
            raise watched.stalled from error
        why = getattr(error, "strerror", None) or "the connection ended"
        what = f"docker's daemon is away, or broke the pull off ({why.lower()})"
        raise HostToolError(reference, what, f"systemctl status docker; {_RUN_AGAIN}") from error
    if watched.stalled is not None:
        raise watched.stalled
    if docker.image(reference) is None:
        what = "docker ended the pull without an error and without the image"
        raise HostToolError(reference, what, _RUN_AGAIN)


class _Watched:
    """One question to docker; a thread beside it looks at what came, and hangs up in time."""

    def __init__(self, reference: str, stall_s: float):
        self.layers = Layers(time.monotonic(), stall_s)
        self.stalled: HostToolError | None = None
        self._reference = reference
        self._connection = docker.connection(docker.PATIENT_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watched:
        """Ask, and begin to look."""
        self._connection.connect()
        self._connection.sock.settimeout(None)  # from here on the thread decides
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up: docker gives a pull up that nobody waits for."""
        self._ended.set()
        self._thread.join()
        self._connection.close()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield what docker says."""
        name, digest = _name_and_version(self._reference)
        auth = registry_auth(self._reference)
        path = f"/images/create?{urlencode({'fromImage': name, 'tag': digest})}"
        headers = {"X-Registry-Auth": auth} if auth else {}
        self._connection.request("POST", path, headers=headers)
        with self._connection.getresponse() as answer:
            yield from _objects(answer)
            if answer.status != 200:
                what = f"docker answers with status {answer.status}"
                raise HostToolError(self._reference, what, _RUN_AGAIN)

    def _look(self) -> None:
        shown = 0.0
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            if now - shown >= _SHOW_S:
                log(self.layers.progress(now).line())
                shown = now
            what = self.layers.stalled(now)
            if what is not None:
                fix = f"look whether the registry and the way to it are well; {_RUN_AGAIN}"
                self.stalled = HostToolError(self._reference, what, fix)
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)
                return


def _name_and_version(reference: str) -> tuple[str, str]:
    name, _, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{folder}{slash}{last}", digest or tag or "latest"


def _objects(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an answer, one a line; what is none, or too long for one, is not.

    Whether the image came is asked afterwards, so what is passed over here proves nothing.
    """
    line, too_long = b"", False
    while piece := answer.read1(1 << 16):
        *whole, rest = (line + piece).split(b"\n")
        for one in whole:
            if not too_long:
                yield from _object(one)
            too_long = False
        too_long = too_long or len(rest) > _LINE_BYTES
        line = b"" if too_long else rest
    yield from _object(line)


def _object(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(said, dict):
        yield said


def _refuse(reference: str, said: dict[str, Any]) -> None:
    """Raise what docker calls an error; one in the middle of a pull comes with status 200."""
    detail = said.get("errorDetail")
    why = detail.get("message") if isinstance(detail, dict) else None
    why = why or said.get("error") or ("status" not in said and said.get("message"))
    if why:
        fix = "look at the registry's address, its login and the way to it; `journalctl -u docker`"
        raise HostToolError(reference, f"docker cannot pull it: {_one_line(why)}", fix)


def _one_line(text: object) -> str:
    shown = "".join(one if one.isprintable() else " " for one in str(text)[: 4 * _WORDS])
    return " ".join(shown.split())[:_WORDS]


def begins(phase: str) -> None:
    """Tell a poller of work that counts no bytes."""
    log(Progress(phase, None, None, None, None).line())


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
