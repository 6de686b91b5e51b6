"""``spark-deploy logs`` and ``top``: journals and load from hosts, streamed over SSH."""

import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from spark_contract.paths import engine_dir
from spark_contract.units import GATEWAY, JOB, MAIN_SERVICE, SERVE, SWITCH, WATCH

from spark_deploy.bench.host import GPU_SENSORS, Login, parse_gpu_sensors
from spark_deploy.cli.connect import make_login
from spark_deploy.cli.console import Options, note, service_option, shared_options
from spark_deploy.cli.hosts import select_hosts, selected_services
from spark_deploy.config.documents import GIB
from spark_deploy.config.errors import one_line, printable
from spark_deploy.inventory.connections import ssh_reason

# The label of log lines from each unit.
_PARTS = {SERVE: "engine", GATEWAY: "gateway", WATCH: "watch", SWITCH: "rollout", JOB: "job"}


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    at_us: int
    host: str
    part: str
    text: str


@click.command
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they arrive.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=100,
    metavar="N",
    help="Print the last N lines [100].",
)
@shared_options()
def logs(options: Options, follow: bool, lines: int) -> int:
    """Return 1 if a journal could not be read."""
    script = journal_command(lines, follow=follow)
    hosts = select_hosts(options, must_serve=False)
    processes = {host.name: _start_ssh(make_login(host), script) for host in hosts}
    try:
        arriving = _read_all(processes)
        lines_to_print = arriving if follow else sorted(arriving)
        for line in lines_to_print:
            at = datetime.fromtimestamp(line.at_us / 1e6).strftime("%m-%d %H:%M:%S")
            text = printable(f"{at}  {line.host}  {line.part:<7}  {line.text}")
            print(json.dumps(asdict(line)) if options.json else text, flush=follow)
    except KeyboardInterrupt:
        for process in processes.values():
            process.terminate()
        return 0
    failed = [name for name, process in processes.items() if process.wait() > 0]
    for name in failed:
        note(f"{name}: {_failure_text(processes[name], 'journal unreadable')}")
    return 1 if failed else 0


