"""A deploy as people watch it: a line for each host in place; piped, a line each half minute."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spark_deploy.cli.changes.transcript import HostView, Transcript, minutes, parts_text

PIPED_EVERY_S = 30.0
INTERRUPTED = 130
_INDENT = 4  # of what a line goes on with
# What pyinfra says of its own first steps, and of a first login's list of hosts.
_BEGINS = re.compile(r"--> .*\.\.\.$|\s*Failed to load host keys from .*: No such file")


def watch(argv: Sequence[str], hosts: Sequence[str], log: Path, console: Console) -> int:
    """Run a pyinfra line and show it; returns its exit code.

    Its own words go to ``log``, each line behind its second.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    seen = Transcript({name: HostView(name) for name in hosts})
    began_s = time.monotonic()
    with log.open("w", encoding="utf-8") as told:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        code = _shown(process, seen, told.write, began_s, console)
    for text in ended(seen, code, time.monotonic() - began_s):
        lay(text, console)
    if code:
        console.print(Text(f"everything pyinfra said: {log}", "dim"), soft_wrap=True)
    return code


def lay(text: Text, console: Console) -> None:
    """Print a line: at a terminal within its width, else whole."""
    if not console.is_terminal:
        console.print(text, soft_wrap=True)
        return
    first, *rest = text.wrap(console, console.width - _INDENT)
    for line in (first, *(Text(" " * _INDENT) + one for one in rest)):
        console.print(line, soft_wrap=True)


def _shown(
    process: subprocess.Popen[str],
    seen: Transcript,
    tell: Callable[[str], object],
    began_s: float,
    console: Console,
) -> int:
    assert process.stdout is not None
    show = _InPlace(seen, began_s, console) if console.is_terminal else _Piped(seen, console)
    with show:
        try:
            for line in process.stdout:
                now_s = time.monotonic()
                tell(f"{now_s - began_s:.1f} {line}")
                for text in seen.read(line, now_s):
                    show.say(text)
                show.look()
            return process.wait()
        except KeyboardInterrupt:
            # The terminal told pyinfra as well; a run that is stopped by its parent alone is told.
            process.send_signal(signal.SIGINT)
            process.wait()
            show.say("interrupted: what hosts work on goes on; the same command attaches to it")
            return INTERRUPTED


class _Piped:
    """A line for each host that went on, at most every half minute; never the same line twice."""

    def __init__(self, seen: Transcript, console: Console):
        self.seen, self.console = seen, console
        self.said: dict[str, str] = {}
        self.at_s = time.monotonic()

    def __enter__(self) -> _Piped:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def say(self, text: str) -> None:
        lay(coloured(text), self.console)

    def look(self) -> None:
        if time.monotonic() - self.at_s < PIPED_EVERY_S:
            return
        self.at_s = time.monotonic()
        for host in self.seen.hosts.values():
            text = f"{host.name}: {': '.join(filter(None, host.line()))}"
            if self.said.get(host.name) != text:
                self.said[host.name] = text
                self.say(text)


class _InPlace(_Piped):
    """One line for each host that is written anew in its place."""

    def __init__(self, seen: Transcript, began_s: float, console: Console):
        super().__init__(seen, console)
        self.began_s = began_s
        self.live = Live(
            console=console, get_renderable=self._rows, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> _InPlace:
        self.live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.live.stop()

    def look(self) -> None:
        """The live display looks by itself."""

    def _rows(self) -> Group:
        return rows(self.seen, time.monotonic() - self.began_s, self.console.width)


def rows(seen: Transcript, since_s: float, width: int) -> Group:
    """Return a line for each host: its name, what it is doing, and how far that is."""
    lines = []
    longest = max((len(name) for name in seen.hosts), default=0)
    for host in seen.hosts.values():
        what, how = host.line()
        room = max(10, width - longest - len(how) - 2 * bool(how) - 2)
        style = "red bold" if host.failed else "green" if host.ended else ""
        text = Text.assemble((f"{host.name:<{longest}}  ", "bold"), (shortened(what, room), style))
        lines.append(text.append(f"  {how}" if how else ""))
    lines.append(Text(f"{minutes(since_s)}  {seen.part}", "dim"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def shortened(text: str, room: int) -> str:
    """Return a text of at most so many characters, cut in its middle: names differ at both ends."""
    if len(text) <= room:
        return text
    head = (room - 1) // 2
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"


def coloured(text: str) -> Text:
    """Return a line in which what is wrong stands out."""
    style = ""
    if any(word in text for word in ("FAILED", "REFUSED", "Error")):
        style = "bold red"
    elif text.lower().startswith("warning") or "warning" in text[:40].lower():
        style = "yellow"
    return Text(text, style)


def ended(seen: Transcript, code: int, took_s: float) -> Iterator[Text]:
    """Yield how it ended on each host: what serves, where, how proven, how long, what changed."""
    for host in seen.hosts.values():
        good = not host.failed and (host.serves or not code)
        yield Text.assemble((host.name, "bold"), "  ", _outcome(host, bool(good)))
        for line in () if host.failed else host.results[bool(host.serves) :]:
            yield Text(f"  {line}")
        for line in host.problems if host.failed else ():
            yield Text(f"  {line}", "red")
        of = f"{host.changed} of {host.steps} steps" if host.changed else "nothing"
        going_on = host.going_on
        if code == INTERRUPTED and going_on:
            yield Text(f"  changed {of} up to then; changes went on when you left: {going_on}")
        else:
            yield Text(f"  changed {of}", "dim")
    if not seen.parts_s:
        # It ended before its first step: the reason is all there is.
        reasons = [line for line in seen.others if line.strip() and not _BEGINS.match(line)]
        for line in reasons[-12:]:
            yield coloured(line)
    yield Text(f"took {parts_text(seen.parts_s, took_s)}")
    if code:
        yield Text(f"red: exit code {code}", "bold red")


def _outcome(host: HostView, good: bool) -> Text:
    if host.failed:
        return Text(f"FAILED in {host.failed}", "bold red")
    if host.serves:
        return Text(host.serves[0], "green")
    return Text("done" if good else "not finished", "green" if good else "red")
