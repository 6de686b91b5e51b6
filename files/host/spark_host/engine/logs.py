"""The engine's start log and the kernel log, parsed for phases, kernels, sizes and faults.

Formats of vLLM 0.33 (kernels/linear, gdn, fused_moe, kv_cache_utils.py, gpu_worker.py,
gpu_model_runner.py, monitor.py, default_loader.py). Lines after the start may contain prompts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract import receipts
from spark_contract.machine import GIB
from spark_contract.release import Release

from spark_host.engine.memory import available_bytes
from spark_host.system import programs

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


def startup_messages(lines: Iterable[str]) -> Iterator[str]:
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
    return _sum_matches(messages, _TIMES, digits=3)


def sizes_bytes(messages: Iterable[str]) -> dict[str, int]:
    return {name: int(gib * GIB) for name, gib in _sum_matches(messages, _SIZES, digits=6).items()}


def kv_cache_tokens(messages: Iterable[str]) -> int | None:
    sizes = [match[1] for text in messages if (match := _TOKENS.search(text))]
    return int(sizes[-1].replace(",", "")) if sizes else None


def _sum_matches(
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


# Messages that begin a phase of a start.
_FIRST_MESSAGES = {
    "weights": r"Starting to load model|Loading model from scratch|Loading safetensors checkpoint",
    "compile": r"Model loading took|Dynamo bytecode transform|torch\.compile took",
    "graphs": r"[GC]PU KV cache size: |Capturing CUDA graphs|Graph capturing finished",
    "ready": r"init engine \(|Application startup complete",
}
_MESSAGES = {phase: re.compile(pattern) for phase, pattern in _FIRST_MESSAGES.items()}
_TEXTS = {
    "image": "starting the container",
    "weights": "loading weights",
    "compile": "compiling",
    "graphs": "capturing CUDA graphs",
    "ready": "starting the API",
}
_PHASES = tuple(_TEXTS)


@dataclass(slots=True)
class StartPhases:
    """Follows the log of a start; times are seconds since the container started."""

    release: Release
    began_s: dict[str, float] = field(default_factory=lambda: {_PHASES[0]: 0.0})
    updated_s: float = 0.0
    _weight_bytes: int = 0
    _available_bytes: int = 0  # before the weights

    @property
    def current(self) -> str:
        return next(reversed(self.began_s))

    def update(self, lines: Iterable[str], now_s: float) -> None:
        """Enter the last phase in the log; ignore earlier phases, which a drafter repeats."""
        self.updated_s = now_s
        text = "\n".join(lines)
        later = _PHASES[_PHASES.index(self.current) + 1 :]
        reached = next((name for name in reversed(later) if _MESSAGES[name].search(text)), None)
        if reached:
            self.began_s[reached] = now_s
        if reached == "weights":
            self._weight_bytes = weight_bytes(self.release)
            self._available_bytes = available_bytes()

    def text(self, now_s: float) -> str:
        parts = [_TEXTS[self.current]]
        if self.current == "weights" and (total := self._weight_bytes):
            loaded = min(max(0, self._available_bytes - available_bytes()), total)
            parts.append(f"{loaded / 1e9:.1f} of {total / 1e9:.1f} GB")
        return ", ".join([*parts, f"{now_s - self.began_s[self.current]:.0f} s"])

    def durations_s(self, end_s: float) -> dict[str, float]:
        ends = [*list(self.began_s.values())[1:], end_s]
        return {
            phase: round(max(0.0, end - began), 1)
            for (phase, began), end in zip(self.began_s.items(), ends, strict=True)
        }


def weight_bytes(release: Release) -> int:
    """Return the size of the weights that a member loads into memory; 0 if unknown."""
    if release.check.portable:  # the engine dequantizes the weights
        return 0
    tree_receipts = (receipts.find_receipt(Path(tree.path)) for tree in release.trees)
    files = [file for receipt in tree_receipts if receipt for file in receipt.files]
    total = sum(file.size_bytes for file in files if file.path.endswith(".safetensors"))
    return total // (len(release.cluster.members) if release.cluster else 1)
