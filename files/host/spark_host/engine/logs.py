"""The engine's start log and the kernel log, parsed for kernels, times, sizes and faults.

Formats of vLLM 0.33 (kernels/linear, gdn, fused_moe, kv_cache_utils.py, gpu_worker.py,
gpu_model_runner.py, monitor.py, default_loader.py). Lines after the start may contain prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from spark_host.system import programs

_GIB = 1 << 30
_MAX_KERNEL_LINES = 60
_MAX_ERROR_LENGTH = 300
_PREFIX = re.compile(
    r"^(?:\([\w-]+ pid=\d+\) )?(?:INFO|WARNING) (?:[\d-]+ [\d:]+ )?\[[\w./-]+:\d+\] +(.*)$"
)
_ERROR_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR [\d-]+ [\d:]+ \[[\w./-]+:\d+\] +)?")
_CONSEQUENCE = "Engine core initialization failed"  # follows the actual error
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


def start_messages(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if _STARTED in line:
            return
        if match := _PREFIX.match(line):
            yield match[1].strip()


def error_message(lines: Iterable[str]) -> str:
    """Return the error that the engine logged before a failed start, without prefixes, or ""."""
    texts = [_ERROR_PREFIX.sub("", line.strip()) for line in lines if _CONSEQUENCE not in line]
    raised = [text for text in texts if re.match(r"(?:\w+\.)*\w*(?:Error|Exception)\b", text)]
    others = [text for text in texts if re.search(r"\berror\b", text, re.IGNORECASE)]
    return (raised or others or [""])[-1][:_MAX_ERROR_LENGTH]


def kernel_lines(messages: Iterable[str]) -> tuple[str, ...]:
    matching = (text for text in messages if _KERNEL.fullmatch(text) and _ABOUT.search(text))
    return tuple(dict.fromkeys(matching))[:_MAX_KERNEL_LINES]


def times_s(messages: Iterable[str]) -> dict[str, float]:
    return _sums(messages, _TIMES, digits=3)


def sizes_bytes(messages: Iterable[str]) -> dict[str, int]:
    return {name: int(gib * _GIB) for name, gib in _sums(messages, _SIZES, digits=6).items()}


def kv_cache_tokens(messages: Iterable[str]) -> int | None:
    sizes = [match[1] for text in messages if (match := _TOKENS.search(text))]
    return int(sizes[-1].replace(",", "")) if sizes else None


def _sums(
    messages: Iterable[str], patterns: dict[str, re.Pattern[str]], digits: int
) -> dict[str, float]:
    sums: dict[str, float] = {}
    for text in messages:
        for name, pattern in patterns.items():
            if match := pattern.search(text):
                sums[name] = round(sums.get(name, 0.0) + float(match[1]), digits)
    return sums


NO_MEMORY = "no_memory"  # reported by the GPU driver
_FAULTS = {
    "xid": re.compile(r"NVRM: Xid"),
    NO_MEMORY: re.compile(r"NV_ERR_NO_MEMORY"),
    "oom_kills": re.compile(r"[Oo]ut of memory: Killed process"),
}
_KERNEL_LOG_BYTES = 16 << 20
_KERNEL_LOG_TIMEOUT_S = 30.0


def count_kernel_faults(last_s: float | None = None) -> dict[str, int]:
    argv = ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat"]
    if last_s is not None:
        argv.append(f"--since=-{last_s:.0f}s")
    try:
        text = programs.read_output_start(argv, _KERNEL_LOG_TIMEOUT_S, _KERNEL_LOG_BYTES)
    except OSError:
        text = None
    return parse_kernel_faults(text or "")


def parse_kernel_faults(text: str) -> dict[str, int]:
    return {name: len(pattern.findall(text)) for name, pattern in _FAULTS.items()}
