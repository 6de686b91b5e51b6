"""State of the slow work on a host, in one command for any number of jobs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyinfra.api.exceptions import FactProcessError
from spark_contract.documents import parse
from spark_contract.host import tool
from spark_contract.host.units import BOOT_LINKS, PREPARE, SHARE_UNIT, drop_in_dir
from spark_contract.work.job import JobState

from spark_deploy.facts.reading import HostFact


def poll_command(jobs: Sequence[str]) -> str:
    """Return the command that reports on ``jobs``; silent when the tools are not there yet."""
    return tool.when_installed(tool.line(tool.JOB, "poll", *jobs))


def parse_poll(text: str) -> dict[str, JobState]:
    """Read what ``job poll`` prints, by twelve digits; empty when the host has no tools yet.

    Raises:
        DocumentError: the text is not what the tool prints.
    """
    states = parse(tuple[JobState, ...], text) if text.strip() else ()
    return {state.digest[:12]: state for state in states}


def progress_text(state: JobState) -> str:
    """Say where a job stands, in the units people read."""
    if state.state == "unknown":
        return state.result
    if state.progress is None:  # a tool that counts no bytes: its last line and how long it runs
        elapsed = f" ({state.elapsed_s} s)" if state.elapsed_s else ""
        return f"{state.last_line or state.result or 'starting'}{elapsed}"
    progress = state.progress
    words = [progress.phase or "working"]
    done, total = progress.bytes, progress.total
    if done is not None and total:
        words.append(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB")
    if progress.rate_bytes_per_s:
        words.append(f"{progress.rate_bytes_per_s / 1e6:.0f} MB/s")
    if progress.eta_s is not None:
        left = progress.eta_s
        words.append(f"{left} s left" if left < 90 else f"{left / 60:.0f} min left")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a release, and what a boot would go on with."""

    states: dict[str, JobState]  # by 12-digit name; jobs the host does not know are left out
    linked: tuple[str, ...] = ()  # prepare targets of any release that the boot pulls in
    pulled: tuple[str, ...] = ()  # jobs that this release's target pulls in
    lends: bool = False  # files to other hosts, for this run or an earlier one

    def done(self, names: Iterable[str]) -> bool:
        """Return whether each of ``names`` has its proof."""
        return all(name in self.states and self.states[name].state == "done" for name in names)


class JobStates(HostFact[Jobs]):
    """State of jobs, what their release's prepare target pulls in, and which targets boot."""

    @staticmethod
    def default() -> Jobs:
        """Return what a host without our tools has to say."""
        return Jobs({})

    def command(self, jobs: Sequence[str], target: str) -> str:
        # Without names the tool would report on every job there is.
        ask = poll_command(jobs) if jobs else ":"
        wants = shlex.quote(drop_in_dir(target))
        return (
            f"{ask}; ls {BOOT_LINKS} 2>/dev/null | sed -n 's/^{PREPARE.name}@/linked &/p'; "
            f"ls {wants} 2>/dev/null | sed -n 's/\\.conf$//; s/^/pulled /p'; "
            f"! systemctl -q is-active {SHARE_UNIT} || echo lends now"
        )

    def process(self, output: Iterable[str]) -> Jobs:
        told: dict[str, list[str]] = {"linked": [], "pulled": [], "lends": []}
        answer = []
        for line in output:
            word, _, name = line.partition(" ")
            if word in told:
                told[word].append(name)
            else:
                answer.append(line)
        try:
            states = parse_poll("\n".join(answer))
            return Jobs(states, tuple(told["linked"]), tuple(told["pulled"]), bool(told["lends"]))
        except ValueError as error:
            raise FactProcessError(str(error)) from error
