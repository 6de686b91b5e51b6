"""What an engine prints while it starts, read for what it says of kernels, times and sizes.

vLLM 0.33: kernels/linear, gdn, fused_moe, kv_cache_utils.py, gpu_worker.py, gpu_model_runner.py,
monitor.py, default_loader.py. Only whole messages of these forms are taken, and none after the
start: later lines may hold what somebody asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_GIB = 1 << 30
_LINES = 60  # as many different ones a start has at most; layers repeat theirs
_PREFIX = re.compile(
    r"^(?:\([\w-]+ pid=\d+\) )?(?:INFO|WARNING) (?:[\d-]+ [\d:]+ )?\[[\w./-]+:\d+\] +(.*)$"
)
_STARTED = "Application startup complete"
_PLAIN = r"[\w .,:;'/()\[\]=%+<>-]{3,200}"
_KERNEL = re.compile(rf"(?:(?:Using|Selected) {_PLAIN}|spark[: _]{_PLAIN}|CUDAGraphMode\.{_PLAIN})")
_ABOUT = re.compile(
    r"kernel|backend|GEMM|Method|MoE|[Aa]ttention|Experts|Runner|prefill|layout|cudagraph|^spark"
    r"|WNA16|Fp8|FP8|FP4"
)
_TIMES = {
    "weights": re.compile(r"Loading weights took ([\d.]+) seconds"),
    "load": re.compile(r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds"),
    "compile": re.compile(r"torch\.compile took ([\d.]+) s"),
    "profile": re.compile(r"Initial profiling/warmup run took ([\d.]+) s"),
    "graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    "init": re.compile(r"init engine \(.*\) took ([\d.]+) s"),
}
_SIZES = {
    "model": re.compile(r"Model loading took ([\d.]+) GiB"),
    "graphs": re.compile(r"Graph capturing finished in [\d.]+ secs, took (-?[\d.]+) GiB"),
    "kv_cache": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
}
_TOKENS = re.compile(r"\b[GC]PU KV cache size: ([\d,]+) tokens")


def messages(log: Iterable[str]) -> Iterator[str]:
    """Yield what the engine said until it had started, without what stands before each message."""
    for line in log:
        if _STARTED in line:
            return
        found = _PREFIX.match(line)
        if found:
            yield found[1].strip()


def kernel_lines(said: Iterable[str]) -> tuple[str, ...]:
    """Return the messages that name kernels and backends, each once, in their order."""
    found = (one for one in said if _KERNEL.fullmatch(one) and _ABOUT.search(one))
    return tuple(dict.fromkeys(found))[:_LINES]


def times_s(said: Iterable[str]) -> dict[str, float]:
    """Return how long the steps took; the drafter's are added to the model's."""
    return _summed(said, _TIMES, digits=3)


def sizes_bytes(said: Iterable[str]) -> dict[str, int]:
    """Return what the engine counted."""
    return {name: int(gib * _GIB) for name, gib in _summed(said, _SIZES, digits=6).items()}


def kv_cache_tokens(said: Iterable[str]) -> int | None:
    """Return how many tokens fit into the cache, as the engine counts them."""
    found = [match[1] for one in said if (match := _TOKENS.search(one))]
    return int(found[-1].replace(",", "")) if found else None


def _summed(
    said: Iterable[str], patterns: dict[str, re.Pattern[str]], digits: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in said:
        for name, pattern in patterns.items():
            if match := pattern.search(one):
                found[name] = round(found.get(name, 0.0) + float(match[1]), digits)
    return found
