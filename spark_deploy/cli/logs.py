"""``spark-deploy logs``: what engines, gateways, watches, rollouts and jobs print, merged."""

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
from spark_deploy.config.documents.shown import shown

_PARTS = {SERVE: "engine", GATEWAY: "gateway", WATCH: "watch", SWITCH: "rollout", JOB: "job"}


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """One line of one host's journal."""

    at_us: int
    host: str
    part: str
    text: str

    def shown(self) -> str:
        """Return it for people, in the time of this machine."""
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
    logins = [login_of(one) for one in select_hosts(options, judged=False)]
    script = journal(lines, follow=follow)
    readers = [
        (login.name, subprocess.Popen(
            login.argv(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            errors="replace",
        ))
        for login in logins
    ]  # fmt: skip
    try:
        for line in _merged(readers, follow=follow):
            print(json.dumps(asdict(line)) if options.json else line.shown(), flush=follow)
    except KeyboardInterrupt:
        for _, process in readers:
            process.terminate()
        return 0
    failed = [name for name, process in readers if process.wait() > 0]
    for name in failed:
        note(f"{name}: its journal could not be read; fix: `spark-deploy doctor`")
    return 1 if failed else 0


def journal(lines: int, *, follow: bool) -> str:
    """Return the command that prints the journal of everything of ours as JSON."""
    units = " ".join(f"-u '{template.of('*')}'" for template in _PARTS)
    return f"journalctl -q --no-pager -o json -n {lines} {'-f ' if follow else ''}{units}"


def read_lines(host: str, text: Iterable[str]) -> Iterator[Line]:
    """Read the journal's JSON; a line that is cut short is left out."""
    for entry in text:
        try:
            data = json.loads(entry)
        except ValueError:
            continue
        said = data.get("MESSAGE")
        if isinstance(said, list):  # bytes that are no text
            said = bytes(said).decode(errors="replace")
        unit = str(data.get("_SYSTEMD_UNIT") or data.get("UNIT") or "")
        part = next((p for t, p in _PARTS.items() if unit.startswith(f"{t.name}@")), "systemd")
        yield Line(int(data.get("__REALTIME_TIMESTAMP", 0)), host, part, str(said or "").rstrip())


Readers = list[tuple[str, "subprocess.Popen[str]"]]


def _merged(readers: Readers, *, follow: bool) -> Iterator[Line]:
    """Yield lines as they come, or all of them by time once every journal has ended."""
    lines = _until_the_end(_filled(readers), len(readers))
    yield from lines if follow else sorted(lines)


def _filled(readers: Readers) -> queue.Queue[Line | None]:
    lines: queue.Queue[Line | None] = queue.Queue()

    def read(name: str, process: subprocess.Popen[str]) -> None:
        for line in read_lines(name, process.stdout or ()):
            lines.put(line)
        lines.put(None)

    for name, process in readers:
        threading.Thread(target=read, args=(name, process), daemon=True).start()
    return lines


def _until_the_end(lines: queue.Queue[Line | None], sources: int) -> Iterator[Line]:
    """Yield lines until every source has ended."""
    while sources:
        line = lines.get()
        if line is None:
            sources -= 1
        else:
            yield line
