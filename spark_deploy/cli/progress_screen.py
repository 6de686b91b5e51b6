"""A deploy as people watch it: a line for each host in place; piped, a line each half minute."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spark_deploy.config.printable import in_words

_JOB = re.compile(
    r"(?P<title>(?:fetch|build|pull|remove) .+): (?P<state>[a-z]+)(?:: (?P<how>.*))?$"
)
_ROLLOUT = re.compile(r"rollout of \S+: (?P<phase>[\w-]+): (?P<said>.*)")
# pyinfra logs these for a host; callbacks tell them, too.
_STATUSES = ("Success", "No changes", "Skipped", "Error: executed", "Connected", "Ready:")
_PARTS = {
    "host": ("Reboots", "Preflight", "Base", "Tools", "CUDA", "Docker"),
    "model and image": ("Sources", "Checkpoint", "Image", "Ready", "Discard"),
    "engine": ("Serve", "Rollback"),
    "proof": ("Verify",),
}
_ENGINE = "engine"
_WAITS_FOR_WORK = "Wait for all jobs"
PHASES = {
    "waiting": "waits for its turn",
    "prove": "looks whether all is there",
    "drain": "requests end",
    "stop": "engine stops",
    "memory": "waits for memory",
    "start": "engine loads",
    "check": "asks the engine its questions",
    "open": "lets requests through",
    "enable": "boots with it from now on",
    "bench": "measures its speed",
    "rollback": "goes back",
    "done": "done",
}


@dataclass(slots=True)
class HostView:
    """Where one host stands."""

    name: str
    step: str = "connecting"
    what: str = ""  # what the step says of itself on this host
    how: str = ""  # how far that is: never cut short
    ended: bool = False  # this step, on this host
    failed: str = ""  # the step that failed
    steps: int = 0
    changed: int = 0
    notes: list[str] = field(default_factory=list)  # of this step
    said: list[str] = field(default_factory=list)  # of the last step that had results to tell
    problems: list[str] = field(default_factory=list)
    serves: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[str]:
        return self.serves or [line for line in self.notes if not _is_progress(line)] or self.said

    def line(self) -> tuple[str, str]:
        if self.failed:
            return f"FAILED in {self.failed}", ""
        if self.ended:
            return self.step, ""
        if self.how:
            return self.what, self.how
        return f"{self.step}{f': {self.what}' if self.what else ''}", ""

    @property
    def going_on(self) -> str:
        """Work that continues on the host after an interrupt; may be empty."""
        if self.failed or self.ended or not self.how:
            return ""
        return self.how if self.what == _ENGINE else f"{self.what}: {self.how}"


@dataclass(slots=True)
class Transcript:
    """What a run did so far."""

    hosts: dict[str, HostView] = field(default_factory=dict)
    part: str = ""
    parts_s: dict[str, float] = field(default_factory=dict)
    since_s: float = 0.0
    others: list[str] = field(default_factory=list)  # lines of no host, since the last step

    def log(self, line: str) -> list[str]:
        """Take in a log line; return what a person has to see at once."""
        line = in_words(line).strip()
        name, bracket, text = line.removeprefix("[").partition("]")
        if line.startswith("[") and bracket and name in self.hosts:
            return self._note(self.hosts[name], text.strip())
        self.others.append(line)
        return [line] if re.match(r"(warning|error|!!!)\b", line.lower()) else []

    def begin(self, name: str, now_s: float) -> None:
        """Begin an operation, ``Role | Name``."""
        self._pass(now_s)
        role, _, name = (word.strip() for word in name.partition("|"))
        self.part = _part_of(role, name)
        self.others = []
        turn = self._turn(name)
        for host in self.hosts.values():
            if not host.failed:
                waits = turn and host.name not in turn
                host.step = f"waits for {', '.join(turn)}" if waits else f"{role}: {name}"
                host.what, host.how = "", ""
                host.said = [line for line in host.notes if not _is_progress(line)] or host.said
                host.notes, host.ended = [], False

    def end(self, name: str, now_s: float, *, skipped: bool = False) -> None:
        """End the operation on a host."""
        self._pass(now_s)
        host = self.hosts[name]
        host.ended = True
        host.steps += not skipped

    def fail(self, name: str, now_s: float) -> list[str]:
        """End the operation on a host with an error; return what a person has to see at once."""
        self.end(name, now_s)
        host = self.hosts[name]
        host.failed = host.step
        host.problems = list(host.notes)
        return [f"{name}: FAILED in {host.step}", *(f"  {note}" for note in host.notes)]

    def _pass(self, now_s: float) -> None:
        """Add the time since the last event to the part that ran meanwhile."""
        if self.part:
            passed_s = now_s - self.since_s
            self.parts_s[self.part] = self.parts_s.get(self.part, 0.0) + passed_s
        self.since_s = now_s

    def _turn(self, name: str) -> list[str]:
        """Return the hosts whose turn an operation is; none if it is all hosts' at once."""
        named = name.rpartition(" on ")[2].split(", ")
        return named if all(host in self.hosts for host in named) else []

    def _note(self, host: HostView, text: str) -> list[str]:
        if text.startswith(_STATUSES):
            if text.startswith(("Connected", "Ready:")):
                host.step = "preparing" if text == "Connected" else "ready"
            return []
        host.notes.append(text)
        if host.step.startswith("Verify"):
            host.serves.append(text)
        if change := _ROLLOUT.match(text):
            host.what, host.how = _ENGINE, _phase(change["phase"], change["said"])
        elif job := _JOB.match(text):
            host.what, host.how = job["title"], job["how"] or job["state"]
        else:
            host.what, host.how = text, ""
        return [f"{host.name}: {text}"] if text.startswith("warning of its check") else []


