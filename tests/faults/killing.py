"""Ways of ending a run at a point of it, and what has to hold afterwards."""

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
from dataclasses import dataclass
from pathlib import Path

from tests.faults import disks
from tests.faults.hold import JOBS, Hold, die
from tests.faults.sweep import PARTS
from tests.labkit import CHECKOUT, Guest, Site, guest_named, info, lab
from tests.traces import difference, digest

USUAL = {"model": "lab-stub", "profile": "v2"}
QUESTION = ("What is the capital of France?", "Paris")
DEPLOY, ROLLBACK, PRUNE = "deploy.py", "deploys/rollback.py", "deploys/prune.py"


@dataclass
class Place:
    """One guest of a sweep and the site that deploys to it."""

    name: str
    site: Site
    expected: dict[
        str, list[str]
    ]  # by scenario, what a host holds after a run that nothing disturbed

    @classmethod
    def on(cls, name: str, root: Path, expected: dict[str, list[str]]) -> Place:
        """Have a guest and a site for it alone."""
        lab("up", name, "--engine", "stub")
        return cls(name, Site(root, hosts=[name]), expected)

    def begins_anew(self) -> None:
        """Have the guest as it comes; its new key is known."""
        disks.give_up(self.name)
        lab("up", self.name, "--fresh", "--engine", "stub")
        self.knows_its_guest()

    def knows_its_guest(self) -> None:
        """Take the key of the guest as it is now for the right one."""
        shutil.copy(info()["ssh"]["known_hosts"], self.site.root / "known_hosts")

    @property
    def guest(self) -> Guest:
        return guest_named(self.name)

    def choose(self, **choices: object) -> None:
        """Choose anew, with nothing left of earlier choices."""
        self.site.choices.clear()
        self.site.choose(**{**USUAL, **choices})

    def deploys(self, deploy: str = DEPLOY) -> None:
        """Run a deploy that has to go well."""
        run = self.site.deploy(deploy=deploy)
        assert run.exit_code == 0, f"{run.failed}\n{run.stderr[-3000:]}"

    def is_up(self) -> None:
        """Wait until a guest that booted serves what its boot starts."""
        self.guest.wait("systemctl is-system-running | grep -qE 'running|degraded'", seconds=HELD_S)
        for unit in self.guest.boots():
            self.guest.wait(f"systemctl is-active {unit}", seconds=HELD_S)

    def loses_power(self) -> None:
        """Cut the power, with what was not synced, and wait until the next boot is over."""
        lab("break", "power-cut", self.name)
        lab("up", self.name, "--engine", "stub")
        self.is_up()

    def digest(self) -> list[str]:
        """Return what the guest holds, without its own name and address."""
        return digest(self.guest)


@dataclass(frozen=True)
class Scenario:
    """A run to be ended: what is there before it, what is chosen, which deploy it is."""

    name: str
    begin: Callable[[Place], None]
    deploy: str = DEPLOY


def fresh(place: Place) -> None:
    """A host as it comes."""
    place.begins_anew()
    place.choose()


def _from(label: str, make: Callable[[Place], None], **choices: object) -> Callable[[Place], None]:
    """Begin from a disk that ``make`` made once with this code."""

    def begin(place: Place) -> None:
        if disks.has(place.name, label):
            disks.put_back(place.name, label)
            place.knows_its_guest()
        else:
            make(place)
            disks.keep(place.name, label)
        place.is_up()
        place.choose(**choices)

    return begin


def serves_one(place: Place) -> None:
    fresh(place)
    place.deploys()


def served_two(place: Place) -> None:
    serves_one(place)
    place.choose(profile="v2-tq")
    place.deploys()


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("rollback", _from("two", served_two, profile="v2-tq"), ROLLBACK),
        Scenario("prune", _from("two", served_two, profile="v2-tq", releases={"keep": 0}), PRUNE),
        Scenario("no-op", _from("one", serves_one)),
        Scenario("profile switch", _from("one", serves_one, profile="v2-native")),
        Scenario("first deploy", fresh),  # the longest
    )
}


HOWS = {"KILL": "", "INT": ", interrupted", "CUT": ", connection cut", "POWER": ", power cut"}
OF_THE_CONTROLLER = ("INT", "CUT")  # it can still say something


