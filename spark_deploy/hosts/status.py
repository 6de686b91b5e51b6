"""Read the reports of the host tools: status, jobs, requests, evidence."""

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spark_contract import status, tool
from spark_contract.documents import DocumentError, parse, read
from spark_contract.job import JobState
from spark_contract.paths import engine_dir
from spark_contract.records import Stopped
from spark_contract.release import Release
from spark_contract.status import Pruning, Rollback
from spark_contract.tool import Problem, parse_problem
from spark_contract.units import BOOT_LINKS, PREPARE, SHARE_UNIT, drop_in_dir

from spark_deploy.hosts.facts import HostFact, split_sections


def poll_command(jobs: Sequence[str]) -> str:
    return tool.when_installed(tool.command_line(tool.JOB, "poll", *jobs))


def parse_poll(text: str) -> dict[str, JobState]:
    """Return job states by 12-digit digest; empty without the tools. Raises DocumentError."""
    states = parse(tuple[JobState, ...], text) if text.strip() else ()
    return {state.digest[:12]: state for state in states}


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs of a release, and jobs that continue after a reboot."""

    states: dict[str, JobState]
    boot_targets: tuple[str, ...] = ()  # prepare targets of all releases that start at boot
    jobs_in_target: tuple[str, ...] = ()  # jobs in this release's prepare target
    shares_files: bool = False  # serves files to peers, for this run or an interrupted run

    def are_done(self, names: Iterable[str]) -> bool:
        return all(name in self.states and self.states[name].state == "done" for name in names)


class JobStates(HostFact[Jobs]):
    default = staticmethod(lambda: Jobs({}))

    def command(self, jobs: Sequence[str], target: str) -> str:
        # Without names, the tool would report every job.
        poll = poll_command(jobs) if jobs else ":"
        drop_ins = shlex.quote(drop_in_dir(target))
        return (
            f"{poll}; ls {BOOT_LINKS} 2>/dev/null | sed -n 's/^{PREPARE.name}@/linked &/p'; "
            f"ls {drop_ins} 2>/dev/null | sed -n 's/\\.conf$//; s/^/pulled /p'; "
            f"! systemctl -q is-active {SHARE_UNIT} || echo sharing now"
        )

    def process(self, output: Iterable[str]) -> Jobs:
        marked: dict[str, list[str]] = {"linked": [], "pulled": [], "sharing": []}
        poll_lines: list[str] = []
        for line in output:
            marker, _, name = line.partition(" ")
            if marker in marked:
                marked[marker].append(name)
            else:
                poll_lines.append(line)
        return Jobs(
            parse_poll("\n".join(poll_lines)),
            boot_targets=tuple(marked["linked"]),
            jobs_in_target=tuple(marked["pulled"]),
            shares_files=bool(marked["sharing"]),
        )


@dataclass(frozen=True, slots=True)
class HostStatus:
    """Output of ``spark-host status``; ``report`` is ``None`` if it is missing or unreadable."""

    report: status.Status | None
    unreadable: str = ""  # why the output of installed tools is unreadable

    @property
    def installed(self) -> bool:
        return self.report is not None or bool(self.unreadable)

    def service(self, service: str) -> status.Service | None:
        return self.report.services.get(service) if self.report else None

    def release(self, name: str | None) -> status.ReleaseState | None:
        releases = self.report.releases if self.report else ()
        return next((release for release in releases if release.name == name), None)

    def has_failed_change(self, release: str) -> bool:
        state = self.release(release)
        return state is not None and state.change_failed

    def live_check(self, release: str) -> status.LiveCheck | None:
        results = (self.report.live, *self.report.more_live) if self.report else ()
        return next((live for live in results if live and live.release == release), None)

    def would_replace(self, service: str, release: str) -> bool:
        """Return whether a rollout may interrupt a service; ``True`` if the host is unreadable."""
        state = self.service(service)
        if state is None:
            return bool(self.unreadable)
        return state.active is not None or state.known_good not in (None, release)

    def expected_release(self, release: Release, scheduled: Iterable[Release]) -> Release:
        """Return the active release if it is scheduled and proven, otherwise ``release``."""
        state = self.service(release.service)
        active = state.active if state else None
        for other in scheduled:
            if other.name == active and not self.unproven_reason(release.service, other.name):
                return other
        return release

    def unit_overrides(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Return the files that change our units, except for the accepted files."""
        paths = self.report.unit_overrides if self.report else ()
        return tuple(path for path in paths if path not in accepted)

    def stop_message(self, service: str) -> str:
        """Return a message about who stopped the service on purpose; "" if nobody did."""
        state = self.service(service)
        if state is None or not state.stopped_by_hand or state.stopped_by_hand.on_request:
            return ""
        return stop_message(service, state.stopped_by_hand)

    def waits_for_request(self, service: str, release: str | None) -> bool:
        """Return whether the proven ``release`` waits for the next request."""
        state = self.service(service)
        if state is None or state.stopped_by_hand is None:
            return False
        return state.stopped_by_hand.on_request and state.known_good == release

    def rollout(self, service: str) -> status.RunningRollout | None:
        state = self.service(service)
        return state.rollout if state else None

    def usage(self) -> dict[str, status.KeyUsage]:
        totals: dict[str, status.KeyUsage] = {}
        for service in self.report.services.values() if self.report else ():
            for key, usage in (service.gateway.usage or {}).items():
                totals[key] = totals.get(key, status.KeyUsage()) + usage
        return totals

    def unknown_versions_message(self) -> str:
        """Return a message about versions that the host could not read in time; "" if none."""
        names = ", ".join(self.report.versions_unknown) if self.report else ""
        message = f"{names} did not report a version in time; assuming unchanged versions"
        return message if names else ""

    def unproven_reason(self, service: str, release: str) -> str:
        """Return why ``release`` is not proven on this host; "" if it is."""
        if self.report is None:
            return self.unreadable or "no host tools are installed yet"
        state = self.service(service)
        if state is None:
            return "serves nothing"
        if self.waits_for_request(service, release) and not state.gateway.difference:
            return ""
        result, live = self.release(release), self.live_check(release)
        unproven = result.unproven if result else "none"
        gateway, has_gateway = state.gateway, not state.head  # workers of a cluster have none
        at_boot = ", ".join(state.enabled) or "nothing"
        reasons = (
            (state.active != release, f"serves {state.active or 'nothing'}"),
            (state.known_good != release, "the check has not passed yet"),
            (state.enabled != (release,), f"starts {at_boot} at boot"),
            (unproven, f"proof: {unproven}"),
            (has_gateway and not state.traffic_open, "the gateway is closed"),
            (has_gateway and gateway.active != "active", "the gateway is not running"),
            (has_gateway and not gateway.enabled, "the gateway does not start at boot"),
            (has_gateway and gateway.key_problem, "the API key is missing or exposed"),
            (has_gateway and gateway.difference, f"the gateway: {gateway.difference}"),
            (not (live and live.ok), f"no answer: {live.detail if live else 'not tested'}"),
        )
        return next((reason for applies, reason in reasons if applies), "")


