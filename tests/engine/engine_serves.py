"""A release's arguments given to the real `vllm serve`, and what it answers; run by its Python.

Arguments: a JSON file with the arguments of a release, the folders that its mounts stand for and
the bodies to ask; and a file for the answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

WAIT_S = 1500


def main(case: str, answers: str) -> None:
    asked = json.loads(Path(case).read_text())
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/engine.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve",
             *_placed(asked["argv"], asked["folders"], socket)]
        )  # fmt: skip
        try:
            Path(answers).write_text(json.dumps(_answers(process, socket, asked["bodies"])))
        finally:
            process.terminate()
            process.wait(60)


def _placed(argv: list[str], folders: dict[str, str], socket: str) -> list[str]:
    found = []
    for word in argv:
        name, _, place = word.rpartition("=")
        if place in folders:
            word = f"{name}={folders[place]}" if name else folders[place]
        found.append(socket if word.endswith("/engine.sock") else word)
    return found


def _answers(process: subprocess.Popen[bytes], socket: str, bodies: list[Any]) -> dict[str, Any]:
    transport = httpx.HTTPTransport(uds=socket)
    with httpx.Client(transport=transport, base_url="http://engine", timeout=300) as client:
        deadline = time.monotonic() + WAIT_S
        while not _is_ready(client):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the engine did not come up")
            time.sleep(1)
        models = client.get("/v1/models").json()
        said = [client.post("/v1/chat/completions", json=body) for body in bodies]
    return {"models": models, "answers": [[one.status_code, one.json()] for one in said]}


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
