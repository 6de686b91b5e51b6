"""What pyinfra prints while a deploy runs, read line by line into where each host stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_deploy.documents.shown import in_words

_STEP = re.compile(r"--> Starting operation: (?P<role>[^|]+?) \| (?P<name>.+?)\s*$")
_HOST = re.compile(r"^ {4}\[(?P<host>[^\]]+)\]\s+(?P<text>.*?)\s*$")
_JOB = re.compile(
    r"(?P<title>(?:fetch|build|pull|remove) .+): (?P<state>[a-z]+)(?:: (?P<how>.*))?$"
)
_ROLLOUT = re.compile(r"rollout of \S+: (?P<phase>[\w-]+): (?P<said>.*)")
_ENDS = ("Success", "No changes", "Skipped", "Error", "Failed")
_PARTS = {
    "host": ("Reboots", "Preflight", "Base", "Tools", "CUDA", "Docker"),
    "model and image": ("Sources", "Checkpoint", "Image", "Ready", "Discard"),
    "engine": ("Serve", "Rollback"),
    "proof": ("Verify",),
}
_ENGINE = "engine"
_WAITS_FOR_WORK = "Wait until everything is prepared"
_PHASES = {
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
        """What serves and how proven, else what the last step that told anything said."""
        return self.serves or [line for line in self.notes if not _is_progress(line)] or self.said

    def line(self) -> tuple[str, str]:
        """Return what the host is doing, and how far it is with that."""
        if self.failed:
            return f"FAILED in {self.failed}", ""
        if self.ended:
            return self.step, ""
        if self.how:
            return self.what, self.how
        return f"{self.step}{f': {self.what}' if self.what else ''}", ""

    @property
    def going_on(self) -> str:
        """What the host carries out by itself, as it last said; "" when it said of nothing."""
        if self.failed or self.ended or not self.how:
            return ""
        return self.how if self.what == _ENGINE else f"{self.what}: {self.how}"


@dataclass(slots=True)
class Transcript:
    """Everything read so far."""

    hosts: dict[str, HostView] = field(default_factory=dict)
    part: str = ""
    parts_s: dict[str, float] = field(default_factory=dict)
    since_s: float = 0.0
    others: list[str] = field(default_factory=list)  # lines of no host, since the last step

    def read(self, line: str, now_s: float) -> list[str]:
        """Take in a line; return what a person has to see at once."""
        line = in_words(line)
        self._pass(now_s)
        if step := _STEP.search(line):
            return self._begin(step["role"].strip(), step["name"])
        if said := _HOST.match(line):
            return self._of_host(self.hosts.setdefault(said["host"], HostView(said["host"])),
                                 said["text"])  # fmt: skip
        self.others.append(line.rstrip())
        return [line.strip()] if re.match(r"\s*(warning|error|!!!)\b", line.lower()) else []

    def _pass(self, now_s: float) -> None:
        """Put the time since the last line to the part that went on meanwhile."""
        if self.part:
            passed_s = now_s - self.since_s
            self.parts_s[self.part] = self.parts_s.get(self.part, 0.0) + passed_s
        self.since_s = now_s

    def _begin(self, role: str, name: str) -> list[str]:
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
        return []

    def _turn(self, name: str) -> list[str]:
        """Return the hosts whose turn a step is; none where it is of all at once."""
        named = name.rpartition(" on ")[2].split(", ")
        return named if all(one in self.hosts for one in named) else []

    def _of_host(self, host: HostView, text: str) -> list[str]:
        if text in _ENDS or text.startswith("Error"):
            return self._end(host, text)
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

    def _end(self, host: HostView, result: str) -> list[str]:
        host.ended = True
        host.steps += result != "Skipped"
        host.changed += result == "Success"
        if result.startswith(("Error", "Failed")):
            host.failed = host.step
            host.problems = list(host.notes)
            return [f"{host.name}: FAILED in {host.step}", *(f"  {note}" for note in host.notes)]
        return []


def _is_progress(line: str) -> bool:
    return bool(_ROLLOUT.match(line) or _JOB.match(line))


def _part_of(role: str, name: str) -> str:
    if name == _WAITS_FOR_WORK:
        return "model and image"
    return next((part for part, roles in _PARTS.items() if role in roles), "host")


def _phase(phase: str, said: str) -> str:
    """Say a phase of a rollout in plain words; of the engine's log only how long it has been."""
    waited = re.search(r"waited_s=(\d+)", said)
    told = phase_said(phase)
    if waited:
        return f"{told}, {minutes(int(waited[1]))}"
    return f"{told}: {said}" if phase in ("rollback",) else told


def phase_said(phase: str) -> str:
    """Say in plain words what a rollout does."""
    return _PHASES.get(phase, phase)


def minutes(seconds: float) -> str:
    """Return a time as people say it: 0:52, 6:14, 1:02:03."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{text}" if hours else text


def parts_text(parts_s: Mapping[str, float], took_s: float) -> str:
    """Say how long all took, and how long each part."""
    shown = [f"{name} {minutes(seconds)}" for name, seconds in parts_s.items() if seconds >= 0.5]
    parts = f" ({', '.join(shown)})" if shown else ""
    return f"{minutes(took_s)}{parts}"
