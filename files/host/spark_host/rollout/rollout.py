"""The change of a service to another release, with a way back, run by systemd on the host.

What is true is never kept in this process: running is asked of systemd, booting is the enabled
unit, proven is the proof. So it may be killed at any point, and :func:`recover` or the next boot
finds the old release; the candidate is enabled last.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release, load, load_if_present, service_of

from spark_host.check import runner
from spark_host.engine import memory, serve
from spark_host.engine.client import Engine, EngineError, SilentError
from spark_host.gateway import gateway, traffic
from spark_host.records import boot, proof
from spark_host.rollout import speed
from spark_host.rollout.record import Record, boot_id
from spark_host.system import docker, systemd

_TELL_S = 5.0
_TAIL_LINES = 40
_BEFORE_START = ("drain", "stop", "memory")


class TrialError(Exception):
    """The candidate did not become a proven server; the message is a plain sentence."""


# What a step of a change may end with: a disk can be full and a program can hang in any of them.
_FAILURES = (TrialError, HostToolError, OSError, subprocess.SubprocessError)


def switch(name: str, paths: Paths) -> int:
    """Change the service to release ``name``; 0 only when it is proven and boots from now on."""
    release = load(name, paths)
    with one_at_a_time(release.service, paths):
        record = Record(release, paths)
        old = _previous(release, paths)
        record.set(previous=old.name if old else None, serving=boot.active(release.service, paths))
        problem = _refusal(release, paths, record)
        if problem is not None:
            record.set(reason=str(problem), failed_phase="prove")
            record.end("refused", boot.active(release.service, paths))
            return 1
        if systemd.is_active(release.serve_unit) and _proves_running(release, paths, record):
            return _kept(release, paths, record)
        try:
            _replace(release, old, paths, record)
        except _FAILURES as error:
            record.set(reason=str(error), failed_phase=record.data["phase"])
            _back(release, old, paths, record)
            return 1
        record.end("switched", release.name)
        return 0


def recover(name: str, paths: Paths) -> int:
    """Finish what a killed switch left; nothing to do after one that ended by itself."""
    release = load(name, paths)
    left = files.read_json(paths.switch(name)) or {}
    if left.get("state") != "running" or left.get("boot_id") != boot_id():
        return 0
    # systemd runs this in the same run of the unit; a record of an earlier one is not our matter.
    if left.get("invocation_id") != os.environ.get("INVOCATION_ID"):
        return 0
    if systemd.is_stopping():
        return 0
    with one_at_a_time(release.service, paths):
        record = Record(release, paths)
        record.data.update(left)
        phase = str(left.get("phase"))
        old = load_if_present(left["previous"], paths) if left.get("previous") else None
        serve.say(f"the switch was killed in phase {phase}")
        record.set(reason=f"the switch was killed in phase {phase}", failed_phase=phase)
        if phase in ("None", "prove"):
            record.end("refused", boot.active(release.service, paths))
        elif phase not in ("open", "enable", "bench") or not _covered(release, paths):
            _back(release, old, paths, record)
        else:
            _finish(release, old, paths, record)
    return 0


def _finish(release: Release, old: Release | None, paths: Paths, record: Record) -> None:
    """Take the last steps of a change whose candidate was proven before its switch was killed."""
    try:
        _take_over(release, paths, record)
    except _FAILURES as error:
        why = f"{record.data['reason']}; and then: {error}"
        record.set(reason=why, failed_phase=record.data["phase"])
        if record.data["serving"] == release.name:  # it was proven anew, not changed to
            record.end("refused", release.name)
        else:
            _back(release, old, paths, record)
    else:
        record.set(reason=None, failed_phase=None)
        record.end("switched", release.name)


def _previous(release: Release, paths: Paths) -> Release | None:
    record = boot.good(release.service, paths)
    candidates = (
        boot.active(release.service, paths),
        *boot.enabled(release.service, paths),
        record["release"],
        *record["previous"],
    )
    for name in candidates:
        if name and name != release.name:
            found = load_if_present(name, paths)
            if found is not None:
                return found
    return None


def _refusal(release: Release, paths: Paths, record: Record) -> HostToolError | None:
    """Prove image, tree and gateway while the old release still answers."""
    with record.phase("prove"):
        if paths.stopped(release.service).exists():
            return HostToolError(
                release.service,
                "was stopped by hand",
                f"spark-host start-service {release.service}, then deploy again",
            )
        if record.unwritten is not None:
            return HostToolError(
                str(record.unwritten.filename),
                f"cannot be written: {record.unwritten.strerror}",
                "free space on its disk (df -h, deploys/prune.py), then deploy again",
            )
        return (
            serve.part_problem(release)
            or docker.gpu_problem(paths)
            or gateway.problem(release, paths)
            or memory.problem(release.memory.needed_bytes)
        )


def _proves_running(release: Release, paths: Paths, record: Record) -> bool:
    """Prove a candidate that already runs; ``False`` when it has to be started anew."""
    try:
        if not _covered(release, paths):
            with record.phase("check"):
                _full_check(release, paths, record)
    except TrialError as error:
        record.tell(f"it runs but fails: {error}; starting it again")
        return False
    return True


def _kept(release: Release, paths: Paths, record: Record) -> int:
    """Have a release that runs and is proven be the one that serves; it is never stopped here."""
    try:
        _take_over(release, paths, record)
    except _FAILURES as error:
        record.set(reason=str(error), failed_phase=record.data["phase"])
        record.end("refused", release.name)
        return 1
    record.end("switched", release.name)
    return 0


def _covered(release: Release, paths: Paths) -> bool:
    invocation = systemd.invocation(release.serve_unit)
    if not systemd.is_active(release.serve_unit):
        return False
    found = proof.read(release.name, paths)
    return proof.why_not(found, release.digest, invocation, proof.versions()) is None


def _replace(release: Release, old: Release | None, paths: Paths, record: Record) -> None:
    running = load_if_present(boot.active(release.service, paths) or "", paths) or old
    with record.phase("drain"):
        traffic.close(release.service, paths)
        if running is not None:
            _drain(running, paths, record)
    with record.phase("stop"):
        for name in _loaded(release.service):
            _stop_old(name)
    with record.phase("memory"):
        for container in docker.engine_containers():
            docker.remove_container(container)
        memory.wait_for_memory(release.memory.needed_bytes, release.memory.wait_s, record.tell)
    with record.phase("start"):
        _start(release, paths, record)
    with record.phase("check"):
        _full_check(release, paths, record)
    _take_over(release, paths, record)


def _take_over(release: Release, paths: Paths, record: Record) -> None:
    with record.phase("open"):
        gateway.bring_up(release, paths)
        traffic.open_for(release, paths)
        gateway.wait_until_listening(release.service, paths)
    with record.phase("enable"):
        boot.enable_only(release, paths)
    try:
        speed.measured(release, paths, record)
    except _FAILURES as error:  # a speed that nobody could keep undoes no change
        record.set(bench=[f"no speed was measured: {error}"])


def _back(release: Release, old: Release | None, paths: Paths, record: Record) -> None:
    """Stop the candidate and have the old release serve, proven, again."""
    record.tell(f"failed in {record.data['failed_phase']}: {record.data['reason']}")
    with record.phase("rollback"):
        # Of a candidate that was not started there are only words of its earlier runs.
        if not record.data["log_tail"] and record.data["failed_phase"] not in _BEFORE_START:
            record.set(log_tail=_log_tail(release))
        traffic.close(release.service, paths)
        _stop_unit(release.serve_unit)
        systemd.systemctl("reset-failed", release.serve_unit)
        for withdraw in (proof.withdraw, boot.withdraw_good):
            try:
                withdraw(release, record.data["started_at"], paths)
            except OSError as error:  # first of all the old release has to come back
                record.tell(f"not taken back: {error}")
        if old is None:
            systemd.systemctl("disable", release.serve_unit)
        else:
            failure = _restore(old, paths, record)
    if old is None:
        record.end("failed-no-previous", None)
    elif failure is None:
        record.end("rolled-back", old.name)
    else:
        record.set(reason=f"{record.data['reason']}; and the old release: {failure}")
        record.end("rollback-failed", boot.active(release.service, paths))


def _restore(old: Release, paths: Paths, record: Record) -> str | None:
    try:
        if not systemd.is_active(old.serve_unit):
            _start(old, paths, record)
        if not _covered(old, paths):
            _full_check(old, paths, record)
        gateway.bring_up(old, paths)
        traffic.open_for(old, paths)
        boot.enable_only(old, paths)
    except _FAILURES as error:
        return str(error)
    return None


def _drain(old: Release, paths: Paths, record: Record) -> None:
    engine = Engine.of(old, paths)
    deadline = time.monotonic() + old.timeouts.drain_s
    told = 0.0
    while time.monotonic() < deadline:
        try:
            requests = engine.metrics(5).unfinished
            left = f"requests={requests:.0f}"
        except SilentError:  # busy, most of all with answers that want to be finished
            requests, left = 1, "no word of the engine"
        except EngineError:
            return
        if requests <= 0:
            return
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            record.tell(f"phase=drain {left} left_s={deadline - told:.0f}")
        time.sleep(0.2)
    record.tell(f"phase=drain the limit of {old.timeouts.drain_s:.0f} s passed; requests are cut")


def _loaded(service: str) -> list[str]:
    """Return the loaded serve units of a service."""
    found = []
    for unit in systemd.listed("spark-serve@*.service"):
        name = unit.removeprefix("spark-serve@").removesuffix(".service")
        if service_of(name) == service:
            found.append(unit)
    return found


def _stop_unit(unit: str) -> subprocess.CompletedProcess[str]:
    said = systemd.systemctl("stop", unit, timeout_s=1800)
    if said.returncode != 0:
        serve.say(f"systemctl stop {unit}: {said.stderr.strip()}")
    return said


def _stop_old(unit: str) -> None:
    """Stop a unit that must make room; one that goes on is left to serve on."""
    said = _stop_unit(unit)
    if said.returncode != 0 and systemd.is_active(unit):
        raise TrialError(f"systemctl stop {unit}: {said.stderr.strip()}")


def _start(release: Release, paths: Paths, record: Record) -> None:
    """Start a release's unit and return once it is active, that is, past its quick check."""
    unit = release.serve_unit
    systemd.systemctl("reset-failed", unit)
    said = systemd.systemctl("start", "--no-block", unit)
    if said.returncode != 0:
        raise TrialError(f"systemctl start {unit}: {said.stderr.strip()}")
    begun = told = time.monotonic()
    while True:
        state = systemd.state(unit, "ActiveState", "SubState", "Job", "Result", "InvocationID")
        active = state.get("ActiveState")
        if active == "active":
            return
        pending = state.get("Job", "0") not in ("", "0")
        if state.get("SubState") == "auto-restart" or (
            active in ("inactive", "failed") and not pending
        ):
            record.set(log_tail=_log_tail(release))
            raise TrialError(_why_not_started(release, state, paths))
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            lines = systemd.journal(state.get("InvocationID", ""), unit, lines=20)
            # The check at the start reports waiting, too; the engine's own words say more.
            said_by_engine = [line.strip() for line in lines if "waited_s=" not in line]
            last = said_by_engine[-1][:160] if said_by_engine else ""
            record.tell(f"phase=start waited_s={told - begun:.0f} last: {last}")
        time.sleep(0.25)


