"""``spark-deploy top``: load of every service, refreshed every two seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import click
from spark_contract.paths import engine_dir
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench.host import HEAT, Login, heat
from spark_deploy.cli.connect import login_of
from spark_deploy.cli.hosts import chosen_services, select_hosts
from spark_deploy.cli.options import Options, service_option, shared_options
from spark_deploy.cli.progress_screen import shortened
from spark_deploy.cli.terminal import note
from spark_deploy.plan.memory import GIB

EVERY_S = 2
_METRIC = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$")
_SAMPLE_SCRIPT = """while :; do
  echo "at $(date +%s.%N)"
  curl -s -m 5 --unix-socket FOLDER/engine.sock http://engine/metrics |
    grep -E '^vllm:(num_requests_|generation_tokens_total|kv_cache_usage|spec_decode_num_)'
  awk '/^MemAvailable/{print "memory", $2}' /proc/meminfo
  echo "gpu HEAT"
  echo end; sleep EVERY
done""".replace("HEAT", HEAT)
_HEAD = ("host", "running", "waiting", "tok/s", "accepted", "cache", "free GiB", "°C", "W")

Sample = dict[str, float]  # metrics by name; counters since the start of the engine


@dataclass(frozen=True, slots=True)
class Now:
    """The displayed state of a service; ``None`` for unknown values."""

    host: str
    running: float | None
    waiting: float | None
    tokens_per_s: float | None
    acceptance_fraction: float | None
    cache_fraction: float | None
    available_bytes: float | None
    temperature_c: float | None
    power_w: float | None


@click.command
@click.option("--once", is_flag=True, help="Print a single sample and exit.")
@service_option("Only this service.")
@shared_options()
def top(options: Options, once: bool, service: str | None) -> int:
    """Refresh until interrupted; exit with 1 if a host did not answer."""
    services = {
        host.name if name == MAIN_SERVICE else f"{host.name}/{name}": (login_of(host), name)
        for host in select_hosts(options, judged=False)
        for name in chosen_services(host, service)
    }
    samples: dict[str, list[Sample]] = {title: [] for title in services}
    processes = {title: _start(*services[title], samples[title]) for title in services}

    def runs(title: str) -> bool:
        return processes[title].poll() is None

    try:
        # Rates need two samples.
        while any(runs(title) and len(samples[title]) < 2 for title in services):
            time.sleep(0.2)
        while True:
            _show([now_of(title, both) for title, both in samples.items()], options, once)
            if once or not any(map(runs, services)):
                break
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in processes.values():
            process.terminate()
    failed = [title for title in services if not samples[title]]
    for title in failed:
        note(f"{title}: no answer; fix: `spark-deploy doctor`")
    return 1 if failed else 0


def _start(login: Login, service: str, samples: list[Sample]) -> subprocess.Popen[str]:
    """Sample a service in the background; ``samples`` gets the last two."""
    script = _SAMPLE_SCRIPT.replace("FOLDER", engine_dir(service)).replace("EVERY", str(EVERY_S))
    process = subprocess.Popen(
        login.argv(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )

    def read() -> None:
        for sample in read_samples(process.stdout or ()):
            samples[:] = [*samples[-1:], sample]

    threading.Thread(target=read, daemon=True).start()
    return process


def read_samples(lines: Iterable[str]) -> Iterator[Sample]:
    """Parse the output of the script; skip an incomplete sample."""
    sample: Sample = {}
    for line in map(str.strip, lines):
        name, _, value = line.partition(" ")
        if metric := _METRIC.match(line):
            sample[metric[1]] = sample.get(metric[1], 0.0) + float(metric[2])
        elif name == "at":
            sample["at"] = float(value)
        elif name == "memory" and value.isdigit():
            sample["memory"] = int(value) * 1024
        elif name == "gpu":
            heats = zip(("temperature", "power"), heat(value), strict=True)
            sample |= {key: number for key, number in heats if number is not None}
        elif name == "end" and "at" in sample:
            yield sample
            sample = {}


def now_of(host: str, samples: Sequence[Sample]) -> Now:
    if not samples:
        return Now(host, *[None] * 8)
    last, before = samples[-1], samples[0]

    def grown(metric: str) -> float:
        return last.get(metric, 0.0) - before.get(metric, 0.0)

    speed = acceptance = None
    has_tokens = "generation_tokens" in last and "generation_tokens" in before
    if has_tokens and grown("at") > 0 and grown("generation_tokens") >= 0:
        speed = grown("generation_tokens") / grown("at")
    if (drafted := grown("spec_decode_num_draft_tokens")) > 0:
        acceptance = grown("spec_decode_num_accepted_tokens") / drafted
    return Now(
        host, last.get("num_requests_running"), last.get("num_requests_waiting"), speed, acceptance,
        last.get("kv_cache_usage_perc"), last.get("memory"), last.get("temperature"),
        last.get("power"),
    )  # fmt: skip


def _show(rows: list[Now], options: Options, once: bool) -> None:
    if options.json:
        print(json.dumps([asdict(row) for row in rows]), flush=True)
        return
    is_terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if is_terminal else sys.maxsize
    text = "\n".join(table(rows, columns))
    if is_terminal and not once:
        text = f"\x1b[H\x1b[2J{text}"  # clear the screen
    print(text, flush=True)


def table(rows: list[Now], columns: int = sys.maxsize) -> Iterator[str]:
    """Yield a header and a line for each service, narrower on a small screen."""
    width = max(len(_HEAD[0]), *(len(row.host) for row in rows))
    widths = [9 for _ in _HEAD[1:]]
    if width + sum(widths) > columns:
        # Temperature and power have three digits.
        widths = [max(len(title) + 1, 7 if len(title) > 2 else 6) for title in _HEAD[1:]]
        width = min(width, max(len(_HEAD[0]), columns - sum(widths)))
    yield _row(_HEAD[0], _HEAD[1:], width, widths)
    for row in rows:
        free = row.available_bytes / GIB if row.available_bytes is not None else None
        cells = (
            _text(row.running, "{:.0f}"), _text(row.waiting, "{:.0f}"),
            _text(row.tokens_per_s, "{:.1f}"), _text(row.acceptance_fraction, "{:.0%}"),
            _text(row.cache_fraction, "{:.0%}"), _text(free, "{:.1f}"),
            _text(row.temperature_c, "{:.0f}"), _text(row.power_w, "{:.0f}"),
        )  # fmt: skip
        yield _row(shortened(row.host, width), cells, width, widths)


def _row(name: str, cells: Sequence[str], width: int, widths: Sequence[int]) -> str:
    return f"{name:<{width}}" + "".join(
        f"{cell:>{room}}" for cell, room in zip(cells, widths, strict=True)
    )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