@dataclass(frozen=True)
class Sent:
    """An operation of a run, and how long each of its commands took."""

    number: int
    name: str
    seconds: list[float]


@dataclass(frozen=True)
class Point:
    """Where a run ends, and how."""

    number: int
    name: str
    moment: str  # before, during or after; looking, where nothing is sent
    command: int = -1
    delay_s: float = 0.0
    how: str = "KILL"

    def __str__(self) -> str:
        return f"{self.number:03d} {self.moment} {self.name}{HOWS[self.how]}"

    @property
    def is_middle(self) -> bool:
        """Whether it lies in an operation, and not at an end of it."""
        return self.moment == "during"

    @property
    def words(self) -> str:
        """Return it as ``dying.py`` reads it; with a host's power its run ends too."""
        how = "KILL" if self.how == "POWER" else self.how
        return f"{self.number} {self.moment} {self.command} {self.delay_s:.3f} {how}"


def points(operations: list[Sent], *, hows: tuple[str, ...] = ("KILL",)) -> list[Point]:
    """Return the points at which the state of a host may differ.

    Operations that send nothing leave the host as it was: from the end of one that sent something
    to the beginning of the next that does there is one point, counted as ``before`` the latter.
    A run that sends nothing at all is one point in that sense; it is ended at five operations.
    """
    sending = [one for one in operations if one.seconds]
    if not sending:
        spread = [operations[round(k * (len(operations) - 1) / 4)] for k in range(5)]
        return [Point(one.number, one.name, "looking") for one in spread]
    found: list[Point] = []
    for one in sending:
        longest = one.seconds.index(max(one.seconds))
        found.append(Point(one.number, one.name, "before"))
        for how in hows:
            half_s = one.seconds[longest] / 2
            found.append(Point(one.number, one.name, "during", longest, half_s, how))
    return [*found, Point(one.number, one.name, "after")]


