"""What the tools on a host report: status, jobs, requests, evidence."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pyinfra.api.exceptions import FactProcessError
from spark_contract import status, tool
from spark_contract.documents import DocumentError, parse, read
from spark_contract.errors import Problem, problem_in
from spark_contract.job import JobState
from spark_contract.keep import Pruning
from spark_contract.paths import engine_dir
from spark_contract.records import Stopped
from spark_contract.release import Release
from spark_contract.status import Rollback
from spark_contract.units import (
    BOOT_LINKS,
    PREPARE,
    SHARE_UNIT,
    drop_in_dir,
)

from spark_deploy.hosts.facts import HostFact


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


@dataclass(frozen=True, slots=True)
class HostStatus:
    """``spark-host status``; ``None`` means that the tools are not there yet."""

    told: status.Status | None
    unreadable: str = ""  # why the tools that are there cannot be understood

    @property
    def installed(self) -> bool:
        """Whether the host has our tools at all."""
        return self.told is not None or bool(self.unreadable)

    def service(self, service: str) -> status.Service | None:
        """Return what is known of one service."""
        return self.told.services.get(service) if self.told else None

    def release(self, name: str | None) -> status.ReleaseState | None:
        """Return what is known of a release that lies on the host."""
        found = self.told.releases if self.told else ()
        return next((one for one in found if one.name == name), None)

    def left_failed(self, release: str) -> bool:
        """Whether the last change to a release ended as a failed unit."""
        found = self.release(release)
        return found is not None and found.change_failed

    def live(self, release: str) -> status.Live | None:
        """Return the outcome of one completion through the running engine."""
        told = (self.told.live, *self.told.more_live) if self.told else ()
        return next((one for one in told if one and one.release == release), None)

    def has_to_lose(self, service: str, release: str) -> bool:
        """Whether a change to ``release`` would replace what is served, or was proven to be."""
        state = self.service(service)
        if state is None:
            return bool(self.unreadable)
        return state.active is not None or state.good not in (None, release)

    def due(self, plan: Release, scheduled: Iterable[Release]) -> Release:
        """Return what the host is to serve now: what its schedule changed to, else the plan's."""
        state = self.service(plan.service)
        active = state.active if state else None
        for other in scheduled:
            if other.name == active and not self.unproven(plan.service, other.name):
                return other
        return plan

    def stopped(self, service: str) -> str:
        """Say who stopped a service on purpose, and since when; "" when nobody did."""
        state = self.service(service)
        if state is None or not state.stopped_by_hand:
            return ""
        return stopped_text(service, state.stopped_by_hand)

    def rollout(self, service: str) -> status.UnderWay | None:
        """Return the change of a service that the host is carrying out now."""
        state = self.service(service)
        return state.rollout if state else None

    def unknown_versions(self) -> str:
        """Say which versions the host could not tell; "" when it told all."""
        names = ", ".join(self.told.versions_unknown) if self.told else ""
        return f"no version of {names}: no answer in time; taken as unchanged" if names else ""

    def unproven(self, service: str, release: str) -> str:
        """Say why ``release`` is not what the host provably serves; "" when it is."""
        if self.told is None:
            return self.unreadable or "the host tools are not there yet"
        state = self.service(service)
        if state is None:
            return "serves nothing"
        found, live = self.release(release), self.live(release)
        unproven = found.unproven if found else "none"
        reasons = (
            (state.active != release, f"serves {state.active or 'nothing'}"),
            (state.good != release, "its check has not passed yet"),
            (state.enabled != (release,), f"boots {', '.join(state.enabled) or 'nothing'}"),
            (unproven, f"proof: {unproven}"),
            # Of a cluster only the head is spoken to.
            *(() if state.head else _gateway_faults(state)),
            (not (live and live.ok), f"no answer: {live.detail if live else 'not asked'}"),
        )
        return next((text for wrong, text in reasons if wrong), "")


def stopped_text(service: str, found: Stopped) -> str:
    """Say who stopped a service on purpose, since when, and what ends that."""
    who = found.by or "someone on the host"
    return (
        f"{service} was stopped on purpose by {who} and is down since {found.at}"
        f"{f' until {found.until}' if found.until else ''}; `spark-deploy start` brings it back"
    )


def _gateway_faults(state: status.Service) -> tuple[tuple[object, str], ...]:
    gateway = state.gateway
    return (
        (not state.traffic_open, "the gateway is closed"),
        (gateway.active != "active", "the gateway is not running"),
        (not gateway.enabled, "the gateway does not start with the host"),
        (gateway.key_problem, "the API key is missing or exposed"),
        (gateway.difference, f"the gateway: {gateway.difference}"),
    )


