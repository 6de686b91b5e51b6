"""Interrupts a run at a chosen point and checks that the next run repairs everything."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.memory import limit_command
from tests.faults import disks
from tests.faults.pause import JOBS, Pause, kill_running
from tests.faults.sweep import PARTS
from tests.host.conftest import USUAL
from tests.labkit import CHECKOUT, Guest, Site, guest_named, info, lab, pythonpath
from tests.traces import difference, digest

DEPLOY = "deploy.py"
TIMEOUT_S = 300  # from a bare host to a running job, on a busy machine


@dataclass
class Host:
    """A guest of a sweep, and its digest after each undisturbed scenario."""

    name: str
    site: Site
    expected: dict[str, list[str]]

    @classmethod
    def start(cls, name: str, root: Path, expected: dict[str, list[str]]) -> Host:
        lab("up", name, "--engine", "stub")
        return cls(name, Site(root, hosts=[name]), expected)

    @property
    def guest(self) -> Guest:
        return guest_named(self.name)

    def recreate(self) -> None:
        disks.discard(self.name)
        lab("up", self.name, "--fresh", "--engine", "stub")
        self.trust_host_key()

    def trust_host_key(self) -> None:
        shutil.copy(info()["ssh"]["known_hosts"], self.site.root / "known_hosts")

    def choose(self, **choices: object) -> None:
        self.site.choices.clear()
        self.site.choose(**{**USUAL, **choices})

    def deploy(self, deploy: str = DEPLOY) -> None:
        self.site.deploy(deploy=deploy).assert_succeeded()

    def wait_until_up(self) -> None:
        self.guest.wait(
            "systemctl is-system-running | grep -qE 'running|degraded'", seconds=TIMEOUT_S
        )
        for unit in self.guest.boots():
            self.guest.wait(f"systemctl is-active {unit}", seconds=TIMEOUT_S)

    def cut_power(self) -> None:
        lab("break", "power-cut", self.name)
        lab("up", self.name, "--engine", "stub")
        self.wait_until_up()


@dataclass(frozen=True)
class Scenario:
    name: str
    set_up: Callable[[Host], None]
    deploy: str = DEPLOY


def bare_host(host: Host) -> None:
    host.recreate()
    host.choose()


def one_release(host: Host) -> None:
    bare_host(host)
    host.deploy()


def two_releases(host: Host) -> None:
    one_release(host)
    host.choose(profile="v2-tq")
    host.deploy()


def _from_disk(
    label: str, make: Callable[[Host], None], **choices: object
) -> Callable[[Host], None]:
    """Return a setup that restores the disk that ``make`` produced, or produces it first."""

    def set_up(host: Host) -> None:
        if disks.has(host.name, label):
            disks.restore(host.name, label)
            host.trust_host_key()
        else:
            make(host)
            disks.save(host.name, label)
        host.wait_until_up()
        host.choose(**choices)

    return set_up


def models_on_request(host: Host) -> None:
    """Add two services on request to a host with memory for one: the second stops the first."""
    _from_disk("one", one_release)(host)
    host.guest.run(limit_command(3.2))
    service = {"model": "lab-stub", "profile": "v2", "memory_gib": 3, "start": "on-request"}
    names = ("one", "two")
    services = {
        name: {**service, "names": [name], "port": port} for port, name in enumerate(names, 8001)
    }
    host.choose(services=services)


_TWO_RELEASES = partial(_from_disk, "two", two_releases, profile="v2-tq")
_ONE_RELEASE = partial(_from_disk, "one", one_release)
_LIST = (
    Scenario("rollback", _TWO_RELEASES(), "deploys/rollback.py"),
    Scenario("prune", _TWO_RELEASES(releases={"keep": 0}), "deploys/prune.py"),
    Scenario("no-op", _ONE_RELEASE()),
    Scenario("profile switch", _ONE_RELEASE(profile="v2-native")),
    Scenario("models on request", models_on_request),
    Scenario("first deploy", bare_host),  # the longest
)
SCENARIOS = {scenario.name: scenario for scenario in _LIST}
SUFFIXES = {"KILL": "", "INT": ", interrupted", "CUT": ", connection cut", "POWER": ", power cut"}
CONTROLLER_REPORTS = ("INT", "CUT")  # after these the controller still prints its error


@dataclass(frozen=True)
class Operation:
    number: int
    name: str
    seconds: list[float]


@dataclass(frozen=True)
class Point:
    """Where a run is interrupted, and by which signal."""

    number: int
    name: str
    moment: str
    command: int = -1
    delay_s: float = 0.0
    how: str = "KILL"

    def __str__(self) -> str:
        return f"{self.number:03d} {self.moment} {self.name}{SUFFIXES[self.how]}"

    @property
    def words(self) -> str:
        """Return the argument of ``interrupted_run.py``; a power cut kills the run as well."""
        how = "KILL" if self.how == "POWER" else self.how
        return f"{self.number} {self.moment} {self.command} {self.delay_s:.3f} {how}"


def list_points(operations: list[Operation], *, hows: tuple[str, ...] = ("KILL",)) -> list[Point]:
    """Return the points at which the state of a host may differ.

    The end of an operation with commands and the start of the next are the same point, ``before``.
    A run without commands is interrupted at five operations.
    """
    sending = [operation for operation in operations if operation.seconds]
    if not sending:
        spread = [operations[round(k * (len(operations) - 1) / 4)] for k in range(5)]
        return [Point(operation.number, operation.name, "idle") for operation in spread]
    points: list[Point] = []
    for operation in sending:
        longest = operation.seconds.index(max(operation.seconds))
        half_s = operation.seconds[longest] / 2
        points.append(Point(operation.number, operation.name, "before"))
        points += [
            Point(operation.number, operation.name, "during", longest, half_s, how) for how in hows
        ]
    return [*points, Point(sending[-1].number, sending[-1].name, "after")]


def run_watched(host: Host, deploy: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = host.site.command("--limit", host.name, "-y", deploy=deploy)[1:]
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.interrupted_run", *words],
        cwd=host.site.root, env={**os.environ, **pythonpath(CHECKOUT), **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
        start_new_session=True,
    )  # fmt: skip


def run_undisturbed(host: Host, scenario: Scenario, code: str = "") -> list[Operation]:
    """Run a scenario; return the operations and store the host digest in ``host.expected``.

    Both are cached for ``code``, the version under test.
    """
    cache = PARTS / f"undisturbed-{scenario.name.replace(' ', '-')}.json"
    result = json.loads(cache.read_text()) if code and cache.exists() else {}
    if not code or result.get("code") != code:
        scenario.set_up(host)
        with tempfile.NamedTemporaryFile("r") as listed:
            done = run_watched(host, scenario.deploy, {"SPARK_OPERATIONS": listed.name})
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            operations = [json.loads(line) for line in listed]
        host.site.deploy(deploy=scenario.deploy).assert_unchanged()
        result = {"code": code, "operations": operations, "digest": digest(host.guest)}
        if code:
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps(result, indent=1))
    host.expected[scenario.name] = result["digest"]
    return [Operation(**operation) for operation in result["operations"]]


def interrupt_and_repair(host: Host, scenario: Scenario, point: Point) -> tuple[str, str]:
    for shorter in (1.0, 0.5, 0.0):
        scenario.set_up(host)
        attempt = replace(point, delay_s=point.delay_s * shorter)
        done = run_watched(host, scenario.deploy, {"SPARK_DIE_AT": attempt.words})
        if point.how in CONTROLLER_REPORTS or done.returncode == -signal.SIGKILL:
            break
        # The command finished earlier than in the undisturbed run.
    else:
        raise AssertionError("the point was missed")
    if point.how == "POWER":
        host.cut_power()
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    printed = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    error = printed[-1][-160:] if point.how in CONTROLLER_REPORTS else ""
    return error, repair(host, scenario)


def interrupt_in_a_row(host: Host, scenario: Scenario, chain: list[Point]) -> list[str]:
    """Interrupt each run at the next point; check that a last run finishes the work."""
    scenario.set_up(host)
    outcomes = []
    for point in chain:
        with tempfile.NamedTemporaryFile("r") as moment_file:
            env = {"SPARK_DIE_AT": point.words, "SPARK_DIE_ANYWAY": moment_file.name}
            done = run_watched(host, scenario.deploy, env)
            output = done.stdout[-2000:] + done.stderr[-3000:]
            assert "Traceback" not in output, f"{point}: {output}"
            moment = moment_file.read()
        assert moment, f"{point}: the run did not get this far:\n{output}"
        continued = point.how == "CUT" and done.returncode == 0
        died = done.returncode == -signal.SIGKILL if point.how == "KILL" else done.returncode != 0
        assert died or continued, f"{point}: {output}"
        outcomes.append(moment + ", and the run went on" * continued)
    repair(host, scenario)
    return outcomes


def repair(host: Host, scenario: Scenario) -> str:
    serving = ", ".join(host.guest.serving()) or "nothing"
    host.deploy(scenario.deploy)
    host.site.deploy(deploy=scenario.deploy).assert_unchanged()
    apart = difference(host.expected[scenario.name], digest(host.guest))
    assert not apart, "not as undisturbed:\n" + "\n".join(line[:400] for line in apart[:20])
    assert host.guest.answers()
    return f"then served {serving}; next run finished, second changed nothing, digest equal"


# Work that the host does by itself: the phases of a rollout, and the jobs of a first deploy.
PHASES = ("prove", "drain", "stop", "memory", "start", "check", "open", "enable")
JOB_KINDS = ("fetch", "checkpoint", "image-pull")
STEPS = {"profile switch": PHASES, "first deploy": JOB_KINDS}
VICTIMS = {
    "its process killed": "HOST", "the controller killed": "KILL", "power cut": "POWER",
}  # fmt: skip


def list_host_steps(steps: tuple[str, ...], *victims: str) -> dict[str, tuple[str, str]]:
    return {f"{step}, {victim}": (step, victim) for step in steps for victim in victims}


def interrupt_host_step(host: Host, step: str, victim: str) -> tuple[str, str]:
    """Pause the host's work at a step, kill the victim, and check that the next run finishes."""
    scenario = SCENARIOS["first deploy" if step in JOB_KINDS else "profile switch"]
    scenario.set_up(host)
    begin = Pause.job if step in JOB_KINDS else Pause.rollout
    words = (step, JOBS[step]) if step in JOB_KINDS else (step,)
    with begin(host.guest, *words, seconds=TIMEOUT_S) as pause:
        process = host.site.start("--limit", host.name, deploy=scenario.deploy)
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        paused = pause.wait(TIMEOUT_S + 20)
        if VICTIMS[victim] == "HOST":
            pids = " ".join(str(pid) for pid in paused["pids"])
            host.guest.run(f"kill -9 {pids}; kill -CONT {pids} 2>/dev/null || :")
            process.wait(timeout=400)
        else:
            kill_running(process)
        if VICTIMS[victim] == "POWER":
            pause.paused = {}
            host.cut_power()
        reader.join(timeout=20)
    assert "Traceback" not in "".join(lines), "".join(lines)[-3000:]
    errors = [line.strip() for line in lines if "error:" in line]
    error = errors[-1][:200] if errors and VICTIMS[victim] == "HOST" else ""
    return error, repair(host, scenario)
