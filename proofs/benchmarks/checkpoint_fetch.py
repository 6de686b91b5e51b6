"""The fetcher against ``hf download`` on the lab's hub: time, and bytes after being killed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_run import ROOT, forget, run_builder

COMMIT = "c" * 40
NAME = "bench/repository"
_HOMES = [str(ROOT / "files" / home) for home in ("contract", "checkpoint")]
SERVE = (
    "import sys; from pathlib import Path; from lab.hub.server import serve;"
    "serve(Path(sys.argv[1]), Path(sys.argv[2]), '127.0.0.1', int(sys.argv[3]), int(sys.argv[4]))"
)


def bench_fetch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fetch one repository with both clients, alternating, then kill both half way."""
    work: Path = arguments.work
    source = work / "store" / NAME / COMMIT
    _write_repository(source, arguments.gigabytes)
    order, out = work / "fetch.json", work / "out"
    with _hub(work) as (url, log):
        order.write_text(json.dumps(_order(source, out, url)))
        command = _hf(work, out)
        environment = _hf_environment(work, url)
        contenders: dict[str, Callable[[], Any]] = {
            "fetch": lambda: run_builder("fetch", str(order)),
            "hf_download": lambda: subprocess.run(
                command, env=environment, check=True, stdout=subprocess.DEVNULL
            ),
        }
        # The hub hashes its files once before it answers; that is nobody's time.
        contenders["hf_download"]()
        shutil.rmtree(out)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        peak = 0
        for turn in range(arguments.pairs):
            for name in list(contenders) if turn % 2 == 0 else reversed(list(contenders)):
                forget(source)
                began = time.monotonic()
                done = contenders[name]()
                seconds[name].append(round(time.monotonic() - began, 3))
                peak = max(peak, done["peak_bytes"]) if name == "fetch" else peak
                shutil.rmtree(out)
        resumed = {
            "fetch": _after_kill(work, log, _builder_command(order), dict(os.environ)),
            "hf_download": _after_kill(work, log, command, environment),
        }
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "repository_bytes": sum(path.stat().st_size for path in source.iterdir()),
        "seconds": seconds,
        "median_seconds": medians,
        "fetch_over_hf_download": round(medians["fetch"] / medians["hf_download"], 3),
        "fetch_peak_bytes": peak,
        "asked_again_after_kill": resumed,
        "note": "fetch hashes every byte (sha256) and flushes it to disk; hf download does neither",
    }


def _write_repository(directory: Path, gigabytes: float) -> None:
    directory.mkdir(parents=True)
    refs = directory.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    pool = np.random.default_rng(1).bytes(64 << 20)
    for number in range(4):
        left = int(gigabytes * 1e9 / 4)
        with (directory / f"model-{number}.safetensors").open("wb") as file:
            # Different files need different content: a hub stores equal ones once.
            file.write(number.to_bytes(8, "little"))
            while left > 0:
                left -= file.write(pool[:left])
    (directory / "config.json").write_text("{}")


def _order(source: Path, out: Path, url: str) -> dict[str, Any]:
    files = []
    for path in sorted(source.iterdir()):
        hasher = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(4 << 20):
                hasher.update(piece)
        size = path.stat().st_size
        files.append({"path": path.name, "size_bytes": size, "sha256": hasher.hexdigest()})
    return {
        "schema_version": 1,
        "digest": "f" * 64,
        "name": NAME,
        "commit": COMMIT,
        "out": str(out),
        "files": files,
        "urls": [f"{url}/{NAME}/resolve/{COMMIT}/"],
        "parallel": 4,
    }


def _hf(work: Path, out: Path) -> list[str]:
    client = Path(sys.executable).with_name("hf")
    return [str(client), "download", NAME, "--revision", COMMIT, "--local-dir", str(out)]


def _hf_environment(work: Path, url: str) -> dict[str, str]:
    return {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(work / "hf-home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def _builder_command(order: Path) -> list[str]:
    code = f"import sys; sys.path[:0] = {_HOMES!r};"
    code += "from spark_checkpoint.cli import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, "fetch", str(order)]


def _after_kill(
    work: Path, log: Path, command: list[str], environment: dict[str, str]
) -> dict[str, int]:
    """Kill a download with half its bytes on disk; count what the next run asks for."""
    source = work / "store" / NAME / COMMIT
    total = sum(path.stat().st_size for path in source.iterdir())
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and _bytes_below(work) < total // 2:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = _bytes_below(work)
    before = len(log.read_text().splitlines())
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    asked = 0
    for line in log.read_text().splitlines()[before:]:
        answer = json.loads(line)
        if answer["method"] == "GET" and answer["status"] in (200, 206):
            asked += _asked_bytes(answer, source)
    shutil.rmtree(work / "out")
    return {"on_disk_when_killed_bytes": kept, "asked_again_bytes": asked, "total_bytes": total}


def _asked_bytes(answer: dict[str, Any], source: Path) -> int:
    if answer["range"]:
        first, _, last = answer["range"].removeprefix("bytes=").partition("-")
        if last:
            return int(last) + 1 - int(first)
        return max(path.stat().st_size for path in source.iterdir()) - int(first)
    if not answer["path"].startswith("/blobs/"):
        return 0
    return max(path.stat().st_size for path in source.iterdir())


def _bytes_below(work: Path) -> int:
    found = 0
    for place in (work / "out", work / ".out.partial"):
        for directory, _, names in os.walk(place):
            for name in names:
                try:
                    found += os.stat(os.path.join(directory, name)).st_size
                except FileNotFoundError:
                    # Renamed between the listing and the look.
                    continue
    return found


@contextmanager
def _hub(work: Path) -> Iterator[tuple[str, Path]]:
    run_dir = work / "run"
    run_dir.mkdir()
    ports = [_free_port(), _free_port()]
    command = [sys.executable, "-c", SERVE, work / "store", run_dir, *ports]
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT)
    try:
        while any(_refuses(port) for port in ports):
            if process.poll() is not None:
                raise SystemExit("the lab's hub did not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{ports[0]}", run_dir / "hub-access.jsonl"
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
