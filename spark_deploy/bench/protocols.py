"""Benchmark protocols: `seeds` (five prompts), `llama-benchy` and `vllm-bench`."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spark_contract.release import CHAT, Release

from spark_deploy.bench.host import Login
from spark_deploy.bench.result import Answer, Cell, Load
from spark_deploy.config.errors import SparkError
from spark_deploy.ticking import ticking

Note = Callable[[str], None]


class RejectedError(SparkError):
    """The engine rejected a request (HTTP 400)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    base_url: str  # ends in /v1
    model: str
    key: str
    ca: str | None = None

    def __repr__(self) -> str:  # without the key
        return f"Endpoint({self.base_url}, {self.model})"


# --- seeds: the prompts behind the published table (bench_qwen35.sh in
# albond/DGX_Spark_Qwen3.5-122B-A10B-AR-INT4)

_REQUEST_TIMEOUT_S = 1800.0
RUNS = 2  # the first run is the warm-up
# Name, maximum answer tokens, and text of each prompt.
SEEDS = (
    ("Q&A", 256, "What are the main differences between TCP and UDP? Be concise."),
    (
        "code", 512, "Write a Python function that implements binary search on a sorted list. "
        "Include type hints and docstring."
    ),
    (
        "JSON", 1024, "Generate a JSON array of 10 fictional employees with fields: name, age, "
        "department, salary, email, skills (array of 3). Output ONLY valid JSON, no explanation."
    ),
    ("math", 64, "What is 7823 * 4519? Show only the answer."),
    (
        "long code", 2048, "Write a complete Python implementation of a red-black tree with "
        "insert, delete, search, and in-order traversal. Include all rotation methods."
    ),
)  # fmt: skip


