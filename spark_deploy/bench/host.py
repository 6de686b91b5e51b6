"""The host while it is measured: the way to its gateway, its memory, temperature and counters."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spark_contract import tool
from spark_contract.documents import parse
from spark_contract.paths import Paths, release_file
from spark_contract.release import Release
from spark_contract.status import Status

from spark_deploy.bench.result import Sample, Served
from spark_deploy.config.errors import SparkError

_LIMIT_S = 60.0
_WAIT_S = 15.0
_EVERY_S = 1
# Prints CELSIUS,WATTS, or nothing; read by `heat`.
HEAT = (
    "$(nvidia-smi --query-gpu=temperature.gpu,power.draw --format=csv,noheader,nounits "
    "2>/dev/null | tr -d ' ')"
)
_LOOK = (
    f"while sleep {_EVERY_S}; do "
    f"echo $(date +%s.%N) $(awk '/^MemAvailable/{{print $2}}' /proc/meminfo) {HEAT}; done"
)
_TOKENIZER = "tokenizer.json tokenizer_config.json vocab.json merges.txt config.json"
SYSTEM = """. /etc/os-release; echo "os=$PRETTY_NAME"
echo "product=$(cat /sys/class/dmi/id/product_name 2>/dev/null)"
echo "gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)"
echo "cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\\([0-9.]*\\).*/\\1/p')" """
_COUNTER = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\S* (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class Login:
    """How commands reach a host; no words at all: this machine."""

    name: str
    ssh: tuple[str, ...]
    sudo: bool

    def argv(self, script: str) -> list[str]:
        """Return the command line that runs a script there as root."""
        words = [*(["sudo", "-n"] if self.sudo else []), "sh", "-c", script]
        return [*self.ssh, shlex.join(words)] if self.ssh else words

    def told(self, script: str, limit_s: float = _LIMIT_S) -> str:
        """Return what a script prints.

        Raises:
            SparkError: it failed.
        """
        done = subprocess.run(
            self.argv(script), capture_output=True, text=True, timeout=limit_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != 0:
            what = done.stderr.strip() or f"exit code {done.returncode}"
            raise SparkError.one(self.name, what, "`spark-deploy status` says how the host is")
        return done.stdout


def served_by(login: Login, service: str) -> tuple[Served, Release]:
    """Return what the host serves, and its whole release.

    Raises:
        SparkError: nothing serves.
    """
    status = parse(Status, login.told(tool.line(tool.STATUS)))
    found = status.services.get(service)
    if found is None or found.active is None:
        fix = "run deploy.py, or `spark-deploy start`"
        raise SparkError.one(login.name, "serves nothing that could be measured", fix)
    path = release_file(found.active)
    release = parse(Release, login.told(f"cat {shlex.quote(path)}"))
    asked = dict(line.split("=", 1) for line in login.told(SYSTEM).splitlines() if "=" in line)
    told = {**status.versions, **asked}
    versions = {key: str(value).strip() for key, value in told.items() if value}
    served = Served(
        login.name, release.name, release.model, release.profile, release.image.tag,
        release.tree.path, versions, release.check.portable,
    )  # fmt: skip
    return served, release


def drafts(login: Login, service: str) -> tuple[int, int]:
    """Return how many tokens the engine drafted since it started, and accepted of them."""
    engine = Paths(Path("/")).engine_socket(service)
    text = login.told(f"curl -sS -m 20 --unix-socket {engine} http://engine/metrics")
    found: dict[str, float] = {}
    for kind, value in _COUNTER.findall(text):
        found[kind] = found.get(kind, 0.0) + float(value)
    return int(found.get("draft", 0)), int(found.get("accepted", 0))


@contextmanager
def tokenizer(login: Login, tree: str) -> Iterator[Path]:
    """Have the tokenizer of a tree in a folder here."""
    script = f"cd {shlex.quote(tree)} && tar -chf - $(ls {_TOKENIZER} 2>/dev/null)"
    with tempfile.TemporaryDirectory(prefix="spark-bench-") as folder:
        sent = subprocess.Popen(
            login.argv(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-xf", "-", "-C", folder], stdin=sent.stdout, check=True)
        sent.wait(timeout=_LIMIT_S)
        yield Path(folder)


@contextmanager
def tunnel(login: Login, port: int) -> Iterator[int]:
    """Have the gateway of the host at a free port of this machine's loopback address."""
    if not login.ssh:
        yield port
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        here = probe.getsockname()[1]
    forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{here}:127.0.0.1:{port}"]
    process = subprocess.Popen([login.ssh[0], *forward, *login.ssh[1:]], stdin=subprocess.DEVNULL)
    try:
        _wait_for(here, process, login.name)
        yield here
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_for(port: int, process: subprocess.Popen[bytes], name: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SparkError.one(name, "no tunnel to its gateway", "see `spark-deploy connect`")


@contextmanager
def sampled(login: Login) -> Iterator[list[Sample]]:
    """Look at the host every second during a block; the list is filled when it ends."""
    samples: list[Sample] = []
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(login.argv(_LOOK), stdin=subprocess.DEVNULL, stdout=out)
        try:
            yield samples
        finally:
            process.terminate()
            process.wait(timeout=20)
            out.seek(0)
            samples.extend(read_samples(out))


def read_samples(lines: Iterable[str]) -> Iterator[Sample]:
    """Read `TIME KILOBYTES [CELSIUS,WATTS]` lines; a line that is cut short is left out."""
    began: float | None = None
    for line in lines:
        words = line.split()
        if len(words) < 2 or not words[1].isdigit():
            continue
        began = float(words[0]) if began is None else began
        gpu = heat(words[2] if len(words) > 2 else "")
        yield Sample(round(float(words[0]) - began, 1), int(words[1]) * 1024, *gpu)


def heat(text: str) -> tuple[float | None, float | None]:
    """Return temperature and power of what ``HEAT`` prints."""
    temperature, power = ([_number(word) for word in text.split(",")] + [None, None])[:2]
    return temperature, power


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # [N/A]: a GB10 does not tell everything
        return None
