"""Pauses a host's work at a chosen point with SIGSTOP, and kills controllers."""

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

# What shows that a job is running: a growing file or, with a leading "=", a program that Docker
# runs for it. That program is paused too, because Docker would not pause it.
JOBS = {
    "fetch": "/srv/spark/sources/.*.partial/parts/*.part",
    "checkpoint": "/srv/spark/models/.*.partial/tree/*.safetensors",
    "image-pull": "",
    "image-build": "=python3 -m spark_vllm.check",
}

_COMMON = """
import ctypes, glob, json, os, signal, struct, sys, time
def read_all(name):
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield int(entry), open("/proc/%s/%s" % (entry, name)).read()
            except OSError:
                pass
def processes(unit):
    return [pid for pid, text in read_all("cgroup") if "/" + unit + "\\n" in text]
def units(prefix):
    lines = [line for _, text in read_all("cgroup") for line in text.splitlines()]
    names = {line.strip().rpartition("/")[2] for line in lines}
    return {name for name in names if name.startswith(prefix) and name.endswith(".service")}
def running(program):
    argvs = read_all("cmdline")
    return [pid for pid, text in argvs if text.replace("\\0", " ").strip() == program]
def work_of(argv):
    # The tool is a shell script that execs python.
    tool = argv[0].endswith("/bin/spark-host")
    return " ".join((["/usr/bin/python3", "-m", "spark_host"] if tool else argv[:1]) + argv[1:])
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
        # A signal takes effect when the process runs: yield the processor.
        while any(state(pid) not in ("T", "Z", "gone") for pid in pids):
            time.sleep(0.0002)
        # A process may have started another before it stopped.
        pids = processes(unit)
        if all(state(pid) in ("T", "Z") for pid in pids):
            return pids
def give_up(pids, reason):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
    sys.exit("too late: " + reason)
def raise_priority():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
def read(path):
    try:
        return json.load(open(path))
    except (OSError, ValueError):
        return {}
def report(**values):
    print(json.dumps(values), flush=True)
    sys.exit(0)
deadline = time.monotonic() + LIMIT_S
"""

_JOB = """
raise_priority()
while time.monotonic() < deadline:
    for unit in units("spark-job@"):
        job = read("/var/lib/spark/jobs/%s/job.json" % unit[10:22])
        if job.get("kind") != KIND:
            continue
        extra = []
        if SIGN[:1] == "=":
            at_work = extra = running(SIGN[1:])
        else:
            # Without a sign: the job's own program, not the processes that start it.
            at_work = (
                [p for p in glob.glob(SIGN) if os.path.getsize(p)]
                if SIGN else running(work_of(job["argv"]))
            )
        pids = processes(unit)
        if at_work and len(pids) > 1:
            for pid in extra:
                os.kill(pid, signal.SIGSTOP)
            pids = stop(unit, pids) + extra
            if len(pids) < 2 + len(extra) or (extra and running(SIGN[1:]) != extra):
                give_up(pids, "the work has ended")
            report(unit=unit, pids=pids, proof=job["proof"], title=job["title"])
    time.sleep(0.005)
sys.exit("too late: a job of this kind was never seen at work")  # a short job, a busy machine
"""

# inotify reports each new result file. A phase of a few milliseconds is approached in steps of half
# a millisecond through the phase before it; on a fast disk it may still be missed.
_BEFORE_SHORT_PHASE = {"drain": "prove", "memory": "stop", "open": "check", "enable": "open"}
_ROLLOUT = """
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
os.makedirs("/var/lib/spark/switch", exist_ok=True)
if libc.inotify_add_watch(watch, b"/var/lib/spark/switch", 0x80) < 0:
    sys.exit("no inotify")
def walk(pid, path):
    os.setpriority(os.PRIO_PROCESS, pid, -20)
    result = {"phase": BEFORE}
    while result.get("phase") == BEFORE and state(pid) != "gone":
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.0005)
        os.kill(pid, signal.SIGSTOP)
        while state(pid) not in ("T", "gone"):
            time.sleep(0.0002)
        result = read(path)
    return result
raise_priority()
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
        result = read(path)
        if result.get("phase") == BEFORE and result["state"] == "running":
            result = walk(min(pids[unit]), path)
            if result.get("phase") != PHASE:
                give_up(pids[unit], "already in phase %s" % result.get("phase"))
        if (result.get("phase"), result.get("state")) == (PHASE, "running"):
            pids[unit] = stop(unit, pids[unit])
            result = read(path)
            if (result["phase"], result["state"]) != (PHASE, "running"):
                give_up(pids[unit], "already in phase " + result["phase"])
            report(unit=unit, pids=pids[unit], release=name[:-5], phase=result["phase"])
"""


class MissedError(AssertionError):
    """The point was over before it could be paused; try again."""


@dataclass
class Pause:
    guest: Guest
    _watcher: subprocess.Popen[str]
    paused: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def job(cls, guest: Guest, kind: str, sign: str = "", *, seconds: float = 60) -> Pause:
        return cls._begin(guest, _JOB, seconds, KIND=kind, SIGN=sign)

    @classmethod
    def rollout(cls, guest: Guest, phase: str, *, seconds: float = 90) -> Pause:
        before = _BEFORE_SHORT_PHASE.get(phase, "")
        return cls._begin(guest, _ROLLOUT, seconds, PHASE=phase, BEFORE=before)

    @classmethod
    def _begin(cls, guest: Guest, program: str, seconds: float, **values: str) -> Pause:
        text = f"LIMIT_S = {seconds}\n"
        text += "".join(f"{name} = {value!r}\n" for name, value in values.items())
        watcher = guest.start(f"exec python3 -u -c {shlex.quote(text + _COMMON + program)}")
        return cls(guest, watcher)

    def wait(self, seconds: float = 120) -> dict[str, Any]:
        out, err = self._watcher.communicate(timeout=seconds)
        if "too late: " in err:
            raise MissedError(err)
        if self._watcher.returncode != 0:
            raise AssertionError(f"never paused ({self._watcher.returncode}): {out}{err}")
        self.paused = json.loads(out)
        return self.paused

    def release(self) -> None:
        pids = " ".join(str(pid) for pid in self.paused.pop("pids", ()))
        if pids:
            self.guest.run(f"kill -CONT {pids} 2>/dev/null || :")

    def __enter__(self) -> Pause:
        return self

    def __exit__(self, *_: object) -> None:
        self._watcher.kill()
        self.release()


@contextmanager
def running_deploy(fleet: Fleet) -> Iterator[subprocess.Popen[str]]:
    process = fleet.site.start("--limit", fleet.guests[0].name)
    threading.Thread(target=process.communicate, daemon=True).start()
    try:
        yield process
    finally:
        if process.poll() is None:
            kill(process)


def kill_running(process: subprocess.Popen[str]) -> None:
    assert process.poll() is None
    kill(process)
    assert process.returncode == -signal.SIGKILL


def attach_to_job(fleet: Fleet, pause: Pause) -> None:
    process = fleet.site.start("--limit", pause.guest.name)
    for line in process.stdout or ():
        if pause.paused["title"] in line and "running" in line:
            break
    pause.release()
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, rest


def assert_repaired(fleet: Fleet) -> None:
    limit = ("--limit", fleet.guests[0].name)
    fleet.site.deploy(*limit).assert_succeeded()
    fleet.site.deploy(*limit).assert_unchanged()
