"""Has docker pull an image, and ends a pull that gets nowhere: docker itself waits for ever.

Asked over docker's API, which tells the bytes of each layer; its client tells them to a terminal
only. What counts is what changes: the store of containerd repeats itself ten times a second.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlencode

from spark_contract.errors import HostToolError
from spark_contract.work.images import PULL_STALL_S
from spark_contract.work.job import Progress

from spark_host.jobs.layers import Layers
from spark_host.jobs.login import registry_auth
from spark_host.system import docker
from spark_host.system.log import log

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
