"""Measures what the gateway adds to a streamed answer: first piece and gaps between pieces.

    python proofs/benchmarks/gateway.py --answers 200

Needs root, nginx and a C compiler: it runs the lab's stand-in engine on a unix socket and a gateway
as hosts render it, and asks both in turn, so that the machine's mood falls on both alike. Writes
proofs/results/gateway.json.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
RESULT = CHECKOUT / "proofs/results/gateway.json"
sys.path[:0] = [str(CHECKOUT / "files" / "contract"), str(CHECKOUT / "files" / "host")]

from spark_contract import files  # noqa: E402  (the checkout must be found first)
from spark_contract.host.paths import Paths  # noqa: E402
from spark_contract.serving.gateway import Gateway  # noqa: E402
from spark_host.gateway import api_key, nginx  # noqa: E402  (the checkout must be found first)

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin") or "nginx"

Connect = Callable[[], http.client.HTTPConnection]


class SocketConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path):
        super().__init__("engine")
        self._path = str(path)

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def main() -> int:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=200, help="answers of each kind")
    parser.add_argument("--pieces", type=int, default=40, help="pieces of an answer")
    parser.add_argument("--piece-ms", type=float, default=20, help="engine's time for a piece")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="gateway-bench-"))
    root.chmod(0o755)
    running: list[subprocess.Popen[bytes]] = []
    try:
        result = measure(root, options, running)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(20)
        shutil.rmtree(root)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


def measure(
    root: Path, options: argparse.Namespace, running: list[subprocess.Popen[bytes]]
) -> dict[str, Any]:
    """Start engine and gateway and ask both in turn."""
    engine = Paths(root).engine_socket("main")
    engine.parent.mkdir(parents=True)
    running.append(start_engine(root, engine, options.piece_ms / 1000))
    wait_for(lambda: SocketConnection(engine))
    settings, process = start_gateway(root, engine)
    running.append(process)

    def through() -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", settings.port)

    wait_for(through)
    key = api_key.read(settings, Paths(root))
    kinds: dict[str, Connect] = {"direct": lambda: SocketConnection(engine), "gateway": through}
    first: dict[str, list[float]] = {kind: [] for kind in kinds}
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.answers):
        for kind, connect in kinds.items():
            arrivals = ask(connect(), key, options.pieces)
            first[kind].append(arrivals[0])
            gaps[kind] += [b - a for a, b in itertools.pairwise(arrivals)]
    return report(options, first, gaps)


def start_engine(root: Path, engine: Path, piece_s: float) -> subprocess.Popen[bytes]:
    """Compile and run the stand-in engine."""
    program = root / "vllm"
    sources = sorted((CHECKOUT / "lab" / "stub_engine").glob("*.c"))
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-pthread"]
    subprocess.run(["cc", *flags, "-o", program, *sources], check=True)
    return subprocess.Popen(
        [program, "serve", "/model", "--served-model-name", "m", "--uds", engine],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "STUB_LOAD_S": "0", "STUB_PIECE_S": str(piece_s)},
    )


def start_gateway(root: Path, engine: Path) -> tuple[Gateway, subprocess.Popen[bytes]]:
    """Render a gateway as a host does and run its nginx."""
    paths = Paths(root)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    settings = Gateway(
        "main", "loopback", port, 32 << 20, None, "/etc/spark/api-key", None, "nobody"
    )
    api_key.make(settings, paths)
    files.write_text(paths.traffic("main"), "bench\n")
    engine.chmod(0o666)
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/nginx").symlink_to(NGINX)
    directory = nginx.render(settings, paths)
    config = str(directory / "nginx.conf")
    return settings, subprocess.Popen(
        [nginx.program(paths), "-p", str(directory), "-c", config, "-e", "stderr"]
    )


def ask(connection: http.client.HTTPConnection, key: str, pieces: int) -> list[float]:
    """Return when each piece of one streamed answer came, counted from the request."""
    content = "Repeat exactly: " + "abcd" * pieces
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": content}]}
    connection.connect()
    start = time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {key}"}
    )
    answer = connection.getresponse()
    arrivals = []
    while line := answer.readline():
        if line.startswith(b"data: "):
            arrivals.append(time.perf_counter() - start)
    connection.close()
    if len(arrivals) < pieces:
        raise SystemExit(f"only {len(arrivals)} of {pieces} pieces came (HTTP {answer.status})")
    return arrivals


def report(
    options: argparse.Namespace, first: dict[str, list[float]], gaps: dict[str, list[float]]
) -> dict[str, Any]:
    """Put medians and tails of both kinds beside each other."""
    measured: dict[str, Any] = {}
    for title, values in (("first_piece", first), ("gap", gaps)):
        medians = {kind: statistics.median(seconds) for kind, seconds in values.items()}
        measured[title] = {
            f"{kind}_{name}_ms": round(value * 1000, 3)
            for kind, seconds in values.items()
            for name, value in (
                ("median", medians[kind]),
                ("p99", statistics.quantiles(seconds, n=100)[98]),
            )
        }
        measured[title]["ratio_of_medians"] = round(medians["gateway"] / medians["direct"], 4)
        added_ms = (medians["gateway"] - medians["direct"]) * 1000
        measured[title]["added_ms"] = round(added_ms, 3)
    version = subprocess.run([NGINX, "-v"], capture_output=True, text=True, check=True)
    return {
        "benchmark": "gateway",
        "command": (
            f"python proofs/benchmarks/gateway.py --answers {options.answers} "
            f"--pieces {options.pieces} --piece-ms {options.piece_ms:g}"
        ),
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(),
                    "load": round(os.getloadavg()[0], 2)},
        "stands_in": "stub engine and nginx on one x86_64 machine; not a DGX Spark",
        "nginx": version.stderr.strip().rpartition("/")[2],
        **measured,
    }  # fmt: skip


def wait_for(connect: Connect, wait_s: float = 10) -> None:
    """Return once somebody accepts connections."""
    deadline = time.monotonic() + wait_s
    while True:
        connection = connect()
        try:
            connection.connect()
            connection.close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