def measure_seeds(endpoint: Endpoint, context_tokens: int, note: Note) -> Iterator[Answer]:
    """Yield an answer for each run and prompt; an answer uses at most half of the context."""
    for run in range(1, RUNS + 1):
        for name, tokens, text in SEEDS:
            title = f"seeds, run {run}, {name}"
            with ticking(title, note):
                answer = measure_answer(endpoint, text, min(tokens, context_tokens // 2))
            speed = f"{answer.tokens_per_s:.1f} tok/s"
            note(f"{title}: {answer.completion_tokens} tokens, {speed}, "
                 f"first token after {answer.first_token_s:.2f} s")  # fmt: skip
            yield replace(answer, prompt=name, run=run)


def measure_answer(
    endpoint: Endpoint,
    text: str,
    tokens: int,
    *,
    temperature: float | None = 0,
    show: Callable[[str, bool], None] = lambda piece, is_reasoning: None,
) -> Answer:
    """Stream and time an answer; raise if it is incomplete.

    ``show`` receives each part of the text and whether it is reasoning. A temperature of None
    selects the server's default.
    """
    body = {
        "model": endpoint.model, "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
        **({} if temperature is None else {"temperature": temperature}),
    }  # fmt: skip
    usage, first_s = dict[str, Any](), None
    started = time.monotonic()
    for chunk in send_chat_request(endpoint, body):
        usage = chunk.get("usage") or usage
        for piece, is_reasoning in _delta_texts(chunk):
            first_s = first_s or time.monotonic() - started
            show(piece, is_reasoning)
    wall_s = time.monotonic() - started
    if first_s is None or not usage:
        raise _endpoint_error(endpoint, "the answer has no tokens or no usage block")
    counts = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    return Answer("", 1, tokens, *counts, round(first_s, 4), round(wall_s, 4))


def send_chat_request(endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Send a chat request; yield the chunks of the stream, or the whole response."""
    url = urlsplit(endpoint.base_url)
    address = (url.hostname or "", url.port)
    connection = HTTPConnection(*address, timeout=_REQUEST_TIMEOUT_S)
    if url.scheme == "https":
        trust = ssl.create_default_context(cafile=endpoint.ca)
        connection = HTTPSConnection(*address, timeout=_REQUEST_TIMEOUT_S, context=trust)
    try:
        headers = {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            excerpt = response.read(300).decode(errors="replace")
            error_type = RejectedError if response.status == 400 else SparkError
            raise _endpoint_error(
                endpoint, f"returned HTTP {response.status}: {excerpt}", error_type
            )
        if not body.get("stream"):
            yield json.loads(response.read())
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])
    except (OSError, HTTPException, ValueError) as error:
        raise _endpoint_error(endpoint, f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _endpoint_error(
    endpoint: Endpoint, problem: str, error_type: type[SparkError] = SparkError
) -> SparkError:
    fix = "run `spark-deploy status`, fix the server, then run this command again"
    return error_type.one(endpoint.base_url, problem, fix)


def _delta_texts(chunk: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            yield reasoning, True
        if content := delta.get("content"):
            yield content, False


# --- llama-benchy: the published package, with Spark Arena's grid, version 2

GRID_NAME = "spark-arena-v2"
# The key is in the environment, because every user on this machine can read argv.
_LAUNCH = (
    "import os, sys; sys.argv[1:1] = ['--api-key', os.environ.pop('SPARK_BENCH_KEY')]; "
    "from llama_benchy.__main__ import main; main()"
)


@dataclass(frozen=True, slots=True)
class Grid:
    depths: tuple[int, ...] = (0, 4096, 8192, 16384, 32768, 65535, 100000)
    concurrencies: tuple[int, ...] = (1, 2, 5, 10)
    runs: int = 3
    prompt_tokens: int = 2048
    answer_tokens: int = 128

    def limited_to(self, context_tokens: int) -> Grid:
        room = context_tokens - self.prompt_tokens - self.answer_tokens
        return replace(self, depths=tuple(depth for depth in self.depths if depth <= room))


def find_benchy_python() -> str | None:
    """Return an interpreter with llama-benchy: this Python or that of the installed command."""
    if importlib.util.find_spec("llama_benchy"):
        return sys.executable
    command = shutil.which("llama-benchy")
    if command is None:
        return None
    first = Path(command).read_text(errors="replace").splitlines()[0]
    return first.removeprefix("#!").strip() if first.startswith("#!/") else None


def measure_grid(
    python: str, endpoint: Endpoint, tokenizer: Path, grid: Grid, result: Path,
    extra_options: Sequence[str],
) -> tuple[str, tuple[Cell, ...]]:  # fmt: skip
    """Run llama-benchy, write the ``result`` file, and return the version and cases."""
    options = [
        "--base-url", endpoint.base_url, "--model", endpoint.model, "--tokenizer", str(tokenizer),
        "--pp", str(grid.prompt_tokens), "--tg", str(grid.answer_tokens),
        "--depth", *map(str, grid.depths), "--concurrency", *map(str, grid.concurrencies),
        "--runs", str(grid.runs), "--enable-prefix-caching",
        "--save-result", str(result), "--format", "json", *extra_options,
    ]  # fmt: skip
    trust = {"SSL_CERT_FILE": endpoint.ca, "REQUESTS_CA_BUNDLE": endpoint.ca} if endpoint.ca else {}
    process = subprocess.run(
        [python, "-c", _LAUNCH, *options],
        env={**os.environ, **trust, "SPARK_BENCH_KEY": endpoint.key},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if process.returncode != 0 or not result.is_file():
        tail = "\n".join(process.stdout.strip().splitlines()[-8:])
        fix = "fix this error, then run the benchmark again"
        raise SparkError.one("llama-benchy", f"failed:\n{tail}", fix)
    return parse_cells(json.loads(result.read_text()))


def parse_cells(data: dict[str, Any]) -> tuple[str, tuple[Cell, ...]]:
    def figure(case: dict[str, Any], name: str, part: str = "mean") -> float | None:
        return round(float(case[name][part]), 3) if case.get(name) else None

    cells = tuple(
        Cell(
            case["context_size"], case["concurrency"], case["prompt_size"], case["response_size"],
            figure(case, "pp_throughput"), figure(case, "tg_throughput"),
            figure(case, "tg_throughput", "std"), figure(case, "ttfr"),
        )
        for case in data["benchmarks"]
        if not case["is_context_prefill_phase"]
    )  # fmt: skip
    return str(data["version"]), cells


# --- vllm-bench: `vllm bench serve` from the engine image, on the host

REQUESTS, WARM_UPS = 10, 3
_BENCH_TIMEOUT_S = 3600.0
_NO_BENCH = "no vllm bench serve in this image"
# The container has no GPU and downloads nothing. It reads the key from standard input, because
# docker users can read a container's environment.
_CONTAINER = (
    "docker", "run", "--rm", "-i", "--pull", "never", "--network", "host", "--log-driver", "none",
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only",
    "--tmpfs", "/tmp:rw,exec,nosuid,nodev,mode=1777,size=1g", "--entrypoint", "sh",
    *(word for text in (
        "HOME=/tmp", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1",
        "NVIDIA_VISIBLE_DEVICES=void",
    ) for word in ("--env", text)),
)  # fmt: skip
_OUT = "/tmp/result.json"


@dataclass(frozen=True, slots=True)
class LoadCase:
    concurrency: int = 1
    prompt_tokens: int = 8192
    answer_tokens: int = 256

    @property
    def requests(self) -> int:
        return REQUESTS * self.concurrency

    def limited_to(self, context_tokens: int) -> LoadCase:
        """Return the case with prompts that leave room for the answer and chat template."""
        room = context_tokens - self.answer_tokens - 64
        return replace(self, prompt_tokens=min(self.prompt_tokens, room))


def measure_loads(
    login: Login, release: Release, port: int, key_path: str, cases: list[LoadCase], note: Note
) -> tuple[str | None, tuple[Load, ...]]:
    """Run the cases in turn; return the results, and vLLM's version or None if it is missing."""
    version, loads = None, list[Load]()
    for case in cases:
        seed, plural = int(time.time()), "s" * (case.concurrency > 1)
        title = f"vllm-bench, {case.concurrency} client{plural}"
        note(
            f"{title}: running vllm bench serve on the host, {WARM_UPS + case.requests} prompts of "
            f"{case.prompt_tokens} tokens with answers of {case.answer_tokens}"
        )
        with ticking(title, note):
            output = login.run(load_script(release, port, key_path, case, seed), _BENCH_TIMEOUT_S)
        if output.strip() == _NO_BENCH:
            return None, ()
        version, _, document = output.partition("\n")
        load = parse_load(json.loads(document), case, seed)
        first_token = f"first token after {load.first_token_ms / 1000:.2f} s"
        note(f"{title}: {load.output_tokens_per_s:.1f} tok/s, {first_token}")
        if failed := load.requests - load.completed:
            problem = f"{failed} of {load.requests} requests failed"
            raise SparkError.one(login.name, problem, "run `spark-deploy logs` to see the reason")
        loads.append(load)
    return version, tuple(loads)


def load_script(release: Release, port: int, key_path: str, case: LoadCase, seed: int) -> str:
    """Return a shell script that prints vLLM's version and the result, or ``_NO_BENCH``."""
    bench = shlex.join([
        "vllm", "bench", "serve", "--backend", "openai-chat",
        "--base-url", f"http://127.0.0.1:{port}", "--endpoint", CHAT,
        "--model", release.names[0], "--tokenizer", "/model", "--dataset-name", "random",
        "--random-input-len", str(case.prompt_tokens),
        "--random-output-len", str(case.answer_tokens),
        "--num-prompts", str(case.requests), "--num-warmups", str(WARM_UPS),
        "--max-concurrency", str(case.concurrency), "--seed", str(seed), "--ignore-eos",
        "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm",
        "--save-result", "--result-filename", _OUT,
    ])  # fmt: skip
    no_bench = f"echo {shlex.quote(_NO_BENCH)}"
    inner = (
        "IFS= read -r OPENAI_API_KEY; export OPENAI_API_KEY; "
        f"command -v vllm >/dev/null || {{ {no_bench}; exit 0; }}; {bench} >&2 || exit 1; "
        "$(head -n 1 $(command -v vllm) | cut -c3-) -c "
        "'import importlib.metadata as m; print(m.version(\"vllm\"))' || exit 1; "
        f"cat {_OUT}"
    )
    mount = f"type=bind,source={release.tree.path},target=/model,readonly"
    container = shlex.join([*_CONTAINER, "--mount", mount, release.image.tag, "-c", inner])
    # Exit code 127 means that the image has no shell.
    return f"{container} < {shlex.quote(key_path)} || {{ [ $? -eq 127 ] || exit 1; {no_bench}; }}"


def parse_load(data: dict[str, Any], case: LoadCase, seed: int) -> Load:
    return Load(
        case.concurrency, case.prompt_tokens, case.answer_tokens, case.requests,
        int(data["completed"]), seed, int(data["total_input_tokens"]),
        int(data["total_output_tokens"]), round(float(data["output_throughput"]), 3),
        *(round(float(data[f"mean_{name}_ms"]), 3) for name in ("ttft", "tpot", "e2el")),
    )  # fmt: skip
