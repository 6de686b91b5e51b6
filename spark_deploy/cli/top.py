"""``spark-deploy top``: what every service is doing now, a line each, anew every few seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_LOOK = """while :; do
  echo "at $(date +%s.%N)"
  curl -s -m 5 --unix-socket FOLDER/engine.sock http://engine/metrics |
    grep -E '^vllm:(num_requests_|generation_tokens_total|kv_cache_usage|spec_decode_num_)'
  awk '/^MemAvailable/{print "memory", $2}' /proc/meminfo
  echo "gpu HEAT"
  echo end; sleep EVERY
done""".replace("HEAT", HEAT)
_HEAD = ("host", "running", "waiting", "tok/s", "accepted", "cache", "free GiB", "°C", "W")


@dataclass(frozen=True, slots=True)
class Look:
    """A host at one moment; counters count since its engine started."""

    at_s: float
    running: float | None
    waiting: float | None
    generated: float | None
    drafted: float
    accepted: float
    cache_fraction: float | None
    available_bytes: int | None
    temperature_c: float | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class Now:
    """What a person is shown of a host; ``None`` where nothing is known."""

    host: str
    running: float | None
    waiting: float | None
    tokens_per_s: float | None
    acceptance_fraction: float | None
    cache_fraction: float | None
    available_bytes: int | None
    temperature_c: float | None
    power_w: float | None


@click.command
@click.option("--once", is_flag=True, help="Print one sample and exit.")
@service_option("Only this service.")
@shared_options()
def top(options: Options, once: bool, service: str | None) -> int:
    """Refresh until interrupted; exit with 1 if a host did not answer."""
    followed = {
        _title(host.name, name): (login_of(host), name)
        for host in select_hosts(options, judged=False)
        for name in chosen_services(host, service)
    }
    seen: dict[str, list[Look]] = {title: [] for title in followed}
    processes = [_follow(*one, seen[title]) for title, one in followed.items()]
    try:
        # Rates need two looks.
        while any(p.poll() is None for p in processes) and not _all_seen(seen, processes):
            time.sleep(0.2)
        while True:
            _show([now_of(name, looks) for name, looks in seen.items()], options, once)
            if once or all(process.poll() is not None for process in processes):
                break
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in processes:
            process.terminate()
    failed = [name for name, looks in seen.items() if not looks]
    for name in failed:
        note(f"{name}: cannot be asked; fix: `spark-deploy doctor`")
    return 1 if failed else 0


def _all_seen(seen: Mapping[str, list[Look]], processes: list[subprocess.Popen[str]]) -> bool:
    pairs = zip(seen.values(), processes, strict=True)
    return all(len(looks) > 1 or process.poll() is not None for looks, process in pairs)


def _title(host: str, service: str) -> str:
    return host if service == MAIN_SERVICE else f"{host}/{service}"


def _follow(login: Login, service: str, looks: list[Look]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        login.argv(look_script(service)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip

    def read() -> None:
        for look in read_looks(process.stdout or ()):
            looks[:] = [*looks[-1:], look]

    threading.Thread(target=read, daemon=True).start()
    return process


def look_script(service: str) -> str:
    """Return what the host runs to tell of a service again and again."""
    return _LOOK.replace("FOLDER", engine_dir(service)).replace("EVERY", str(EVERY_S))


def read_looks(lines: Iterable[str]) -> Iterator[Look]:
    """Read what the host prints; a look counts once its last line is there."""
    found: dict[str, float] = {}
    words: dict[str, str] = {}
    for line in lines:
        metric = _METRIC.match(line.strip())
        if metric:
            found[metric[1]] = found.get(metric[1], 0.0) + float(metric[2])
        elif line.strip() != "end":
            name, _, rest = line.strip().partition(" ")
            words[name] = rest
        elif "at" in words:
            yield _look(found, words)
            found, words = {}, {}


def _look(found: Mapping[str, float], words: Mapping[str, str]) -> Look:
    temperature, power = heat(words.get("gpu", ""))
    memory = words.get("memory", "")
    return Look(
        at_s=float(words["at"]),
        running=found.get("num_requests_running"),
        waiting=found.get("num_requests_waiting"),
        generated=found.get("generation_tokens"),
        drafted=found.get("spec_decode_num_draft_tokens", 0.0),
        accepted=found.get("spec_decode_num_accepted_tokens", 0.0),
        cache_fraction=found.get("kv_cache_usage_perc"),
        available_bytes=int(memory) * 1024 if memory.isdigit() else None,
        temperature_c=temperature,
        power_w=power,
    )


def now_of(host: str, looks: list[Look]) -> Now:
    """Return what the last two looks say; an engine that began anew in between has no rate."""
    if not looks:
        return Now(host, *[None] * 8)
    last, before = looks[-1], looks[0]
    speed = acceptance = None
    if None not in (last.generated, before.generated) and last.at_s > before.at_s:
        grown = float(last.generated or 0) - float(before.generated or 0)
        speed = grown / (last.at_s - before.at_s) if grown >= 0 else None
    if last.drafted > before.drafted:
        acceptance = (last.accepted - before.accepted) / (last.drafted - before.drafted)
    return Now(
        host, last.running, last.waiting, speed, acceptance, last.cache_fraction,
        last.available_bytes, last.temperature_c, last.power_w,
    )  # fmt: skip


def _show(found: list[Now], options: Options, once: bool) -> None:
    if options.json:
        print(json.dumps([asdict(one) for one in found]), flush=True)
        return
    there = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if there else sys.maxsize
    text = "\n".join(table(found, columns))
    if there and not once:
        text = f"\x1b[H\x1b[2J{text}"  # from the upper left corner, on an empty screen
    print(text, flush=True)


def table(found: list[Now], columns: int = sys.maxsize) -> Iterator[str]:
    """Yield a line for each host below a line of names, closer and shorter where room is scarce."""
    width = max(len(_HEAD[0]), *(len(one.host) for one in found))
    widths = [9 for _ in _HEAD[1:]]
    if width + sum(widths) > columns:
        # Degrees and watts have three digits.
        widths = [max(len(title) + 1, 7 if len(title) > 2 else 6) for title in _HEAD[1:]]
        width = min(width, max(len(_HEAD[0]), columns - sum(widths)))
    yield _row(_HEAD[0], _HEAD[1:], width, widths)
    for one in found:
        free = one.available_bytes / GIB if one.available_bytes is not None else None
        cells = (
            _text(one.running, "{:.0f}"), _text(one.waiting, "{:.0f}"),
            _text(one.tokens_per_s, "{:.1f}"), _text(one.acceptance_fraction, "{:.0%}"),
            _text(one.cache_fraction, "{:.0%}"), _text(free, "{:.1f}"),
            _text(one.temperature_c, "{:.0f}"), _text(one.power_w, "{:.0f}"),
        )  # fmt: skip
        yield _row(shortened(one.host, width), cells, width, widths)


def _row(name: str, cells: Sequence[str], width: int, widths: Sequence[int]) -> str:
    return f"{name:<{width}}" + "".join(
        f"{cell:>{room}}" for cell, room in zip(cells, widths, strict=True)
    )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