def unit_overrides_problem(paths: Iterable[str]) -> Problem:
    """Describe files that change our units, because they can start an engine without its check."""
    fix = "remove these and run `systemctl daemon-reload`, or list them in expect.unit_overrides"
    return Problem("systemd", f"{', '.join(paths)}: not written by a deploy", fix)


_START_PHASES = {"graphs": "CUDA graphs"}


def describe_start(times_s: Mapping[str, float]) -> str:
    phases = (f"{_START_PHASES.get(name, name)} {s:.0f} s" for name, s in times_s.items())
    return f"{sum(times_s.values()):.0f} s ({', '.join(phases)})"


ON_REQUEST = "stopped (on request)"


def stop_message(service: str, stopped: Stopped) -> str:
    who = stopped.by or "someone on the host"
    stays_down = f"; it stays down until {stopped.until}" if stopped.until else ""
    return (
        f"{service} was stopped on purpose by {who} at {stopped.at}{stays_down}; "
        "`spark-deploy start` starts it"
    )


def parse_status(text: str) -> HostStatus:
    """Parse a report; the text is empty if the tools are missing. Raises ValueError."""
    if not text.strip():
        return HostStatus(None)
    data = json.loads(text)
    try:
        return HostStatus(read(status.Status, data))
    except DocumentError as error:  # the deploy replaces the tools
        return HostStatus(None, f"the host tools are a different version ({error})")


