"""Measure on a host: login, tunnel, samples, `vllm bench serve`, and progress notes."""

import json
import re
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spark_contract import tool
from spark_contract.documents import parse
from spark_contract.paths import Paths, release_file
from spark_contract.release import CHAT, Release
from spark_contract.status import Status

from spark_deploy.bench.result import Load, Sample, Served
from spark_deploy.config.errors import SparkError, unreachable
from spark_deploy.inventory.connections import CHECK_NETWORK, ssh_reason

Note = Callable[[str], None]
TICK_S = 5.0  # between notes
_COMMAND_TIMEOUT_S = 60.0
_TUNNEL_TIMEOUT_S = 15.0
# Prints CELSIUS,WATTS or nothing; read by `parse_gpu_sensors`.
GPU_SENSORS = (
    "$(nvidia-smi --query-gpu=temperature.gpu,power.draw --format=csv,noheader,nounits "
    "2>/dev/null | tr -d ' ')"
)
_SAMPLE_SCRIPT = (
    "while sleep 1; do "
    f"echo $(date +%s.%N) $(awk '/^MemAvailable/{{print $2}}' /proc/meminfo) {GPU_SENSORS}; done"
)
_TOKENIZER = "tokenizer.json tokenizer_config.json vocab.json merges.txt config.json"
SYSTEM_SCRIPT = """. /etc/os-release; echo "os=$PRETTY_NAME"
echo "product=$(cat /sys/class/dmi/id/product_name 2>/dev/null)"
echo "gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)"
echo "cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\\([0-9.]*\\).*/\\1/p')" """
_COUNTER = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\S* (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class Login:
    """Runs commands on a host as root."""

    name: str
    ssh: tuple[str, ...]  # empty for this machine
    sudo: bool

    def argv(self, script: str) -> list[str]:
        argv = [*(["sudo", "-n"] if self.sudo else []), "sh", "-c", script]
        return [*self.ssh, shlex.join(argv)] if self.ssh else argv

    def run(self, script: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Run a script and return its output; raise SparkError with the error output on failure."""
        try:
            result = subprocess.run(
                self.argv(script), capture_output=True, text=True, timeout=timeout_s, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            problem = f"no answer within {timeout_s:g} s"
            raise SparkError.single(self.name, problem, CHECK_NETWORK) from None
        if result.returncode != 0:
            if reason := ssh_reason(result.stderr):
                raise SparkError([unreachable(self.name, *reason)])
            problem = result.stderr.strip() or f"exit code {result.returncode}"
            raise SparkError.single(self.name, problem, "run `spark-deploy status`")
        return result.stdout


def read_served(login: Login, service: str) -> tuple[Served, Release]:
    status = parse(Status, login.run(tool.command_line(tool.STATUS)))
    state = status.services.get(service)
    if state is None or state.active is None:
        fix = "run `spark-deploy start`, or deploy it with `spark-deploy up`"
        raise SparkError.single(login.name, f"service {service} is stopped", fix)
    release = parse(Release, login.run(f"cat {shlex.quote(release_file(state.active))}"))
    system = dict(
        line.split("=", 1) for line in login.run(SYSTEM_SCRIPT).splitlines() if "=" in line
    )
    reported = {**status.versions, **system}
    versions = {name: str(version).strip() for name, version in reported.items() if version}
    options = (word.partition("=") for word in release.engine.docker_args)
    cpus = next((value for option, _, value in options if option == "--cpuset-cpus"), None)
    served = Served(
        login.name, release.name, release.model, release.profile, release.image.tag,
        release.tree.path, versions, release.check.portable, cpus,
    )  # fmt: skip
    return served, release


def read_draft_counters(login: Login, service: str) -> tuple[int, int]:
    socket_path = Paths(Path("/")).engine_socket(service)
    text = login.run(f"curl -sS -m 20 --unix-socket {socket_path} http://engine/metrics")
    counts = Counter[str]()
    for kind, value in _COUNTER.findall(text):
        counts[kind] += int(float(value))
    return counts["draft"], counts["accepted"]


@contextmanager
def ticking(
    text: str | Callable[[], str],
    note: Callable[[str], None],
    every_s: float | None = None,
    *,
    first_s: float | None = None,
) -> Iterator[None]:
    """Print ``text`` and the elapsed time every ``every_s`` seconds, first after ``first_s``."""
    started, done = time.monotonic(), threading.Event()

    def tick() -> None:
        wait_s = first_s or every_s or TICK_S
        while not done.wait(wait_s):
            current = text if isinstance(text, str) else text()
            note(f"{current}: {time.monotonic() - started:.0f} s")
            wait_s = every_s or TICK_S

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def copy_tokenizer(login: Login, checkpoint: str) -> Iterator[Path]:
    """Copy a checkpoint's tokenizer into a temporary folder."""
    script = f"cd {shlex.quote(checkpoint)} && tar -chf - $(ls {_TOKENIZER} 2>/dev/null)"
    with tempfile.TemporaryDirectory(prefix="spark-bench-") as folder:
        sender = subprocess.Popen(
            login.argv(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-xf", "-", "-C", folder], stdin=sender.stdout, check=True)
        sender.wait(timeout=_COMMAND_TIMEOUT_S)
        yield Path(folder)


def tunnel_argv(ssh: Sequence[str], local_port: int, port: int) -> list[str]:
    # If the local port is in use, ssh would continue without forwarding it, or forward only IPv6,
    # so clients would send the key to another program. The option and the address prevent this.
    forward = f"127.0.0.1:{local_port}:127.0.0.1:{port}"
    return [ssh[0], "-N", "-o", "ExitOnForwardFailure=yes", "-L", forward, *ssh[1:]]


@contextmanager
def open_tunnel(login: Login, port: int) -> Iterator[int]:
    if not login.ssh:
        yield port
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        local_port = probe.getsockname()[1]
    argv = tunnel_argv(login.ssh, local_port, port)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _TUNNEL_TIMEOUT_S
        while not is_open(local_port):
            if time.monotonic() > deadline or process.poll() is not None:
                problem, fix = "cannot open a tunnel to the gateway", "run `spark-deploy connect`"
                raise SparkError.single(login.name, problem, fix)
            time.sleep(0.1)
        yield local_port
    finally:
        process.terminate()
        process.wait(timeout=20)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def sample_host(login: Login) -> Iterator[list[Sample]]:
    """Sample the host every second; the list is filled when the context closes."""
    samples: list[Sample] = []
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(login.argv(_SAMPLE_SCRIPT), stdin=subprocess.DEVNULL, stdout=out)
        try:
            yield samples
        finally:
            process.terminate()
            process.wait(timeout=20)
            out.seek(0)
            samples.extend(parse_samples(out))


def parse_samples(lines: Iterable[str]) -> Iterator[Sample]:
    """Parse `TIME KILOBYTES [CELSIUS,WATTS]`; skip incomplete lines."""
    started: float | None = None
    for line in lines:
        fields = line.split()
        if len(fields) < 2 or not fields[1].isdigit():
            continue
        time_s, kilobytes = float(fields[0]), int(fields[1])
        sensors = fields[2] if len(fields) > 2 else ""
        started = time_s if started is None else started
        yield Sample(round(time_s - started, 1), kilobytes * 1024, *parse_gpu_sensors(sensors))


def parse_gpu_sensors(text: str) -> tuple[float | None, float | None]:
    """Return temperature and power from the output of ``GPU_SENSORS``; a GB10 may report [N/A]."""
    temperature, power, *_ = [*text.split(","), ""]
    return _parse_number(temperature), _parse_number(power)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- protocol vllm-bench: `vllm bench serve` from the engine image

REQUESTS, WARM_UPS = 10, 3
_TEMPLATE_TOKENS = 64  # enough for the chat template
_BENCH_TIMEOUT_S = 3600.0
_NO_BENCH = "this image does not provide `vllm bench serve`"
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

    def limited_to(self, context_tokens: int) -> "LoadCase":
        """Return the case with prompts that leave room for answer and chat template."""
        room = context_tokens - self.answer_tokens - _TEMPLATE_TOKENS
        return replace(self, prompt_tokens=min(self.prompt_tokens, room))


def measure_loads(
    login: Login, release: Release, port: int, key_path: str, cases: list[LoadCase], note: Note
) -> tuple[str | None, tuple[Load, ...]]:
    """Run the cases in turn; return vLLM's version (None if vLLM is missing) and the results."""
    version, loads = None, list[Load]()
    for case in cases:
        seed, plural = int(time.time()), "s" * (case.concurrency > 1)
        title = f"vllm-bench, {case.concurrency} client{plural}"
        note(
            f"{title}: running vllm bench serve on the host, {WARM_UPS + case.requests} prompts of "
            f"{case.prompt_tokens} tokens with answers of {case.answer_tokens}"
        )
        with ticking(title, note):
            output = login.run(
                load_test_script(release, port, key_path, case, seed), _BENCH_TIMEOUT_S
            )
        if output.strip() == _NO_BENCH:
            return None, ()
        version, _, document = output.partition("\n")
        load = parse_load(json.loads(document), case, seed)
        first_token = f"first token after {load.first_token_ms / 1000:.2f} s"
        note(f"{title}: {load.output_tokens_per_s:.1f} tok/s, {first_token}")
        if failed := load.requests - load.completed:
            problem = f"{failed} of {load.requests} requests failed"
            raise SparkError.single(
                login.name, problem, "run `spark-deploy logs` to see the reason"
            )
        loads.append(load)
    return version, tuple(loads)


def load_test_script(release: Release, port: int, key_path: str, case: LoadCase, seed: int) -> str:
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
    # The first line of `vllm` names the Python interpreter that can import vLLM.
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
