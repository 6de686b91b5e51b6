"""Stops a host's work at a known point, from outside, and ends controllers the hard way.

A small program on the guest looks at processes and files and sends SIGSTOP; the tools under test
know nothing of it. What was stopped is looked at again afterwards: a point that was missed is an
error, never a pass.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.host.conftest import Fleet
from tests.labkit import Guest, kill

# What shows that a job of this kind is in the middle of its work: a file that grows, or (with a
# leading "=") a program that docker runs for it, which is stopped too: docker would go on.
JOBS = {
    "fetch": "/srv/spark/sources/.*.partial/parts/*.part",
    "checkpoint": "/srv/spark/models/.*.partial/tree/*.safetensors",
    "image-pull": "",
    "image-build": "=python3 -m spark_vllm.check",
}

_COMMON = """
import ctypes, glob, json, os, signal, struct, sys, time
def processes(unit):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if "/" + unit + "\\n" in open("/proc/" + entry + "/cgroup").read():
                    found.append(int(entry))
            except OSError:
                pass
    return found
def units(prefix):
    found = set()
    for path in glob.glob("/proc/[0-9]*/cgroup"):
        try:
            for line in open(path):
                last = line.strip().rpartition("/")[2]
                if last.startswith(prefix) and last.endswith(".service"):
                    found.add(last)
        except OSError:
            pass
    return found
def running(program):
    found = []
    for entry in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if open(entry).read().replace("\\0", " ").strip() == program:
                found.append(int(entry.split("/")[2]))
        except OSError:
            pass
    return found
def work_of(argv):
    # Our tool is a shell that becomes python.
    tool = argv[0].endswith("/bin/spark-host")
    return " ".join((["python3", "-m", "spark_host"] if tool else argv[:1]) + argv[1:])
def state(pid):
    try:
        return open("/proc/%d/stat" % pid).read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
def stop(unit, pids):
    while True:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                pass
        # A signal takes effect when its process runs: leave it the processor.
        while any(state(pid) not in ("T", "Z", "gone") for pid in pids):
            time.sleep(0.0002)
        # One may have started another before it stopped.
        found = processes(unit)
        if all(state(pid) in ("T", "Z") for pid in found):
            return found
        pids = found
def too_late(pids, what):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
    sys.exit("too late: " + what)
def hurry():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
def read(path):
    try:
        return json.load(open(path))
    except (OSError, ValueError):
        return {}
def tell(**found):
    print(json.dumps(found), flush=True)
    sys.exit(0)
deadline = time.monotonic() + LIMIT_S
"""

_JOB = """
hurry()
while time.monotonic() < deadline:
    for unit in units("spark-job@"):
        job = read("/var/lib/spark/jobs/%s/job.json" % unit[10:22])
        if job.get("kind") != KIND:
            continue
        beside = []
        if SIGN[:1] == "=":
            at_work = beside = running(SIGN[1:])
        else:
            # Without a sign the work's own program, and no process of what starts the job.
            at_work = (
                [p for p in glob.glob(SIGN) if os.path.getsize(p)]
                if SIGN else running(work_of(job["argv"]))
            )
        pids = processes(unit)
        if at_work and len(pids) > 1:
            for pid in beside:
                os.kill(pid, signal.SIGSTOP)
            pids = stop(unit, pids) + beside
            if len(pids) < 2 + len(beside) or (beside and running(SIGN[1:]) != beside):
                too_late(pids, "the work has ended")
            tell(unit=unit, pids=pids, proof=job["proof"], title=job["title"])
    time.sleep(0.005)
sys.exit("no such job was seen at work")
"""

# The kernel tells of each new result file. A phase that takes milliseconds only is walked up to in
# steps of half a millisecond through the one before it; where the disk is fast, one may be missed.
_BEFORE_A_SHORT_ONE = {"drain": "prove", "memory": "stop", "open": "check", "enable": "open"}
_SWITCH = """
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
os.makedirs("/var/lib/spark/switch", exist_ok=True)
if libc.inotify_add_watch(watch, b"/var/lib/spark/switch", 0x80) < 0:
    sys.exit("no inotify")
def walk(pid, path):
    os.setpriority(os.PRIO_PROCESS, pid, -20)
    found = {"phase": BEFORE}
    while found.get("phase") == BEFORE and state(pid) != "gone":
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.0005)
        os.kill(pid, signal.SIGSTOP)
        while state(pid) not in ("T", "gone"):
            time.sleep(0.0002)
        found = read(path)
    return found
