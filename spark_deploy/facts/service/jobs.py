"""State of the slow work on a host, in one command for any number of jobs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase

UNITS_DIR = "/etc/systemd/system"
BOOT_LINKS = f"{UNITS_DIR}/multi-user.target.wants"


@dataclass(frozen=True, slots=True)
class JobState:
    """One job as ``spark-host job poll`` reports it."""

    state: str  # "waiting" | "running" | "done" | "failed" | "unknown"
    title: str
    progress: str
    exit_code: int | None
    log_tail: tuple[str, ...]


def poll_command(tools_dir: str, jobs: Sequence[str]) -> str:
    """Return the command that reports on ``jobs``; silent when the tools are not there yet."""
    tool = shlex.quote(f"{tools_dir}/current/bin/spark-host")
    names = " ".join(shlex.quote(job) for job in jobs)
    return f"if [ -x {tool} ]; then {tool} job poll {names}; fi"


def parse_poll(text: str) -> dict[str, JobState]:
    """Read the JSON list of ``job poll``; empty when the host has no tools yet.

    Raises:
        ValueError: the text is not what the tool prints.
    """
    if not text.strip():
        return {}
    try:
        return {entry["digest"][:12]: _job_state(entry) for entry in json.loads(text)}
    except (KeyError, TypeError) as error:
        raise ValueError(f"job poll: missing {error}") from error


def _job_state(entry: dict[str, Any]) -> JobState:
    return JobState(
        state=entry["state"],
        title=entry.get("title") or entry["digest"][:12],
        progress=_progress_text(entry),
        exit_code=entry.get("exit_code"),
        log_tail=tuple(entry.get("log_tail") or ()),
    )


def _progress_text(entry: dict[str, Any]) -> str:
    """Say where a job stands, in the units people read."""
    progress = entry.get("progress") or {}
    if entry["state"] == "unknown":
        return str(entry.get("result") or "")
    if not progress:  # a tool that counts no bytes: its last line and how long it has run
        elapsed = f" ({entry['elapsed_s']} s)" if entry.get("elapsed_s") else ""
        return f"{entry.get('last_line') or entry.get('result') or 'starting'}{elapsed}"
    words = [str(progress.get("phase") or "working")]
    done, total = progress.get("bytes"), progress.get("total")
    if done is not None and total:
        words.append(f"{done / 1e9:.2f}/{total / 1e9:.2f} GB ({100 * done / total:.0f} %)")
    if progress.get("rate_bytes_per_s"):
        words.append(f"{progress['rate_bytes_per_s'] / 1e6:.0f} MB/s")
    if progress.get("eta_s") is not None:
        words.append(f"{progress['eta_s']:.0f} s left")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a release, and what a boot would go on with."""

    states: dict[str, JobState]  # by 12-digit name; jobs the host does not know are left out
    linked: tuple[str, ...] = ()  # prepare targets of any release that the boot pulls in
    pulled: tuple[str, ...] = ()  # jobs that this release's target pulls in

    def done(self, names: Iterable[str]) -> bool:
        """Return whether each of ``names`` has its proof."""
        return all(name in self.states and self.states[name].state == "done" for name in names)


class JobStates(FactBase[Jobs]):
    """State of jobs, what their release's prepare target pulls in, and which targets boot."""

    @staticmethod
    def default() -> Jobs:
        """Return what a host without our tools has to say."""
        return Jobs({})

    def command(self, tools_dir: str, jobs: Sequence[str], target: str) -> str:
        # Without names the tool would report on every job there is.
        ask = poll_command(tools_dir, jobs) if jobs else ":"
        wants = shlex.quote(f"{UNITS_DIR}/{target}.d")
        return (
            f"{ask}; ls {BOOT_LINKS} 2>/dev/null | sed -n 's/^spark-prepare@/linked &/p'; "
            f"ls {wants} 2>/dev/null | sed -n 's/\\.conf$//; s/^/pulled /p'"
        )

    def process(self, output: Iterable[str]) -> Jobs:
        told: dict[str, list[str]] = {"linked": [], "pulled": []}
        answer = []
        for line in output:
            word, _, name = line.partition(" ")
            if word in told:
                told[word].append(name)
            else:
                answer.append(line)
        try:
            states = parse_poll("\n".join(answer))
            return Jobs(states, tuple(told["linked"]), tuple(told["pulled"]))
        except ValueError as error:
            raise FactProcessError(str(error)) from error
