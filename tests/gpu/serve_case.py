"""Serve a tree over HTTP exactly as a profile would, and ask it things.

    python3 -m tests.gpu.serve_case TREE OUT.json ARGV.json

ARGV.json holds the engine's arguments as the plan renders them. What this machine lacks or a tiny
model cannot use is replaced and listed in the result.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.engine_case import ENVIRONMENT

REPLACED = {"--max-model-len": "4096", "--gpu-memory-utilization": "0.10"}
ADDED = [
    "--attention-config",
    '{"flash_attn_version": 2}',
    "--additional-config",
    '{"gdn_prefill_backend": "triton"}',
]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(120)
        self.sock.connect(self._path)


def ask(path: str, method: str, target: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Return status and text of one request."""
    connection = UnixConnection(path)
    content = json.dumps(body) if body else None
    connection.request(method, target, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def adapted(argv: list[str], tree: str, sock: str) -> tuple[list[str], list[str]]:
    """Return the arguments for this machine, and what was changed."""
    changed = []
    result = [tree, *argv[1:]]
    for option, value in {**REPLACED, "--uds": sock}.items():
        if option in result:
            place = result.index(option) + 1
            changed.append(f"{option}: {result[place]} -> {value}")
            result[place] = value
    if "turboquant" in " ".join(argv):
        return result + ADDED[2:], [*changed, "added " + " ".join(ADDED[2:])]
    return result + ADDED, [*changed, "added " + " ".join(ADDED)]


def talk(sock: str, model: str) -> dict[str, Any]:
    """Ask for the models, an answer, a stream, a tool call and the counters."""
    found: dict[str, Any] = {
        "models": json.loads(ask(sock, "GET", "/v1/models")[1])["data"][0]["id"]
    }
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 300,
    }
    status, text = ask(sock, "POST", "/v1/chat/completions", question)
    found["chat"] = {"status": status, "answer": json.loads(text)["choices"][0]["message"]}
    status, text = ask(sock, "POST", "/v1/chat/completions", {**question, "stream": True})
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    pieces = [json.loads(event)["choices"][0]["delta"] for event in events if event != "[DONE]"]
    found["stream"] = {
        "status": status,
        "events": len(events),
        "done": events[-1] == "[DONE]",
        "content": "".join(piece.get("content") or "" for piece in pieces),
    }
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    weather = [{"role": "user", "content": "What is the weather in Paris?"}]
    status, text = ask(
        sock, "POST", "/v1/chat/completions", {**question, "messages": weather, "tools": [tool]}
    )
    message = json.loads(text)["choices"][0]["message"]
    found["tool"] = {"status": status, "calls": message.get("tool_calls")}
    metrics = ask(sock, "GET", "/metrics")[1]
    found["counters"] = [
        line
        for line in metrics.splitlines()
        if line.startswith(("vllm:spec_decode_num", "vllm:generation_tokens_total"))
    ]
    return found


def main() -> None:
    """Start, talk, stop, write."""
    tree, out, argv = sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    sock = f"/tmp/spark-engine-{os.getpid()}.sock"
    arguments, changed = adapted(argv, tree, sock)
    environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "spark"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    log_path = out.with_suffix(".log")
    started = time.monotonic()
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    result: dict[str, Any] = {"argv": arguments, "changed": changed, "state": "died"}
    try:
        while time.monotonic() - started < 400 and server.poll() is None:
            try:
                if ask(sock, "GET", "/health")[0] == 200:
                    result["healthy_s"] = round(time.monotonic() - started, 1)
                    result.update(talk(sock, argv[argv.index("--served-model-name") + 1]))
                    result["state"] = "served"
                    break
            except OSError:
                time.sleep(1)
    except (KeyError, ValueError) as error:
        result["error"] = repr(error)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    lines = log_path.read_text(errors="replace").splitlines()
    wanted = ("Selected ", "spark", "Using ", "cudagraph", "KV cache size", "Model Runner")
    result["log"] = sorted(
        {line.split("] ", 1)[-1][:200] for line in lines if any(text in line for text in wanted)}
    )
    result["log_tail"] = [] if result["state"] == "served" else lines[-25:]
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        result["state"],
        json.dumps(
            {k: result.get(k) for k in ("healthy_s", "chat", "stream", "tool", "counters", "error")}
        )[:1500],
    )


if __name__ == "__main__":
    main()