hurry()
pids = {}
signal.alarm(int(LIMIT_S))
while True:
    events = os.read(watch, 4096)
    while events:
        length = struct.unpack_from("iIII", events)[3]
        name = events[16:16 + length].rstrip(b"\\0").decode()
        events = events[16 + length:]
        path = "/var/lib/spark/switch/" + name
        if not name.endswith(".json") or name.startswith("."):
            continue
        unit = "spark-switch@%s.service" % name[:-5]
        if not pids.get(unit):
            pids[unit] = processes(unit)
        found = read(path)
        if found.get("phase") == BEFORE and found["state"] == "running":
            found = walk(min(pids[unit]), path)
            if found.get("phase") != PHASE:
                too_late(pids[unit], "already in phase %s" % found.get("phase"))
        if (found.get("phase"), found.get("state")) == (PHASE, "running"):
            pids[unit] = stop(unit, pids[unit])
            found = read(path)
            if (found["phase"], found["state"]) != (PHASE, "running"):
                too_late(pids[unit], "already in phase " + found["phase"])
            tell(unit=unit, pids=pids[unit], release=name[:-5], phase=found["phase"])
"""


class MissedError(AssertionError):
    """A point was over before it could be held: no proof of anything, so it is tried again."""


@dataclass
class Hold:
    """A point of the host's work that is waited for, and the processes stopped there.

    At the end of a ``with`` block nothing stays stopped.
    """

    guest: Guest
    _looking: subprocess.Popen[str]
    held: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def job(cls, guest: Guest, kind: str, sign: str = "", *, seconds: float = 90) -> Hold:
        """Begin to look for a job of a kind, and stop it once its sign (see ``JOBS``) is there.

        Without a sign the job is stopped as soon as its work is a process of its own.
        """
        return cls._begin(guest, _JOB, seconds, KIND=kind, SIGN=sign)

    @classmethod
    def switch(cls, guest: Guest, phase: str, *, seconds: float = 90) -> Hold:
        """Begin to look for a change of release, and stop it when it records a phase."""
        before = _BEFORE_A_SHORT_ONE.get(phase, "")
        return cls._begin(guest, _SWITCH, seconds, PHASE=phase, BEFORE=before)

    @classmethod
    def _begin(cls, guest: Guest, program: str, seconds: float, **values: str) -> Hold:
        text = f"LIMIT_S = {seconds}\n"
        text += "".join(f"{name} = {value!r}\n" for name, value in values.items())
        looking = guest.begin(f"exec python3 -u -c {shlex.quote(text + _COMMON + program)}")
        return cls(guest, looking)

    def wait(self, seconds: float = 120) -> dict[str, Any]:
        """Return what was stopped, once it was.

        Raises:
            MissedError: the point was over before the stop took effect; what was stopped goes on.
            AssertionError: it was never seen.
        """
        out, err = self._looking.communicate(timeout=seconds)
        if "too late: " in err:
            raise MissedError(err)
        if self._looking.returncode != 0:
            raise AssertionError(f"never held ({self._looking.returncode}): {out}{err}")
        self.held = json.loads(out)
        return self.held

    def release(self) -> None:
        """Let what was stopped go on."""
        pids = " ".join(str(pid) for pid in self.held.pop("pids", ()))
        if pids:
            self.guest.run(f"kill -CONT {pids} 2>/dev/null || :")

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self._looking.kill()
        self.release()


@contextmanager
def controller(fleet: Fleet) -> Iterator[subprocess.Popen[str]]:
    """Have a deploy to the first host under way; nobody reads what it says."""
    process = fleet.site.start("--limit", fleet.guests[0].name)
    threading.Thread(target=process.communicate, daemon=True).start()
    try:
        yield process
    finally:
        if process.poll() is None:
            kill(process)


def die(process: subprocess.Popen[str]) -> None:
    """Kill a controller that is in the middle of its run."""
    assert process.poll() is None
    kill(process)
    assert process.returncode == -signal.SIGKILL


def attach(fleet: Fleet, hold: Hold) -> None:
    """Run again while a job is held; once the run waits for it, let it go on to its end."""
    process = fleet.site.start("--limit", hold.guest.name)
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if hold.held["title"] in line and "running" in line:
            break
    hold.release()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, "".join(lines) + said


def next_runs(fleet: Fleet) -> None:
    """Insist that the next run finishes the work and the one after changes nothing."""
    limit = ("--limit", fleet.guests[0].name)
    finished = fleet.site.deploy(*limit)
    assert finished.exit_code == 0, finished.stderr[-4000:]
    fleet.site.deploy(*limit).must_have_changed_nothing()