def watched(place: Place, deploy: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a deploy under the eyes of ``dying.py``."""
    words = place.site.command("--limit", place.name, "-y", deploy=deploy)[1:]
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.dying", *words],
        cwd=place.site.root, env={**os.environ, "PYTHONPATH": _paths(), **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
        start_new_session=True,
    )  # fmt: skip


def _paths() -> str:
    return f"{CHECKOUT}:{CHECKOUT / 'files/contract'}"


def undisturbed(place: Place, scenario: Scenario, code: str = "") -> list[Sent]:
    """Run a scenario to its end; return its operations, and keep what it makes of the host.

    With the name of this ``code`` it is kept in a file too: a sweep that goes on need not begin
    with it.
    """
    kept = PARTS / f"undisturbed-{scenario.name.replace(' ', '-')}.json"
    found = json.loads(kept.read_text()) if code and kept.exists() else {}
    if not code or found.get("code") != code:
        scenario.begin(place)
        with tempfile.NamedTemporaryFile("r") as told:
            done = watched(place, scenario.deploy, {"SPARK_OPERATIONS": told.name})
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            operations = [json.loads(line) for line in told]
        place.site.deploy(deploy=scenario.deploy).must_have_changed_nothing()
        found = {"code": code, "operations": operations, "digest": place.digest()}
        if code:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found, indent=1))
    place.expected[scenario.name] = found["digest"]
    return [Sent(**one) for one in found["operations"]]


def ended_at(place: Place, scenario: Scenario, point: Point) -> tuple[str, str]:
    """End a run at a point; insist that the next one finishes it, and the one after is idle."""
    saw = _ended(place, scenario, point)
    serving = ", ".join(place.guest.serving()) or "nothing"
    return saw, f"then served {serving}; " + converges(place, scenario)


def ended_one_after_another(place: Place, scenario: Scenario, chain: list[Point]) -> list[str]:
    """End a run at the first point, the next one at the second, and so on; insist that the one
    after the last finishes the work. Return what came of each.
    """  # fmt: skip
    scenario.begin(place)
    seen = []
    for point in chain:
        with tempfile.NamedTemporaryFile("r") as came:
            env = {"SPARK_DIE_AT": point.words, "SPARK_DIE_ANYWAY": came.name}
            done = watched(place, scenario.deploy, env)
            told = done.stdout[-2000:] + done.stderr[-3000:]
            assert "Traceback" not in told, f"{point}: {told}"
            moment = came.read()
        assert moment, f"{point}: the run did not come so far:\n{told}"
        went_on = point.how == "CUT" and done.returncode == 0
        ended = done.returncode == -signal.SIGKILL if point.how == "KILL" else done.returncode != 0
        assert ended or went_on, f"{point}: {told}"
        seen.append(moment + ", and the run went on" * went_on)
    converges(place, scenario)
    return seen


def _ended(place: Place, scenario: Scenario, point: Point) -> str:
    for shorter in (1.0, 0.5, 0.0):
        scenario.begin(place)
        once = Point(**{**point.__dict__, "delay_s": point.delay_s * shorter})
        done = watched(place, scenario.deploy, {"SPARK_DIE_AT": once.words})
        if point.how in OF_THE_CONTROLLER or done.returncode == -signal.SIGKILL:
            break
        # The command was over sooner than in the run that told how long it takes.
    else:
        raise AssertionError("the point was missed")
    if point.how == "POWER":
        place.loses_power()
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    told = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return told[-1][-160:] if point.how in OF_THE_CONTROLLER else ""


def converges(place: Place, scenario: Scenario) -> str:
    """Insist that the next run finishes the work, that the one after changes nothing, and that
    the host is then as if nothing had happened.
    """  # fmt: skip
    finished = place.site.deploy(deploy=scenario.deploy)
    assert finished.exit_code == 0, f"{finished.failed}\n{finished.stderr[-3000:]}"
    place.site.deploy(deploy=scenario.deploy).must_have_changed_nothing()
    apart = difference(place.expected[scenario.name], place.digest())
    assert not apart, "not as undisturbed:\n" + "\n".join(line[:400] for line in apart[:20])
    assert place.guest.answers(*QUESTION)
    return "next run finished, the one after changed nothing, digest equal"


# Work of the host itself: the phases of a rollout, and the jobs of a first deploy.
PHASES = ("prove", "drain", "stop", "memory", "start", "check", "open", "enable")
JOB_KINDS = ("fetch", "checkpoint", "image-pull")
STEPS = {"profile switch": PHASES, "first deploy": JOB_KINDS}
WHO = {
    "its process killed": "HOST", "the controller killed": "KILL", "power cut": "POWER",
}  # fmt: skip


HELD_S = 300  # from nothing to a job, on a busy machine


def host_steps(steps: tuple[str, ...], *who: str) -> dict[str, tuple[str, str]]:
    """Return the cases of work on the host: by name the step, and who ends there."""
    return {f"{step}, {one}": (step, one) for step in steps for one in who}


def step_ended(place: Place, step: str, who: str) -> tuple[str, str]:
    """Stop the host's work at a step, end it or who waits for it; the next run finishes it."""
    scenario = SCENARIOS["first deploy" if step in JOB_KINDS else "profile switch"]
    scenario.begin(place)
    begin = Hold.job if step in JOB_KINDS else Hold.switch
    words = (step, JOBS[step]) if step in JOB_KINDS else (step,)
    with begin(place.guest, *words, seconds=HELD_S) as hold:
        process = place.site.start("--limit", place.name, deploy=scenario.deploy)
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(process.stdout or ()))
        reader.start()
        held = hold.wait(HELD_S + 20)
        if WHO[who] == "HOST":
            pids = " ".join(str(pid) for pid in held["pids"])
            place.guest.run(f"kill -9 {pids}; kill -CONT {pids} 2>/dev/null || :")
            process.wait(timeout=400)
        else:
            die(process)
        if WHO[who] == "POWER":
            hold.held = {}  # nothing of it lives
            place.loses_power()
        reader.join(timeout=20)
    assert "Traceback" not in "".join(said), "".join(said)[-3000:]
    told = [line.strip() for line in said if "error:" in line]
    saw = told[-1][:200] if told and WHO[who] == "HOST" else ""
    serving = ", ".join(place.guest.serving()) or "nothing"
    return saw, f"then served {serving}; " + converges(place, scenario)