def _is_progress(line: str) -> bool:
    return bool(_ROLLOUT.match(line) or _JOB.match(line))


def _part_of(role: str, name: str) -> str:
    if name == _WAITS_FOR_WORK:
        return "model and image"
    return next((part for part, roles in _PARTS.items() if role in roles), "host")


def _phase(phase: str, said: str) -> str:
    """Say a phase of a rollout in plain words; of the engine's log only how long it has been."""
    waited = re.search(r"waited_s=(\d+)", said)
    told = PHASES.get(phase, phase)
    if waited:
        return f"{told}, {minutes(int(waited[1]))}"
    return f"{told}: {said}" if phase in ("rollback",) else told


def minutes(seconds: float) -> str:
    """Return a time as people say it: 0:52, 6:14, 1:02:03."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{text}" if hours else text


def parts_text(parts_s: Mapping[str, float], took_s: float) -> str:
    shown = [f"{name} {minutes(seconds)}" for name, seconds in parts_s.items() if seconds >= 0.5]
    parts = f" ({', '.join(shown)})" if shown else ""
    return f"{minutes(took_s)}{parts}"


PIPED_EVERY_S = 30.0
INTERRUPTED = 130
_INDENT = 4  # of wrapped lines
# Logged before the first operation.
_BEGINS = re.compile(r"--> .*\.\.\.$|\s*Failed to load host keys from .*: No such file")


class Watcher(BaseStateCallback):
    """Follows a run by pyinfra's state callbacks and log lines."""

    def __init__(self, hosts: Sequence[str], console: Console, log: Callable[[str], object]):
        self.began_s = time.monotonic()
        self.seen = Transcript({name: HostView(name) for name in hosts})
        self.screen = (_InPlace if console.is_terminal else _Piped)(self, console)
        self._log = log

    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def tell(self, text: str) -> None:
        for line in text.splitlines():
            self._log(f"{self.now_s():.1f} {line}\n")
            self._show(self.seen.log(line))

    def _show(self, texts: Sequence[str] = ()) -> None:
        for text in texts:
            self.screen.say(text)
        self.screen.look()

    # pyinfra declares callbacks as static methods and calls them on the instance.

    def operation_start(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        self.seen.begin(", ".join(state.get_op_meta(op_hash).names), self.now_s())
        self._show()

    def operation_host_start(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str
    ) -> None:
        if op_hash not in state.ops[host]:
            self.seen.end(host.name, self.now_s(), skipped=True)

    def operation_host_success(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0
    ) -> None:
        self.seen.end(host.name, self.now_s())
        self._show()

    def operation_host_error(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        self._show(self.seen.fail(host.name, self.now_s()))

    def operation_end(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        for host, operations in state.ops.items():
            if op_hash in operations:
                meta = operations[op_hash].operation_meta
                self.seen.hosts[host.name].changed += meta.is_complete() and meta.did_change()


def watch(run: Callable[[Watcher], int], hosts: Sequence[str], log: Path, console: Console) -> int:
    """Run a deploy and show it; returns its exit code. pyinfra's log lines go to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        watcher = Watcher(hosts, console, file.write)
        with watcher.screen:
            try:
                code = run(watcher)
            except (KeyboardInterrupt, SystemExit):
                watcher.screen.say(
                    "interrupted: work on hosts continues; the same command attaches to it"
                )
                code = INTERRUPTED
    for text in ended(watcher.seen, code, watcher.now_s()):
        lay(text, console)
    if code:
        console.print(Text(f"pyinfra's log: {log}", "dim"), soft_wrap=True)
    return code


def lay(text: Text, console: Console) -> None:
    """Print a line: at a terminal within its width, else whole."""
    if not console.is_terminal:
        console.print(text, soft_wrap=True)
        return
    first, *rest = text.wrap(console, console.width - _INDENT)
    for line in (first, *(Text(" " * _INDENT) + one for one in rest)):
        console.print(line, soft_wrap=True)


class _Piped:
    """A line for each host that went on, at most every half minute; never the same line twice."""

    def __init__(self, watcher: Watcher, console: Console):
        self.watcher, self.console = watcher, console
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
        for host in self.watcher.seen.hosts.values():
            text = f"{host.name}: {': '.join(filter(None, host.line()))}"
            if self.said.get(host.name) != text:
                self.said[host.name] = text
                self.say(text)


class _InPlace(_Piped):
    """One line for each host that is written anew in its place."""

    def __init__(self, watcher: Watcher, console: Console):
        super().__init__(watcher, console)
        self.live = Live(
            console=console, get_renderable=self._rows, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> _InPlace:
        self.live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.live.stop()

    def look(self) -> None: ...

    def _rows(self) -> Group:
        return rows(self.watcher.seen, self.watcher.now_s(), self.console.width)


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
    style = ""
    if any(word in text for word in ("FAILED", "REFUSED", "Error")):
        style = "bold red"
    elif "warning" in text[:40].lower():
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
    if host.failed or not good:
        return Text(f"FAILED in {host.failed}" if host.failed else "not finished", "bold red")
    return Text(host.serves[0] if host.serves else "done", "green")
