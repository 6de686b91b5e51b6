"""Pictures of commands in docs/screens.

``plan`` is computed. The other pictures replay a recording of the virtual lab in
docs/screens/recorded (`make recording`): pyinfra's log with times, and the JSON of status and top.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from spark_deploy.cli import console as cli_console
from spark_deploy.cli import live, progress_screen
from spark_deploy.cli.hosts import Target, build_plan
from spark_deploy.cli.plan_text import plan_text
from spark_deploy.cli.progress_screen import HostView, Transcript
from spark_deploy.cli.status import host_fields, status_lines
from spark_deploy.cli.status_rows import short_lines
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.hosts.status import HostStatus
from spark_deploy.plan.resolve import model_and_profile

_OPERATION = re.compile(r"--> Starting operation: (.+?)\s*$")
_STATUS = re.compile(r"\s*\[(?P<host>.+?)\]\s+(?P<status>Success|No changes|Skipped|Error).*$")


def feed(transcript: Transcript, line: str, now_s: float) -> list[str]:
    lines = transcript.log(line)
    if operation := _OPERATION.search(line):
        transcript.start_operation(operation[1], now_s)
    elif status := _STATUS.match(line):
        if status["status"] == "Error":
            return lines + transcript.fail_operation(status["host"], now_s)
        transcript.end_operation(status["host"], now_s, skipped=status["status"] == "Skipped")
        transcript.hosts[status["host"]].changed += status["status"] == "Success"
    return lines


OUT = CHECKOUT / "docs/screens"
RECORDED = OUT / "recorded"
WIDTH = 100
FORM = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def picture(name: str) -> Iterator[str]:
    title, draw = SCREENS[name]
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False,
        color_system="truecolor",
    )  # fmt: skip
    console.print(Text(f"$ {title}", "bold"))
    draw(console)
    yield console.export_svg(title=title, code_format=FORM, unique_id=name)


def plan(console: Console) -> None:
    settings = load_hosts({"spark": ["spark-1"]}, root=OUT)["spark-1"]
    target = Target("spark-1", {}, settings, read_catalog())
    pair = model_and_profile(settings.settings, target.catalog)
    lines = plan_text(build_plan(target, estimate=True), *pair, verbose=False)
    cli_console.print_wrapped(lines, console)


def up_running(console: Console) -> None:
    transcript, passed_s = replay(until=": start: ")
    console.print(progress_screen.rows(transcript, passed_s, WIDTH))


def up_ended(console: Console) -> None:
    transcript, passed_s = replay()
    for line in progress_screen.summary(transcript, 0, passed_s):
        progress_screen.print_text(line, console)


def dry(console: Console) -> None:
    for host in recorded("dry"):
        line = Text.assemble((host["host"], "bold"), f": {host['text']}")
        progress_screen.print_text(line, console)


def status(console: Console) -> None:
    recent = datetime.now(timezone.utc) - timedelta(minutes=12, seconds=30)
    hosts = []
    for host in recorded("status"):
        host["proof"]["checked_at"] = recent.isoformat()  # keeps the picture unchanged
        # Fields that are newer than the recording are empty.
        newer = {**host_fields(HostStatus(None)), "unit_overrides": []}
        hosts.append({**newer, **host})
    cli_console.print_wrapped([*short_lines(hosts), "", *status_lines(hosts[0])], console)


def top_once(console: Console) -> None:
    rows = [live.Load(**{"model": "lab-model", **service}) for service in recorded("top")]
    console.print(live.table(rows, console.width))


def recorded(name: str) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))
    return data


def replay(until: str | None = None) -> tuple[Transcript, float]:
    pairs = [
        line.partition(" ")[::2] for line in (RECORDED / "up.log").read_text("utf-8").splitlines()
    ]
    last = max(number for number, (_, line) in enumerate(pairs) if not until or until in line)
    transcript = Transcript({host["host"]: HostView(host["host"]) for host in recorded("status")})
    for at_s, line in pairs[: last + 1]:
        feed(transcript, line, float(at_s))
    return transcript, float(pairs[last][0])


SCREENS: dict[str, tuple[str, Callable[[Console], None]]] = {
    "plan": ("spark-deploy plan", plan),
    "up-running": ("spark-deploy up", up_running),
    "up": ("spark-deploy up", up_ended),
    "dry": ("spark-deploy up --dry", dry),
    "status": ("spark-deploy status", status),
    "top": ("spark-deploy top", top_once),
}