def parse_status(text: str) -> HostStatus:
    """Read what ``spark-host status`` printed; nothing means that the tools are not there.

    Raises:
        ValueError: it is not JSON.
    """
    if not text.strip():
        return HostStatus(None)
    data = json.loads(text)
    try:
        return HostStatus(read(status.Status, data))
    except DocumentError as error:  # a deploy replaces the tools first, and asks again
        return HostStatus(None, f"its host tools are of another version ({error})")


class Status(HostFact[HostStatus]):
    """Everything the host tools know, one live completion included."""

    @staticmethod
    def default() -> HostStatus:
        """Return what a host without our tools has to say."""
        return HostStatus(None)

    def command(self) -> str:
        return tool.when_installed(tool.line(tool.STATUS, "--live"))

    def process(self, output: Iterable[str]) -> HostStatus:
        try:
            return parse_status("\n".join(output))
        except ValueError as error:
            raise FactProcessError(f"spark-host status: {error}") from error


class UsersKnown(HostFact[frozenset[str]]):
    """Those of some system users that the host knows."""

    default = frozenset

    def command(self, users: Sequence[str]) -> str:
        return f"getent passwd {' '.join(map(shlex.quote, users))} | cut -d: -f1; true"

    def process(self, output: Iterable[str]) -> frozenset[str]:
        return frozenset(output)


T = TypeVar("T")


_USAGE = f"{tool.TOOL} "  # begins the list of verbs that tools print for one they do not know


def _no_tools() -> Problem:
    """Return what is wrong with a host that has no tools, or tools that lack the verb."""
    what = "did not answer; the host tools are missing or older than this checkout"
    return Problem("spark-host", what, "run deploy.py for this host first")


def _parse_answer(kind: type[T], output: Iterable[str]) -> T | Problem:
    text = "\n".join(output).strip()
    if not text or text.startswith(_USAGE):
        return _no_tools()
    if problem := problem_in(text.rpartition("\n")[2]):
        return problem
    try:
        return parse(kind, text)
    except DocumentError as error:
        raise FactProcessError(f"{kind.__name__}: {error}") from error


class WayBack(HostFact["Rollback | Problem"]):
    """What ``spark-host rollback --dry`` says, or why it refuses."""

    default = staticmethod(_no_tools)

    def command(self, service: str, to: str | None) -> str:
        to_words = ("--to", to) if to else ()
        return _tool_command(tool.line(tool.ROLLBACK, service, *to_words, "--dry"))

    def process(self, output: Iterable[str]) -> Rollback | Problem:
        found = _parse_answer(Rollback, output)
        return found.problem or found if isinstance(found, Rollback) else found


class Prunable(HostFact["Pruning | Problem"]):
    """What ``spark-host prune --dry`` would remove, or why it refuses; ``keep`` is its JSON."""

    default = staticmethod(_no_tools)

    def command(self, keep: str) -> str:
        return _tool_command(tool.line(tool.PRUNE, "--dry", keep))

    def process(self, output: Iterable[str]) -> Pruning | Problem:
        return _parse_answer(Pruning, output)


def _tool_command(command: str) -> str:
    # Older tools print their list of verbs and fail; that is no answer, and no broken host.
    return tool.when_installed(f"{command} 2>&1 || :")


_COUNTED = re.compile(r"vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\d+(?:\.\d+)?)$")


@dataclass(frozen=True, slots=True)
class Count:
    """Requests at one moment."""

    running: int
    waiting: int


class Requests(HostFact[dict[str, Count]]):
    """Of each service whose engine answers."""

    default = dict

    def command(self, services: Sequence[str]) -> str:
        return "; ".join(
            f"echo {shlex.quote(f'== {name}')}; curl -s -m 5 --unix-socket "
            f"{shlex.quote(f'{engine_dir(name)}/engine.sock')} http://engine/metrics | "
            "grep '^vllm:num_requests_' || true"
            for name in services
        )

    def process(self, output: Iterable[str]) -> dict[str, Count]:
        found: dict[str, dict[str, int]] = {}
        name = ""
        for line in output:
            if line.startswith("== "):
                name = line.removeprefix("== ")
            elif counted := _COUNTED.match(line):
                of_service = found.setdefault(name, {})
                of_service[counted[1]] = of_service.get(counted[1], 0) + int(float(counted[2]))
        return {
            name: Count(one.get("running", 0), one.get("waiting", 0)) for name, one in found.items()
        }


class Evidence(HostFact["status.Evidence | None"]):
    """``spark-host evidence``; ``None`` where the tools are not there, or know no such verb."""

    @staticmethod
    def default() -> status.Evidence | None:
        """Return what a host without our tools has to say."""
        return None

    def command(self) -> str:
        return tool.when_installed(f"{tool.line(tool.EVIDENCE)} || true")

    def process(self, output: Iterable[str]) -> status.Evidence | None:
        try:
            return read(status.Evidence, json.loads("\n".join(output)))
        except (ValueError, DocumentError):
            return None
