"""Progress of a deploy: a live line per host in a terminal, otherwise a line every half minute."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spark_deploy.config.errors import without_errno
from spark_deploy.hosts.releases import CHECK_WARNING

PRINT_INTERVAL_S = 30.0
INTERRUPTED = 130
_INDENT = 4  # spaces before a wrapped line
_JOB = re.compile(
    r"(?P<title>(?:fetch|build|pull|remove) .+): (?P<state>[a-z]+)(?:: (?P<progress>.*))?$"
)
_ROLLOUT = re.compile(r"rollout of \S+: (?P<phase>[\w-]+): (?P<detail>.*)")
_WAITING = re.compile(r"waited_s=(?P<seconds>\d+) ?(?:limit_s=\d+ )?(?P<cause>.*)")
# pyinfra logs these for each host, in addition to its callbacks.
_STATUSES = ("Success", "No changes", "Skipped", "Error: executed", "Connected", "Ready:")
_HOST_LINE = re.compile(r"\[(?P<host>[^\]]*)\](?P<text>.*)", re.DOTALL)
# Logged before the first operation.
_PREAMBLE = re.compile(r"--> .*\.\.\.$|\s*Failed to load host keys from .*: No such file")
_PART_OF_ROLE = {
    **dict.fromkeys(("Sources", "Checkpoint", "Image", "Ready", "Discard"), "model and image"),
    **dict.fromkeys(("Serve", "Rollback"), "engine"),
    "Verify": "proof",
}
PHASES = {
    "waiting": "waiting for its turn",
    "prove": "verifying files",
    "drain": "draining requests",
    "stop": "stopping the engine",
    "memory": "waiting for memory",
    "start": "loading the engine",
    "check": "checking the engine",
    "open": "opening traffic",
    "enable": "enabling start at boot",
    "bench": "measuring speed",
    "rollback": "rolling back",
    "done": "done",
}


@dataclass(slots=True)
class HostView:
    name: str
    step: str = "connecting"
    task: str = ""  # current task within the step
    progress: str = ""  # progress within the task; never shorten
    is_done: bool = False
    failed_step: str = ""
    headline: str = ""  # serving release and reason of the failure
    steps: int = 0
    changed: int = 0
    notes: list[str] = field(default_factory=list)  # log lines from this step
    last_results: list[str] = field(default_factory=list)  # from the last step with results
    problems: list[str] = field(default_factory=list)
    serves: list[str] = field(default_factory=list)

    @property
    def step_results(self) -> list[str]:
        return [line for line in self.notes if not (_ROLLOUT.match(line) or _JOB.match(line))]

    def line(self) -> tuple[str, str]:
        """Return the step or task to show, and the progress."""
        if self.failed_step:
            return f"FAILED in {self.failed_step}", ""
        if self.is_done:
            return self.step, ""
        if self.progress:
            return self.task, self.progress
        return (f"{self.step}: {self.task}" if self.task else self.step), ""

    def start(self, step: str) -> None:
        self.last_results = self.step_results or self.last_results
        self.task = self.progress = ""
        self.step, self.notes, self.is_done = step, [], False

    def log(self, text: str) -> None:
        if text == "Connected":
            self.step = "preparing"
        elif text.startswith(("Connected", "Ready:")):
            self.step = "ready"
        if text.startswith(_STATUSES):
            return
        self.notes.append(text)
        if self.step.startswith("Verify"):
            self.serves.append(text)
        self.task, self.progress = text, ""
        if rollout := _ROLLOUT.match(text):
            self.task, self.progress = "engine", PHASES.get(rollout["phase"], rollout["phase"])
            if waiting := _WAITING.match(rollout["detail"]):
                duration = format_duration(int(waiting["seconds"]))
                cause = waiting["cause"]
                self.progress = f"{cause} ({duration})" if cause else f"{self.progress}, {duration}"
            elif rollout["phase"] == "rollback":
                self.progress += f": {rollout['detail']}"
        elif job := _JOB.match(text):
            self.task, self.progress = job["title"], job["progress"] or job["state"]


@dataclass(slots=True)
class Transcript:
    """The state of a deploy, built from log lines and callbacks; methods return lines to print."""

    hosts: dict[str, HostView] = field(default_factory=dict)
    part: str = ""  # current part of the deploy, a value of _PART_OF_ROLE
    parts_s: dict[str, float] = field(default_factory=dict)
    last_change_s: float = 0.0
    other_lines: list[str] = field(default_factory=list)  # lines without a host since the last step

    def log(self, line: str) -> list[str]:
        line = without_errno(line).strip()
        if match := _HOST_LINE.match(line):
            name, text = match["host"], match["text"].strip()
            if name in self.hosts:
                self.hosts[name].log(text)
                return [f"{name}: {text}"] if text.startswith(CHECK_WARNING) else []
        self.other_lines.append(line)
        return [line] if re.match(r"(warning|error|!!!)\b", line.lower()) else []

    def start_operation(self, name: str, now_s: float) -> None:
        self._add_time(now_s)
        role, _, title = (text.strip() for text in name.partition("|"))
        self.part = _PART_OF_ROLE.get(role, "host")
        if title == "Wait for all jobs":
            self.part = "model and image"
        self.other_lines = []
        # A rollout's operation ends in "on HOST, HOST"; other operations run on all hosts.
        _, _, suffix = title.rpartition(" on ")
        named = suffix.split(", ")
        active = named if all(host in self.hosts for host in named) else list(self.hosts)
        for host in self.hosts.values():
            if not host.failed_step:
                waiting = f"waiting for {', '.join(active)}"
                host.start(f"{role}: {title}" if host.name in active else waiting)

    def end_operation(self, host: str, now_s: float, *, skipped: bool = False) -> None:
        self._add_time(now_s)
        self.hosts[host].is_done = True
        if not skipped:
            self.hosts[host].steps += 1

    def fail_operation(self, name: str, now_s: float) -> list[str]:
        """Mark the host as failed; return a headline, or all results if there is none."""
        self.end_operation(name, now_s)
        host = self.hosts[name]
        host.failed_step = host.step
        lines = host.step_results
        for index, line in enumerate(lines):
            if line.startswith(f"{name} "):
                host.headline, host.problems = line, lines[index + 1 :]
                return [host.headline]
        host.problems = lines
        return [f"{name}: FAILED in {host.step}", *(f"  {line}" for line in lines)]

    def _add_time(self, now_s: float) -> None:
        if self.part:
            self.parts_s[self.part] = self.parts_s.get(self.part, 0.0) + now_s - self.last_change_s
        self.last_change_s = now_s


def format_duration(seconds: float) -> str:
    total_minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(total_minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"


class Watcher(BaseStateCallback):
    """Tracks a deploy through pyinfra's callbacks and log lines."""

    follows_progress = True

    def __init__(self, hosts: Sequence[str], console: Console, write: Callable[[str], object]):
        self.started_s = time.monotonic()
        self.transcript = Transcript({name: HostView(name) for name in hosts})
        screen_class = _LiveScreen if console.is_terminal else _PipedScreen
        self.screen = screen_class(self, console)
        self._write = write

    def now_s(self) -> float:
        return time.monotonic() - self.started_s

    def log(self, text: str) -> None:
        for line in text.splitlines():
            self._write(f"{self.now_s():.1f} {line}\n")
            self._show(self.transcript.log(line))

    def _show(self, lines: Sequence[str] = ()) -> None:
        for line in lines:
            self.screen.print(line)
        self.screen.refresh()

    # pyinfra declares callbacks as static methods and calls them on the instance.

    def operation_start(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        names = ", ".join(state.get_op_meta(op_hash).names)
        self.transcript.start_operation(names, self.now_s())
        self._show()

    def operation_host_start(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str
    ) -> None:
        if op_hash not in state.ops[host]:
            self.transcript.end_operation(host.name, self.now_s(), skipped=True)

    def operation_host_success(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0
    ) -> None:
        self.transcript.end_operation(host.name, self.now_s())
        self._show()

    def operation_host_error(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        self._show(self.transcript.fail_operation(host.name, self.now_s()))

    def operation_end(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        for host, operations in state.ops.items():
            if op_hash in operations:
                meta = operations[op_hash].operation_meta
                if meta.is_complete() and meta.did_change():
                    self.transcript.hosts[host.name].changed += 1


def watch(run: Callable[[Watcher], int], hosts: Sequence[str], log: Path, console: Console) -> int:
    """Run a deploy, show the progress and write pyinfra's log to ``log``; return the exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        watcher = Watcher(hosts, console, file.write)
        with watcher.screen.live:
            try:
                code = run(watcher)
            except (KeyboardInterrupt, SystemExit):
                watcher.screen.print(
                    "interrupted: work on hosts continues; run the same command again to follow it"
                )
                code = INTERRUPTED
    for text in summary(watcher.transcript, code, watcher.now_s()):
        print_text(text, console)
    if code:
        console.print(Text(f"pyinfra's log: {log}", "dim"), soft_wrap=True)
    return code


def print_text(text: Text, console: Console) -> None:
    """Print a line; in a terminal, wrap the line and indent the other parts."""
    if not console.is_terminal:
        console.print(text, soft_wrap=True)
        return
    for number, line in enumerate(text.wrap(console, console.width - _INDENT)):
        console.print(Text(" " * _INDENT) + line if number else line, soft_wrap=True)


class _PipedScreen:
    live: AbstractContextManager[object] = nullcontext()

    def __init__(self, watcher: Watcher, console: Console):
        self.watcher, self.console = watcher, console
        self.printed: dict[str, str] = {}
        self.printed_at_s = time.monotonic()

    def print(self, text: str) -> None:
        print_text(_styled(text), self.console)

    def refresh(self) -> None:
        if time.monotonic() - self.printed_at_s < PRINT_INTERVAL_S:
            return
        self.printed_at_s = time.monotonic()
        for host in self.watcher.transcript.hosts.values():
            text = f"{host.name}: {': '.join(filter(None, host.line()))}"
            if self.printed.get(host.name) != text:
                self.printed[host.name] = text
                self.print(text)


class _LiveScreen(_PipedScreen):
    """Updates a line per host in place."""

    def __init__(self, watcher: Watcher, console: Console):
        super().__init__(watcher, console)
        self.live = Live(
            console=console, refresh_per_second=4, transient=True,
            get_renderable=lambda: rows(watcher.transcript, watcher.now_s(), console.width),
        )  # fmt: skip

    def refresh(self) -> None: ...


def rows(transcript: Transcript, duration_s: float, width: int) -> Group:
    """Return a line per host with name, task and progress, and a line with the duration."""
    lines = []
    name_width = max(map(len, transcript.hosts), default=0)
    for host in transcript.hosts.values():
        task, progress = host.line()
        name = f"{host.name:<{name_width}}  "
        suffix = f"  {progress}" if progress else ""
        style = "green" if host.is_done else ""
        if host.failed_step:
            style = "red bold"
        task = shorten(task, max(10, width - len(name) - len(suffix)))
        lines.append(Text.assemble((name, "bold"), (task, style), suffix))
    lines.append(Text(f"{format_duration(duration_s)}  {transcript.part}", "dim"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head_width = (width - 1) // 2
    tail_width = width - 1 - head_width
    return f"{text[:head_width]}…{text[len(text) - tail_width :]}"


def _styled(text: str) -> Text:
    if any(word in text for word in ("FAILED", "REFUSED", "Error")):
        return Text(text, "bold red")
    return Text(text, "yellow" if "warning" in text[:40].lower() else "")


def summary(transcript: Transcript, code: int, duration_s: float) -> Iterator[Text]:
    """Yield the result and number of changes for each host, then the duration of each part."""
    for host in sorted(transcript.hosts.values(), key=lambda host: not host.failed_step):
        if host.failed_step:
            outcome = Text(f"FAILED in {host.failed_step}", "bold red")
        elif host.serves:
            outcome = Text(host.serves[0], "green")
        else:
            outcome = Text("not finished", "bold red") if code else Text("done", "green")
        heading = Text.assemble((host.name, "bold"), "  ", outcome)
        yield Text(host.headline, "bold red") if host.headline else heading
        if not host.failed_step:
            results = host.serves[1:] if host.serves else host.step_results or host.last_results
            yield from (Text(f"  {line}") for line in results)
        yield from (Text(f"  {line}", "red") for line in host.problems)
        changed = f"{host.changed} of {host.steps} steps" if host.changed else "nothing"
        if host.headline:
            changed += f"; failed in {host.failed_step}"
        running = host.progress if host.task == "engine" else f"{host.task}: {host.progress}"
        if code == INTERRUPTED and host.progress and not (host.failed_step or host.is_done):
            yield Text(f"  changed {changed}; still running on the host: {running}")
        else:
            yield Text(f"  changed {changed}", "dim")
    if not transcript.parts_s:  # the deploy failed before the first step
        reasons = [
            line for line in transcript.other_lines if line.strip() and not _PREAMBLE.match(line)
        ]
        yield from map(_styled, reasons[-12:])
    parts = [f"{name} {format_duration(s)}" for name, s in transcript.parts_s.items() if s >= 0.5]
    yield Text(f"took {format_duration(duration_s)}" + (f" ({', '.join(parts)})" if parts else ""))
    if code:
        yield Text(f"failed: exit code {code}", "bold red")