class Status(HostFact[HostStatus]):
    default = staticmethod(lambda: HostStatus(None))

    def command(self) -> str:
        return tool.when_installed(tool.command_line(tool.STATUS, "--live"))

    def process(self, output: Iterable[str]) -> HostStatus:
        return parse_status("\n".join(output))


class ExistingUsers(HostFact[frozenset[str]]):
    default = frozenset

    def command(self, users: Sequence[str]) -> str:
        return f"getent passwd {' '.join(map(shlex.quote, users))} | cut -d: -f1; true"

    def process(self, output: Iterable[str]) -> frozenset[str]:
        return frozenset(output)


T = TypeVar("T")
_USAGE = f"{tool.TOOL} "  # start of the output for an unknown verb


def _no_tools() -> Problem:
    message = "the host tools are missing or older than this checkout"
    return Problem("spark-host", message, "run deploy.py for this host first")


def _parse_output(kind: type[T], output: Iterable[str]) -> T | Problem:
    text = "\n".join(output).strip()
    if not text or text.startswith(_USAGE):
        return _no_tools()
    return parse_problem(text.rpartition("\n")[2]) or parse(kind, text)


def _tool_command(command: str) -> str:
    # Older tools may not know the verb, which must not fail the fact.
    return tool.when_installed(f"{command} 2>&1 || :")


class RollbackPreview(HostFact["Rollback | Problem"]):
    default = staticmethod(_no_tools)

    def command(self, service: str, target: str | None) -> str:
        to_option = ("--to", target) if target else ()
        return _tool_command(tool.command_line(tool.ROLLBACK, service, *to_option, "--dry"))

    def process(self, output: Iterable[str]) -> Rollback | Problem:
        result = _parse_output(Rollback, output)
        return result.problem or result if isinstance(result, Rollback) else result


class PrunePreview(HostFact["Pruning | Problem"]):
    """Result of ``spark-host prune --dry``, or the problem that prevents it; ``keep`` is JSON."""

    default = staticmethod(_no_tools)

    def command(self, keep: str) -> str:
        return _tool_command(tool.command_line(tool.PRUNE, "--dry", keep))

    def process(self, output: Iterable[str]) -> Pruning | Problem:
        return _parse_output(Pruning, output)


_REQUESTS = re.compile(r"vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\d+(?:\.\d+)?)$")


@dataclass(frozen=True, slots=True)
class RequestCounts:
    running: int
    waiting: int


class Requests(HostFact[dict[str, RequestCounts]]):
    default = dict

    def command(self, services: Sequence[str]) -> str:
        commands = []
        for name in services:
            header, socket = shlex.quote(f"== {name}"), f"{engine_dir(name)}/engine.sock"
            commands.append(
                f"echo {header}; curl -s -m 5 --unix-socket {shlex.quote(socket)} "
                "http://engine/metrics | grep '^vllm:num_requests_' || true"
            )
        return "; ".join(commands)

    def process(self, output: Iterable[str]) -> dict[str, RequestCounts]:
        counts = {}
        for name, lines in split_sections(output).items():
            sums = {"running": 0, "waiting": 0}
            matches = [match for match in map(_REQUESTS.match, lines) if match]
            for match in matches:
                state, count = match.groups()
                sums[state] += int(float(count))
            if matches:
                counts[name] = RequestCounts(**sums)
        return counts


class Evidence(HostFact["status.Evidence | None"]):
    """Output of ``spark-host evidence``; ``None`` if the tools are missing or older."""

    default = staticmethod(lambda: None)

    def command(self) -> str:
        return tool.when_installed(f"{tool.command_line(tool.EVIDENCE)} || true")

    def process(self, output: Iterable[str]) -> status.Evidence | None:
        try:
            return read(status.Evidence, json.loads("\n".join(output)))
        except (ValueError, DocumentError):
            return None