def _why_not_started(release: Release, state: systemd.UnitState, paths: Paths) -> str:
    found = proof.read(release.name, paths)
    if found and not found["ok"] and found["invocation_id"] == state.get("InvocationID"):
        return _failures(found)
    last = next((line for line in reversed(_log_tail(release)) if "error" in line.lower()), "")
    return f"{release.serve_unit} did not start ({state.get('Result')}); {last}".rstrip("; ")


def _full_check(release: Release, paths: Paths, record: Record) -> None:
    result = runner.check(release, paths, "full", record.tell)
    if not result["ok"]:
        failed = [item["name"] for item in result["checks"] if not item["ok"]]
        record.set(log_tail=_log_tail(release), failed_checks=failed)
        raise TrialError(_failures(result))


def _failures(result: dict[str, Any]) -> str:
    failed = [f"{item['name']}: {item['detail']}" for item in result["checks"] if not item["ok"]]
    return "; ".join(failed[:3])


def _log_tail(release: Release) -> list[str]:
    invocation = systemd.invocation(release.serve_unit) or ""
    return systemd.journal(invocation, release.serve_unit, lines=_TAIL_LINES)


@contextmanager
def one_at_a_time(service: str, paths: Paths) -> Iterator[None]:
    """Keep every other change of the service out for the duration of a block."""
    paths.run.mkdir(parents=True, exist_ok=True)
    # Opened without inheritance: a child must not keep the lock of a killed switch.
    descriptor = os.open(paths.run / f"switch-{service}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HostToolError(
                f"switch of {service}",
                "another change is under way",
                "wait for it: systemctl list-units 'spark-switch@*'",
            ) from error
        yield
    finally:
        os.close(descriptor)
