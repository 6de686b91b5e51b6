"""The timers of a schedule on a host, and what its systemd thinks of times."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyinfra.api.exceptions import FactProcessError
from spark_contract import tool
from spark_contract.documents import DocumentError, parse
from spark_contract.errors import problem_in
from spark_contract.job import JobState
from spark_contract.keep import Ours
from spark_contract.paths import CURRENT_TOOLS, QUANTISER, SITE
from spark_contract.units import (
    BOOT_LINKS,
    DAILY_LINK,
    HOURS,
    PREPARE,
    SHARE_UNIT,
    UNITS_DIR,
    WATCH,
    drop_in_dir,
)

from spark_deploy.hosts.facts.reading import HostFact


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


class LoginAddress(HostFact[str]):
    """The host's address that this login goes to; "" where there was no SSH login.

    To be asked without sudo, which drops the variable.
    """

    default = str

    def command(self) -> str:
        return "printf '%s\\n' \"$SSH_CONNECTION\""

    def process(self, output: Iterable[str]) -> str:
        words = " ".join(output).split()
        return words[2] if len(words) == 4 else ""


class SymlinkTarget(HostFact[str]):
    """Where a symlink points, literally; empty when there is none."""

    default = str

    def command(self, path: str) -> str:
        return f"readlink -- {shlex.quote(path)} || true"

    def process(self, output: Iterable[str]) -> str:
        return next(iter(output), "")


@dataclass(frozen=True, slots=True)
class Site:
    """The host's Python, and what it has from us."""

    python_version: str  # "3.12"; "" where there is no usable one
    machine: str  # "aarch64"
    target: str  # where `site` points; "" when absent
    receipt: str  # digest of what was unpacked; "" when unproven
    tools: str  # where `current` points; "" when absent
    timer: str  # where the link that starts the daily look points; "" when absent


class PythonSite(HostFact[Site]):
    """Version and architecture of ``python3``, our site directory and which tools are current."""

    def command(self) -> str:
        return (
            "python3 -I -c 'import platform, sys; "
            'print("%d.%d" % sys.version_info[:2], platform.machine())\' 2>/dev/null || echo -; '
            f"readlink -- {SITE} || echo -; cat {SITE}/.receipt 2>/dev/null || echo -; "
            f"readlink -- {CURRENT_TOOLS} || echo -; readlink -- {DAILY_LINK} || echo -"
        )

    def process(self, output: Iterable[str]) -> Site:
        lines = list(output)
        if len(lines) != 5 or " " not in lines[0]:
            return Site("", "", "", "", "", "")
        version, machine = lines[0].split()
        target, receipt, tools, timer = ("" if line == "-" else line for line in lines[1:])
        return Site(version, machine, target, receipt, tools, timer)


@dataclass(frozen=True, slots=True)
class Quantiser:
    """The Python of the engine's image, and which of AutoRound's wheels the host has for it."""

    python_version: str  # "3.12"; "" where there is no image yet
    machine: str  # "aarch64"
    receipt: str  # digest of what was unpacked; "" when unproven


class QuantiserSite(HostFact[Quantiser]):
    """Version and architecture of ``python3`` in an image, and our folder of AutoRound."""

    def command(self, image: str) -> str:
        said = 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())'
        run = f"docker run --rm --network none --log-driver none --entrypoint python3 {image}"
        return (
            f"{{ docker image inspect {shlex.quote(image)} >/dev/null && "
            f"{run} -c {shlex.quote(said)}; }} 2>/dev/null || echo -; "
            f"cat {QUANTISER}/.receipt 2>/dev/null || echo -"
        )

    def process(self, output: Iterable[str]) -> Quantiser:
        lines = list(output)
        if len(lines) != 2 or " " not in lines[0]:
            return Quantiser("", "", "")
        version, machine = lines[0].split()
        return Quantiser(version, machine, "" if lines[1] == "-" else lines[1])


class OursOnHost(HostFact[Ours]):
    """What ``spark-host manifest`` says; the tools that answer come with the question.

    Give them as ``_stdin``: ``payload.sent``.
    """

    def requires_command(self, command: str) -> str:
        return "python3"

    def command(self, command: str) -> str:
        return f"{command} 2>&1 || :"

    def process(self, output: Iterable[str]) -> Ours:
        """Read the answer.

        Raises:
            FactProcessError: it is none; says what the host said instead.
        """
        lines = [line for line in output if line.strip()]
        try:
            return parse(Ours, lines[-1] if lines else "")
        except DocumentError as error:
            problem = problem_in(lines[-1]) if lines else None
            told = "\n".join(lines[-3:])
            said = problem or f"{error}: {told}"
            raise FactProcessError(str(said)) from error


_BREAK = "== key"


@dataclass(frozen=True, slots=True)
class HostCertificate:
    """The certificate and the public half of the key beside it, PEM; empty when absent."""

    certificate: bytes
    public_key: bytes


class GatewayCertificate(HostFact[HostCertificate]):
    """The certificate of a gateway (openssl, on which ca-certificates depends)."""

    @staticmethod
    def default() -> HostCertificate:
        """Return what a host without one has."""
        return HostCertificate(b"", b"")

    def command(self, certificate: str, key: str) -> str:
        return (
            f"cat {shlex.quote(certificate)} 2>/dev/null; echo '{_BREAK}'; "
            f"openssl pkey -in {shlex.quote(key)} -pubout 2>/dev/null; true"
        )

    def process(self, output: Iterable[str]) -> HostCertificate:
        certificate, _, key = "\n".join(output).partition(_BREAK)
        return HostCertificate(certificate.strip().encode(), key.strip().encode())


class WatchTools(HostFact[str]):
    """The folder of tools whose code the watch over a release runs; empty when none runs."""

    default = str

    def command(self, release: str) -> str:
        unit = shlex.quote(WATCH.of(release))
        return (
            f"pid=$(systemctl show -p MainPID --value {unit}); "
            "cat /proc/$pid/environ 2>/dev/null | tr '\\0' '\\n' | "
            "sed -n 's/^PYTHONPATH=//p' | cut -d: -f1"
        )

    def process(self, output: Iterable[str]) -> str:
        return next(iter(output), "")


class TailnetAddress(HostFact[str]):
    """The host's address in its tailnet; empty when tailscale is not up."""

    default = str

    def command(self) -> str:
        return "tailscale ip -4 2>/dev/null; true"

    def process(self, output: Iterable[str]) -> str:
        return next((line.strip() for line in output if line.strip()), "")


class Timers(HostFact[dict[str, bool]]):
    """Each timer of a schedule, with whether it runs and starts with the host."""

    default = dict

    def command(self) -> str:
        return (
            f'for path in {UNITS_DIR}/{HOURS.of("*")}; do [ -e "$path" ] || continue; '
            'name=$(basename "$path"); '
            'echo "$name $(systemctl is-active "$name") $(systemctl is-enabled "$name" 2>&1)"; done'
        )

    def process(self, output: Iterable[str]) -> dict[str, bool]:
        lines = (line.split() for line in output if line.strip())
        return {name: state == ["active", "enabled"] for name, *state in lines}


class Calendars(HostFact[str]):
    """Why the first of some calendar expressions is none; "" when all of them are."""

    default = str

    def command(self, times: Sequence[str]) -> str:
        words = " ".join(map(shlex.quote, times))
        return (
            f'for at in {words}; do systemd-analyze calendar "$at" >/dev/null 2>&1 '
            '|| { echo "$at"; break; }; done'
        )

    def process(self, output: Iterable[str]) -> str:
        found = "".join(output).strip()
        return f"{found!r} is no time that its systemd understands" if found else ""
