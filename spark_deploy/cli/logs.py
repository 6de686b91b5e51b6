"""``spark-deploy logs``: journals of engines, gateways, watchdogs, rollouts and jobs, merged."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime

import click
from spark_contract.units import GATEWAY, JOB, SERVE, SWITCH, WATCH

from spark_deploy.cli.connect import login_of
from spark_deploy.cli.hosts import select_hosts
from spark_deploy.cli.options import Options, shared_options
from spark_deploy.cli.terminal import note
from spark_deploy.config.printable import shown

_PARTS = {SERVE: "engine", GATEWAY: "gateway", WATCH: "watch", SWITCH: "rollout", JOB: "job"}


@dataclass(frozen=True, slots=True, order=True)
class Line:
    at_us: int
    host: str
    part: str
    text: str

    def shown(self) -> str:
        at = datetime.fromtimestamp(self.at_us / 1e6).strftime("%m-%d %H:%M:%S")
        return shown(f"{at}  {self.host}  {self.part:<7}  {self.text}")


@click.command
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they come.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=100, metavar="N", help="Last lines [100]."
)
@shared_options()
def logs(options: Options, follow: bool, lines: int) -> int:
    """Exit with 1 if a journal could not be read."""
    script = journal_command(lines, follow=follow)
    readers = {
        host.name: subprocess.Popen(
            login_of(host).argv(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            text=True, errors="replace",
        )
        for host in select_hosts(options, judged=False)
    }  # fmt: skip
    try:
        merged = _read_all(readers)
        for line in merged if follow else sorted(merged):
            print(json.dumps(asdict(line)) if options.json else line.shown(), flush=follow)
    except KeyboardInterrupt:
        for process in readers.values():
            process.terminate()
        return 0
    failed = [name for name, process in readers.items() if process.wait() > 0]
    for name in failed:
        note(f"{name}: journal unreadable; fix: `spark-deploy doctor`")
    return 1 if failed else 0


def journal_command(lines: int, *, follow: bool) -> str:
    units = " ".join(f"-u '{template.of('*')}'" for template in _PARTS)
    return f"journalctl -q --no-pager -o json -n {lines} {'-f ' if follow else ''}{units}"


def read_lines(host: str, text: Iterable[str]) -> Iterator[Line]:
    """Parse the journal's JSON; skip incomplete lines."""
    for entry in text:
        try:
            data = json.loads(entry)
        except ValueError:
            continue
        message = data.get("MESSAGE")
        if isinstance(message, list):  # bytes that are not UTF-8
            message = bytes(message).decode(errors="replace")
        unit = str(data.get("_SYSTEMD_UNIT") or data.get("UNIT") or "")
        part = next((p for t, p in _PARTS.items() if unit.startswith(f"{t.name}@")), "systemd")
        time_us = int(data.get("__REALTIME_TIMESTAMP", 0))
        yield Line(time_us, host, part, str(message or "").rstrip())


def _read_all(readers: dict[str, subprocess.Popen[str]]) -> Iterator[Line]:
    """Yield lines as they come, until the end of every journal."""
    lines: queue.Queue[Line | None] = queue.Queue()

    def read(name: str, process: subprocess.Popen[str]) -> None:
        for line in read_lines(name, process.stdout or ()):
            lines.put(line)
        lines.put(None)

    for name, process in readers.items():
        threading.Thread(target=read, args=(name, process), daemon=True).start()
    for _ in readers:
        yield from iter(lines.get, None)
