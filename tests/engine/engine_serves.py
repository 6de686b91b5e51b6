"""Start the real `vllm serve` with a release's arguments; run by the engine's Python.

Arguments: a JSON file (arguments of the release, folders of the mounts, request bodies) and a file
for the answers.
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
    request = json.loads(Path(case).read_text())
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/engine.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve",
             *_local_arguments(request["argv"], request["folders"], socket)]
        )  # fmt: skip
        try:
            Path(answers).write_text(json.dumps(_answers(process, socket, request["bodies"])))
        finally:
            process.terminate()
            process.wait(60)


def _local_arguments(argv: list[str], folders: dict[str, str], socket: str) -> list[str]:
    arguments = []
    for word in argv:
        name, _, target = word.rpartition("=")
        if target in folders:
            word = f"{name}={folders[target]}" if name else folders[target]
        arguments.append(socket if word.endswith("/engine.sock") else word)
    return arguments


def _answers(process: subprocess.Popen[bytes], socket: str, bodies: list[Any]) -> dict[str, Any]:
    transport = httpx.HTTPTransport(uds=socket)
    with httpx.Client(transport=transport, base_url="http://engine", timeout=300) as client:
        deadline = time.monotonic() + WAIT_S
        while not _is_ready(client):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the engine did not start")
            time.sleep(1)
        models = client.get("/v1/models").json()
        replies = [client.post("/v1/chat/completions", json=body) for body in bodies]
    return {"models": models, "answers": [[reply.status_code, reply.json()] for reply in replies]}


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