def _start_ssh(login: Login, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        login.argv(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip


def _failure_text(process: subprocess.Popen[str], problem: str) -> str:
    output = process.stderr.read() if process.stderr else ""
    if cause_and_fix := ssh_reason(output):
        cause, fix = cause_and_fix
        return f"unreachable: {cause}; fix: {fix}"
    reason = f": {one_line(output)}" if output.strip() else ""
    return f"{problem}{reason}; fix: run `spark-deploy doctor`"


def journal_command(lines: int, *, follow: bool) -> str:
    units = " ".join(f"-u '{template.unit('*')}'" for template in _PARTS)
    return f"journalctl -q --no-pager -o json -n {lines} {'-f ' if follow else ''}{units}"


def parse_journal(host: str, lines: Iterable[str]) -> Iterator[LogLine]:
    """Parse JSON lines of the journal; skip incomplete lines."""
    for line in lines:
        try:
            data = json.loads(line)
        except ValueError:
            continue
        message = data.get("MESSAGE")
        if isinstance(message, list):  # bytes that are not UTF-8
            message = bytes(message).decode(errors="replace")
        unit = str(data.get("_SYSTEMD_UNIT") or data.get("UNIT") or "")
        parts = (part for template, part in _PARTS.items() if unit.startswith(f"{template.name}@"))
        part = next(parts, "systemd")
        time_us = int(data.get("__REALTIME_TIMESTAMP", 0))
        yield LogLine(time_us, host, part, str(message or "").rstrip())


def _read_all(processes: dict[str, subprocess.Popen[str]]) -> Iterator[LogLine]:
    """Yield lines as they arrive, until every journal is complete."""
    lines: queue.Queue[LogLine | None] = queue.Queue()

    def read(name: str, process: subprocess.Popen[str]) -> None:
        for line in parse_journal(name, process.stdout or ()):
            lines.put(line)
        lines.put(None)

    for name_and_process in processes.items():
        threading.Thread(target=read, args=name_and_process, daemon=True).start()
    for _ in processes:  # each thread puts None at the end of the journal
        yield from iter(lines.get, None)


INTERVAL_S = 2
_METRIC = re.compile(r"^vllm:(?P<name>\w+?)(?:_total)?(?:\{[^}]*\})? (?P<value>\S+)$")
_MODEL = re.compile(r'model_name="([^"]*)"')
_SAMPLE_SCRIPT = """while :; do
  echo "at $(date +%s.%N)"
  curl -s -m 5 --unix-socket FOLDER/engine.sock http://engine/metrics |
    grep -E '^vllm:(num_requests_|generation_tokens_total|kv_cache_usage|spec_decode_num_)'
  awk '/^MemAvailable/{print "memory", $2}' /proc/meminfo
  echo "gpu GPU_SENSORS"
  echo end; sleep INTERVAL
done""".replace("GPU_SENSORS", GPU_SENSORS).replace("INTERVAL", str(INTERVAL_S))

# Values by metric, including counters since the engine started, and the model name.
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    host: str
    running: float | None = None
    waiting: float | None = None
    tokens_per_s: float | None = None
    acceptance_fraction: float | None = None
    cache_fraction: float | None = None
    available_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    model: str | None = None


@click.command
@click.option("--once", is_flag=True, help="Print a single sample and exit.")
@service_option("Show only this service.")
@shared_options()
def top(options: Options, once: bool, service: str | None) -> int:
    """Refresh until interrupted; return 1 if a host did not answer."""
    processes: dict[str, subprocess.Popen[str]] = {}
    samples: dict[str, list[Sample]] = {}
    # Complete the list before the first process starts, because a host may lack the service.
    services = [
        (host, name)
        for host in select_hosts(options, must_serve=False)
        for name in selected_services(host, service)
    ]
    for host, name in services:
        title = host.name if name == MAIN_SERVICE else f"{host.name}/{name}"
        script = _SAMPLE_SCRIPT.replace("FOLDER", engine_dir(name))
        processes[title] = _start_ssh(make_login(host), script)
        samples[title] = []
        arguments = (processes[title], samples[title])
        threading.Thread(target=_keep_last_two, args=arguments, daemon=True).start()

    def is_running(title: str) -> bool:
        return processes[title].poll() is None

    try:
        # Rates need two samples.
        while any(is_running(title) and len(latest) < 2 for title, latest in samples.items()):
            time.sleep(0.2)
        while True:
            _print_loads(
                [compute_load(title, latest) for title, latest in samples.items()], options, once
            )
            if once or not any(map(is_running, samples)):
                break
            time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in processes.values():
            process.terminate()
    failed = [title for title, latest in samples.items() if not latest]
    for title in failed:
        note(f"{title}: {_failure_text(processes[title], 'no answer')}")
    return 1 if failed else 0


def _keep_last_two(process: subprocess.Popen[str], samples: list[Sample]) -> None:
    for sample in parse_samples(process.stdout or ()):
        samples[:] = [*samples[-1:], sample]


def parse_samples(lines: Iterable[str]) -> Iterator[Sample]:
    """Parse the script's output; skip an incomplete sample."""
    sample: Sample = {}
    for line in map(str.strip, lines):
        name, _, value = line.partition(" ")
        if metric := _METRIC.match(line):
            key = metric["name"]
            sample[key] = sample.get(key, 0.0) + float(metric["value"])
            if model := _MODEL.search(line):
                sample["model"] = printable(model[1])
        elif name == "at":
            sample["at"] = float(value)
        elif name == "memory" and value.isdigit():
            sample["memory"] = int(value) * 1024
        elif name == "gpu":
            values = zip(("temperature", "power"), parse_gpu_sensors(value), strict=True)
            sample |= {key: number for key, number in values if number is not None}
        elif name == "end" and "at" in sample:
            yield sample
            sample = {}


def compute_load(host: str, samples: Sequence[Sample]) -> Load:
    """Compute rates from the first and last sample."""
    if not samples:
        return Load(host)
    last, first = samples[-1], samples[0]

    def increase(metric: str) -> float:
        return float(last.get(metric, 0.0) - first.get(metric, 0.0))

    speed = acceptance = None
    has_tokens = "generation_tokens" in last and "generation_tokens" in first
    # The counter decreases if the engine restarted.
    if has_tokens and increase("at") > 0 and increase("generation_tokens") >= 0:
        speed = increase("generation_tokens") / increase("at")
    if (drafted := increase("spec_decode_num_draft_tokens")) > 0:
        acceptance = increase("spec_decode_num_accepted_tokens") / drafted
    return Load(
        host, last.get("num_requests_running"), last.get("num_requests_waiting"), speed, acceptance,
        last.get("kv_cache_usage_perc"), last.get("memory"), last.get("temperature"),
        last.get("power"), last.get("model"),
    )  # fmt: skip


def _print_loads(rows: list[Load], options: Options, once: bool) -> None:
    if options.json:
        print(json.dumps([asdict(row) for row in rows]), flush=True)
        return
    width = None if sys.stdout.isatty() else 1000
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    if console.is_terminal and not once:
        console.clear()
    console.print(table(rows, console.width))


# Title, format specifier and value of each column with numbers.
_NUMBER_COLUMNS: tuple[tuple[str, str, Callable[[Load], float | None]], ...] = (
    ("running", ".0f", lambda load: load.running),
    ("waiting", ".0f", lambda load: load.waiting),
    ("tok/s", ".1f", lambda load: load.tokens_per_s),
    ("accepted", ".0%", lambda load: load.acceptance_fraction),
    ("cache", ".0%", lambda load: load.cache_fraction),
    ("free GiB", ".1f", lambda load: load.available_bytes and load.available_bytes / GIB),
    ("°C", ".0f", lambda load: load.temperature_c),
    ("W", ".0f", lambda load: load.power_w),
)
# Columns to hide in a narrow terminal, in this order.
_OPTIONAL = ("W", "°C", "accepted", "free GiB", "cache", "waiting", "running")


def table(rows: Sequence[Load], width: int) -> Table:
    """Return a table of loads; hide optional columns in a narrow terminal."""
    columns = {"host": [row.host for row in rows], "model": [row.model or "-" for row in rows]}
    for title, spec, value_of in _NUMBER_COLUMNS:
        values = map(value_of, rows)
        columns[title] = ["-" if value is None else format(value, spec) for value in values]
    widths = {title: max(map(len, [title, *texts])) + 2 for title, texts in columns.items()}
    for title in _OPTIONAL:
        if sum(widths.values()) - 2 > width:
            del widths[title]
    result = Table(box=None, pad_edge=False)
    for title in widths:
        is_name = title in ("host", "model")
        result.add_column(title, justify="left" if is_name else "right", no_wrap=True,
                          overflow="ellipsis")  # fmt: skip
    for texts in zip(*(columns[title] for title in widths), strict=True):
        result.add_row(*texts)
    return result
