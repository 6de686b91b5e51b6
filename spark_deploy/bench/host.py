import re
import shlex
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spark_contract import tool
from spark_contract.documents import parse
from spark_contract.paths import Paths, release_file
from spark_contract.release import Release
from spark_contract.status import Status

from spark_deploy.bench.result import Sample, Served
from spark_deploy.config.errors import SparkError, unreachable
from spark_deploy.inventory.connections import ssh_reason

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
        result = subprocess.run(
            self.argv(script), capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if result.returncode != 0:
            if reason := ssh_reason(result.stderr):
                raise SparkError([unreachable(self.name, *reason)])
            problem = result.stderr.strip() or f"exit code {result.returncode}"
            raise SparkError.one(self.name, problem, "run `spark-deploy status`")
        return result.stdout


def read_served(login: Login, service: str) -> tuple[Served, Release]:
    status = parse(Status, login.run(tool.command_line(tool.STATUS)))
    state = status.services.get(service)
    if state is None or state.active is None:
        fix = "run `spark-deploy start`, or deploy it with `spark-deploy up`"
        raise SparkError.one(login.name, f"service {service} is stopped", fix)
    release = parse(Release, login.run(f"cat {shlex.quote(release_file(state.active))}"))
    system = dict(
        line.split("=", 1) for line in login.run(SYSTEM_SCRIPT).splitlines() if "=" in line
    )
    versions = {k: str(v).strip() for k, v in {**status.versions, **system}.items() if v}
    options = (word.partition("=") for word in release.engine.docker_args)
    served = Served(
        login.name, release.name, release.model, release.profile, release.image.tag,
        release.tree.path, versions, release.check.portable,
        next((cpus for option, _, cpus in options if option == "--cpuset-cpus"), None),
    )  # fmt: skip
    return served, release


def read_draft_counters(login: Login, service: str) -> tuple[int, int]:
    engine = Paths(Path("/")).engine_socket(service)
    text = login.run(f"curl -sS -m 20 --unix-socket {engine} http://engine/metrics")
    counts = Counter[str]()
    for kind, value in _COUNTER.findall(text):
        counts[kind] += int(float(value))
    return counts["draft"], counts["accepted"]


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
    # If the port is in use, ssh would continue without it (or with IPv6 only) and clients would
    # send the key to another program. ExitOnForwardFailure and the explicit address prevent this.
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
        while not _is_open(local_port):
            if time.monotonic() > deadline or process.poll() is not None:
                problem, fix = "cannot open a tunnel to the gateway", "run `spark-deploy connect`"
                raise SparkError.one(login.name, problem, fix)
            time.sleep(0.1)
        yield local_port
    finally:
        process.terminate()
        process.wait(timeout=20)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def sample_host(login: Login) -> Iterator[list[Sample]]:
    """Sample the host every second; the list is complete when the context ends."""
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
        started = float(fields[0]) if started is None else started
        gpu = parse_gpu_sensors(fields[2] if len(fields) > 2 else "")
        yield Sample(round(float(fields[0]) - started, 1), int(fields[1]) * 1024, *gpu)


def parse_gpu_sensors(text: str) -> tuple[float | None, float | None]:
    """Return temperature and power from the output of ``GPU_SENSORS``; a GB10 may report [N/A]."""
    values: list[float | None] = []
    for word in [*text.split(","), ""][:2]:
        try:
            values.append(float(word))
        except ValueError:
            values.append(None)
    return values[0], values[1]
