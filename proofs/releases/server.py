"""An engine of a release, started as on a host; every change for this machine is recorded."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_contract.release import Member, Release
from spark_host.engine.client import Engine, EngineError

from proofs.engine import quick

ROOT = Path(__file__).resolve().parents[2]
CACHE_BYTES = 4 << 30
"""Without a profiling run: other engines on the same card would disturb it."""
STOP_S = 20
PREFILL = "--gdn-prefill-backend"
MACHINE = {"VLLM_DISABLED_KERNELS": "CutlassW4A8LinearKernel,MacheteLinearKernel"}
PAIR = {
    # Disable connections between two GPUs of a host that two Sparks lack.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_DEBUG": "INFO",
}
KERNEL_LINES = (
    *("Selected ", "Using ", "spark", "cudagraph", "KV cache size", "Model Runner", "nccl=="),
)
ADDRESSES = ("127.0.0.1", "127.0.0.2")


@dataclass
class Server:
    log: Path
    socket: Path
    argv: list[str]
    env: dict[str, str]
    changed: list[str]
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, apart: bool) -> None:
        """Start the engine; ``apart``: with separate shared memory, as on another host."""
        command = [sys.executable, "-m", "proofs.engine.served", "serve", *self.argv]
        if apart:
            mounted = 'mount -t tmpfs shm /dev/shm && exec "$@"'
            command = ["unshare", "--ipc", "--mount", "sh", "-c", mounted, "rank", *command]
        self.socket.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def healthy(self, limit_s: float) -> float | None:
        started = time.monotonic()
        while self.process and self.process.poll() is None:
            if time.monotonic() - started > limit_s:
                return None
            try:
                if Engine(self.socket).get("/health", 5).status == 200:
                    return round(time.monotonic() - started, 1)
            except EngineError:
                time.sleep(1)
        return None

    def stop(self) -> None:
        """Stop the process group; a worker may outlive the engine."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def kernel_lines(self) -> list[str]:
        lines = (line for line in self.lines() if any(text in line for text in KERNEL_LINES))
        texts = {line.split("] ", 1)[-1][:200] for line in lines}
        return sorted(line for line in texts if "cache directory" not in line)


def servers_of(
    release: Release, tree: Path, work: Path, name: str, *, devices: list[str], alone: bool
) -> list[Server]:
    """Return an engine per cluster member, or a single engine if ``alone``.

    ``tree`` replaces the plan's checkpoint; ``devices`` are the GPUs of the ranks.
    """
    members = release.cluster.members if release.cluster and not alone else (None,)
    return [
        _server(release, member, rank, tree, work, f"{name}-{rank}", devices[rank % len(devices)])
        for rank, member in enumerate(members)
    ]


def _server(
    release: Release,
    member: Member | None,
    rank: int,
    tree: Path,
    work: Path,
    name: str,
    device: str,
) -> Server:
    # A Unix socket's path has at most 107 bytes.
    socket = Path(tempfile.gettempdir()) / f"spark-{os.getpid()}-{name}.sock"
    replaced = {"/model": str(tree), "/run/spark/engine.sock": str(socket), "/cache": str(work)}
    if member:
        assert release.cluster is not None
        for other, address in zip(release.cluster.members, ADDRESSES, strict=True):
            replaced[other.address] = address
        replaced["INTERFACE"] = "lo"
    argv, changed = adapt_arguments(release, member, replaced)
    planned = {**release.engine.env, **(member.env if member else {})}
    env = {key: _swap(value, replaced) for key, value in planned.items()}
    added = dict(MACHINE)
    if member:
        added |= {**PAIR, "NCCL_HOSTID": f"host-{rank}"}
    changed += [f"{old} -> {new}" for old, new in replaced.items() if old != "/cache"]
    changed += [f"added {key}={value}" for key, value in added.items()]
    shown = {"CUDA_VISIBLE_DEVICES": device}
    kept = {key: value for key, value in os.environ.items() if key not in planned}
    return Server(work / f"{name}.log", socket, argv, {**kept, **env, **added, **shown}, changed)


def adapt_arguments(
    release: Release, member: Member | None, replaced: dict[str, str]
) -> tuple[list[str], list[str]]:
    argv = [
        _swap(word, replaced) for word in (*release.engine.argv, *(member.argv if member else ()))
    ]
    index = argv.index("--gpu-memory-utilization") + 1
    changed = [f"--gpu-memory-utilization: {argv[index]} -> 0.1"]
    argv[index] = "0.1"
    added = {
        "--kv-cache-memory-bytes": str(CACHE_BYTES),
        "--attention-config": json.dumps({"flash_attn_version": quick.flash_attention()}),
    }
    if PREFILL not in argv:
        added[PREFILL] = "triton"
    for option, value in added.items():
        argv += [option, value]
        changed.append(f"added {option} {value}")
    return argv, changed


def _swap(text: str, replaced: dict[str, str]) -> str:
    for old, new in replaced.items():
        if text == old or (old == "/cache" and text.startswith("/cache/")):
            return text.replace(old, new, 1)
    return text


def read_release(plan: Path) -> Release:
    from spark_contract import documents

    content: list[dict[str, Any]] = json.loads(plan.read_text())
    return documents.read(Release, content[0]["release"])
