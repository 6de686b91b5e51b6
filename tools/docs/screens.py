"""Draw the pictures of the command line in docs/screens; ``--check`` writes nothing.

``plan`` is made anew. What needs hosts is replayed from a recording of the virtual lab
(docs/screens/recorded, by `make recording`): what pyinfra printed, each line with its second, and
what status and top answered as JSON. The drawing code is that of the commands.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from rich._export_format import CONSOLE_SVG_FORMAT  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from spark_deploy.cli import progress_screen, terminal, top  # noqa: E402
from spark_deploy.cli.hosts import Target, build_plan  # noqa: E402
from spark_deploy.cli.plan_text import plan_text  # noqa: E402
from spark_deploy.cli.progress_screen import HostView, Transcript  # noqa: E402
from spark_deploy.cli.status import host_fields, status_lines  # noqa: E402
from spark_deploy.config.catalog.load import read_catalog  # noqa: E402
from spark_deploy.config.settings.load import load_hosts  # noqa: E402
from spark_deploy.hosts.status import HostStatus  # noqa: E402
from spark_deploy.plan.resolve import pair_of  # noqa: E402
from tools.docs.replay import feed  # noqa: E402

OUT = CHECKOUT / "docs/screens"
RECORDED = OUT / "recorded"
WIDTH = 100
# No font of another site: pages are read without a network, too.
FORM = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> int:
    """Write or check the pictures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, 1 when out of date")
    check = parser.parse_args().check
    stale = []
    for name, (title, draw) in SCREENS.items():
        path, drawn = OUT / f"{name}.svg", picture(name, title, draw)
        if path.exists() and path.read_text("utf-8") == drawn:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(drawn, encoding="utf-8")
    if check and stale:
        sys.stderr.write(f"{', '.join(stale)} out of date; run `python tools/docs/screens.py`\n")
    return 1 if check and stale else 0


def picture(name: str, title: str, draw: Callable[[Console], None]) -> str:
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False,
        color_system="truecolor",
    )  # fmt: skip
    console.print(Text(f"$ {title}", "bold"))
    draw(console)
    return console.export_svg(title=title, code_format=FORM, unique_id=name)


def plan(console: Console) -> None:
    found = load_hosts({"spark": ["spark-1"]}, root=OUT)["spark-1"]
    one = Target("spark-1", {}, found, read_catalog())
    made = build_plan(one, estimate=True)
    terminal.print_wrapped(
        plan_text(made, *pair_of(found.settings, one.catalog), verbose=False), console
    )


def up_running(console: Console) -> None:
    """Draw a first deploy while engines load and one host is further than the other."""
    seen, passed_s = replayed(until=": bench: ")
    console.print(progress_screen.rows(seen, passed_s, WIDTH))


def up_ended(console: Console) -> None:
    """Draw the end of a first deploy."""
    seen, passed_s = replayed()
    for line in progress_screen.ended(seen, 0, passed_s):
        progress_screen.lay(line, console)


def dry(console: Console) -> None:
    for one in json.loads((RECORDED / "dry.json").read_text("utf-8")):
        progress_screen.lay(Text.assemble((one["host"], "bold"), f": {one['text']}"), console)


def status(console: Console) -> None:
    lately = datetime.now(timezone.utc) - timedelta(minutes=12, seconds=30)
    for one in json.loads((RECORDED / "status.json").read_text("utf-8")):
        one["proof"]["checked_at"] = lately.isoformat()  # the picture stays as it is
        # What status learned to say since then was not asked.
        terminal.print_wrapped(status_lines({**host_fields(HostStatus(None)), **one}), console)


def top_once(console: Console) -> None:
    found = [top.Now(**one) for one in json.loads((RECORDED / "top.json").read_text("utf-8"))]
    terminal.print_wrapped(top.table(found), console)


def replayed(until: str | None = None) -> tuple[Transcript, float]:
    """Read the recorded deploy to its end, or to the last line with these words."""
    lines = list(_recorded())
    last = max(number for number, (_, line) in enumerate(lines) if not until or until in line)
    hosts = [one["host"] for one in json.loads((RECORDED / "status.json").read_text("utf-8"))]
    seen = Transcript({name: HostView(name) for name in hosts})
    for at_s, line in lines[: last + 1]:
        feed(seen, line, at_s)
    return seen, lines[last][0]


def _recorded() -> Iterator[tuple[float, str]]:
    for line in (RECORDED / "up.log").read_text("utf-8").splitlines():
        at_s, _, said = line.partition(" ")
        yield float(at_s), said


SCREENS: dict[str, tuple[str, Callable[[Console], None]]] = {
    "plan": ("spark-deploy plan", plan),
    "up-running": ("spark-deploy up", up_running),
    "up": ("spark-deploy up", up_ended),
    "dry": ("spark-deploy up --dry", dry),
    "status": ("spark-deploy status", status),
    "top": ("spark-deploy top", top_once),
}

if __name__ == "__main__":
    sys.exit(main())
