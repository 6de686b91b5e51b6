import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spark_deploy.bench.result import Answer, BenchResult, Cell, Load, Sample, Served
from spark_deploy.config.checkout import CHECKOUT

KEY = "sk-never-shown"
BENCHY = CHECKOUT / "tests/fixtures/llama-benchy-0.4.0.json"
LOAD = Load(2, 8192, 256, 20, 20, 7, 163_840, 5_120, 81.5, 1_600.0, 20.0, 6_700.0)


def result(profile: str = "v2", speed: float = 50.0, **changes: Any) -> BenchResult:
    served = Served("spark-1", f"main-{'0' * 12}", "m", profile, "image", "/srv/tree", {})
    values: dict[str, Any] = {
        "schema_version": 1, "at": "2026-01-01T00:00:00Z", "served": served,
        "answers": (
            Answer("Q&A", 1, 256, 9, 256, 0.2, 256.0),
            Answer("Q&A", 2, 256, 9, 256, 0.2, 256 / speed),
        ),
        "cells": (Cell(0, 1, 2048, 128, 3000.0, speed, 0.1, 700.0),),
        "llama_benchy": "0.4.0", "drafted_tokens": 10, "accepted_tokens": 8,
        "samples": (Sample(0, 9_000_000_000, 60, 50), Sample(1, 7_500_000_000, 61, 70)),
        "notes": (),
    }  # fmt: skip
    return BenchResult(**{**values, **changes})


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the URL of an API on localhost."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
