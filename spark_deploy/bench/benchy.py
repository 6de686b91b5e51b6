"""Protocol `llama-benchy`: the real package, with the depths and clients of Spark Arena v2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_deploy.bench.load import Endpoint
from spark_deploy.bench.result import Cell
from spark_deploy.config.errors import SparkError

GRID_NAME = "spark-arena-v2"
DEPTHS = (0, 4096, 8192, 16384, 32768, 65535, 100000)
CONCURRENCIES = (1, 2, 5, 10)
RUNS = 3
PROMPT_TOKENS, ANSWER_TOKENS = 2048, 128
# The key comes by the environment: in argv every user of this machine could read it.
_LAUNCH = (
    "import os, sys; sys.argv[1:1] = ['--api-key', os.environ.pop('SPARK_BENCH_KEY')]; "
    "from llama_benchy.__main__ import main; main()"
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Which cases are measured."""

    depths: tuple[int, ...] = DEPTHS
    concurrencies: tuple[int, ...] = CONCURRENCIES
    runs: int = RUNS
    prompt_tokens: int = PROMPT_TOKENS
    answer_tokens: int = ANSWER_TOKENS

    def fitting(self, context_tokens: int) -> Grid:
        """Return the depths that fit into what the engine takes."""
        room = context_tokens - self.prompt_tokens - self.answer_tokens
        depths = tuple(depth for depth in self.depths if depth <= room)
        return Grid(depths, self.concurrencies, self.runs, self.prompt_tokens, self.answer_tokens)


def interpreter() -> str | None:
    """Return the Python that has llama-benchy: this one, or that of the command on the path."""
    try:
        import importlib.util

        if importlib.util.find_spec("llama_benchy"):
            return sys.executable
    except ImportError:
        pass
    command = shutil.which("llama-benchy")
    if command is None:
        return None
    first = Path(command).read_text(errors="replace").splitlines()[0]
    return first.removeprefix("#!").strip() if first.startswith("#!/") else None


def measure(
    python: str, endpoint: Endpoint, tokenizer: Path, grid: Grid, into: Path,
    more: Sequence[str] = (),
) -> tuple[str, tuple[Cell, ...]]:  # fmt: skip
    """Run llama-benchy and return its version and cases.

    Args:
        python: interpreter that has it.
        endpoint: who is asked.
        tokenizer: folder with the tokenizer of what is served.
        grid: which cases.
        into: where it writes its own result.
        more: further words of its command line.

    Raises:
        SparkError: it failed; its last lines are in the message.
    """
    words = [
        "--base-url", endpoint.base_url, "--model", endpoint.model, "--tokenizer", str(tokenizer),
        "--pp", str(grid.prompt_tokens), "--tg", str(grid.answer_tokens),
        "--depth", *map(str, grid.depths), "--concurrency", *map(str, grid.concurrencies),
        "--runs", str(grid.runs), "--enable-prefix-caching",
        "--save-result", str(into), "--format", "json", *more,
    ]  # fmt: skip
    trust = {"SSL_CERT_FILE": endpoint.ca, "REQUESTS_CA_BUNDLE": endpoint.ca} if endpoint.ca else {}
    done = subprocess.run(
        [python, "-c", _LAUNCH, *words],
        env={**os.environ, **trust, "SPARK_BENCH_KEY": endpoint.key},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0 or not into.is_file():
        tail = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise SparkError.one("llama-benchy", f"failed:\n{tail}", "mend what it says, run again")
    return cells_of(json.loads(into.read_text()))


def cells_of(data: dict[str, Any]) -> tuple[str, tuple[Cell, ...]]:
    """Read what llama-benchy 0.4 saves."""
    cells = tuple(
        Cell(
            depth_tokens=case["context_size"],
            concurrency=case["concurrency"],
            prompt_tokens=case["prompt_size"],
            generated_tokens=case["response_size"],
            prefill_tokens_per_s=_figure(case, "pp_throughput"),
            decode_tokens_per_s=_figure(case, "tg_throughput"),
            decode_deviation=_figure(case, "tg_throughput", "std"),
            first_response_ms=_figure(case, "ttfr"),
        )
        for case in data["benchmarks"]
        if not case["is_context_prefill_phase"]
    )
    return str(data["version"]), cells


def _figure(case: dict[str, Any], name: str, part: str = "mean") -> float | None:
    found = case.get(name)
    return round(float(found[part]), 3) if found else None
