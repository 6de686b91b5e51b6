"""Protocol `vllm-bench`: `vllm bench serve` of the engine's own image, run on the host itself."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spark_contract.release import CHAT, Release

from spark_deploy.bench.host import Login
from spark_deploy.bench.result import Load
from spark_deploy.config.errors import SparkError
from spark_deploy.ticking import ticking

PROMPT_TOKENS, ANSWER_TOKENS = 8192, 256
REQUESTS, WARM_UPS = 10, 3
LIMIT_S = 3600.0
_ABSENT = "no vllm bench serve in this image"
# The GPU is the engine's; nothing of the network is asked; the key comes by standard input, for
# an environment given to docker can be read by everyone who may ask docker.
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
class Case:
    """How many clients ask for what."""

    concurrency: int = 1
    prompt_tokens: int = PROMPT_TOKENS
    answer_tokens: int = ANSWER_TOKENS

    @property
    def requests(self) -> int:
        """How often it is asked: each client ten times."""
        return REQUESTS * self.concurrency

    def fitting(self, context_tokens: int) -> Case:
        """Return it with prompts that leave room for answer and template."""
        room = context_tokens - self.answer_tokens - 64
        return Case(self.concurrency, min(self.prompt_tokens, room), self.answer_tokens)


def measure(
    login: Login, release: Release, port: int, key_path: str, cases: list[Case],
    say: Callable[[str], None],
) -> tuple[str | None, tuple[Load, ...]]:  # fmt: skip
    """Run the cases one after the other.

    Returns:
        The engine's version and what was found; ``None`` and nothing where the image has no such
        program.

    Raises:
        SparkError: a case failed, or requests of it did.
    """
    version: str | None = None
    loads = []
    for case in cases:
        seed, many = int(time.time()), "s" * (case.concurrency > 1)
        title = f"vllm-bench, {case.concurrency} client{many}"
        say(
            f"{title}: vllm bench serve runs on the host; {WARM_UPS + case.requests} prompts of "
            f"{case.prompt_tokens} tokens, answers of {case.answer_tokens}"
        )
        with ticking(title, say):
            told = login.told(script(release, port, key_path, case, seed), LIMIT_S)
        if told.strip() == _ABSENT:
            return None, ()
        version, _, document = told.partition("\n")
        load = load_of(json.loads(document), case, seed)
        say(
            f"{title}: {load.output_tokens_per_s:.1f} tok/s, "
            f"first token after {load.first_token_ms / 1000:.2f} s"
        )
        if load.completed < load.requests:
            what = f"{load.requests - load.completed} of {load.requests} requests failed"
            raise SparkError.one(login.name, what, "`spark-deploy logs` says why")
        loads.append(load)
    return version, tuple(loads)


def script(release: Release, port: int, key_path: str, case: Case, seed: int) -> str:
    """Return what the host runs; it prints a version and the result, or that there is none."""
    inner = (
        "IFS= read -r OPENAI_API_KEY; export OPENAI_API_KEY; "
        f"command -v vllm >/dev/null || {{ echo {shlex.quote(_ABSENT)}; exit 0; }}; "
        f"{shlex.join(_arguments(release, port, case, seed))} >&2 || exit 1; "
        "$(head -n 1 $(command -v vllm) | cut -c3-) -c "
        "'import importlib.metadata as m; print(m.version(\"vllm\"))' || exit 1; "
        f"cat {_OUT}"
    )
    mount = f"type=bind,source={release.tree.path},target=/model,readonly"
    words = [*_CONTAINER, "--mount", mount, release.image.tag, "-c", inner]
    # 127: the image has no shell, as that of a stand-in for the engine.
    absent = f"[ $? -eq 127 ] || exit 1; echo {shlex.quote(_ABSENT)}"
    return f"{shlex.join(words)} < {shlex.quote(key_path)} || {{ {absent}; }}"


def _arguments(release: Release, port: int, case: Case, seed: int) -> list[str]:
    return [
        "vllm", "bench", "serve", "--backend", "openai-chat",
        "--base-url", f"http://127.0.0.1:{port}", "--endpoint", CHAT,
        "--model", release.names[0], "--tokenizer", "/model", "--dataset-name", "random",
        "--random-input-len", str(case.prompt_tokens),
        "--random-output-len", str(case.answer_tokens),
        "--num-prompts", str(case.requests), "--num-warmups", str(WARM_UPS),
        "--max-concurrency", str(case.concurrency), "--seed", str(seed), "--ignore-eos",
        "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm",
        "--save-result", "--result-filename", _OUT,
    ]  # fmt: skip


def load_of(found: dict[str, Any], case: Case, seed: int) -> Load:
    """Read what `vllm bench serve` saves."""
    return Load(
        case.concurrency, case.prompt_tokens, case.answer_tokens, case.requests,
        int(found["completed"]), seed, int(found["total_input_tokens"]),
        int(found["total_output_tokens"]), round(float(found["output_throughput"]), 3),
        *(round(float(found[f"mean_{name}_ms"]), 3) for name in ("ttft", "tpot", "e2el")),
    )  # fmt: skip


def cases_of(clients: Sequence[int], context_tokens: int, **sizes: int) -> Iterator[Case]:
    """Yield a case for each number of clients."""
    for concurrency in clients or [1]:
        yield Case(concurrency, **sizes).fitting(context_tokens)
