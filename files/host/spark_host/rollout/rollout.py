"""The change of a service to another release, with a way back, run by systemd on the host.

What is true is never kept in this process: running is asked of systemd, booting is the enabled
unit, proven is the proof. So it may be killed at any point, and :mod:`recover` or the next boot
finds the old release; the candidate is enabled last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from spark_contract.errors import HostToolError
from spark_contract.release import Release
from spark_contract.units import SWITCH

from spark_host.records import boot, proof
from spark_host.rollout import steps
from spark_host.rollout.ports import Host
from spark_host.rollout.record import Record
from spark_host.system import host as system
from spark_host.system.programs import log

_BEFORE_START = ("drain", "stop", "memory")


def roll_out(name: str, host: Host) -> int:
    """Change the service to release ``name``; 0 only when it is proven and boots from now on."""
    release = host.disk.load(name, host.paths)
    with one_at_a_time(release.service, host):
        record = Record(release, host)
        old = _previous(release, host)
        serving = boot.active(release.service, host)
        record.set(previous=old.name if old else None, serving=serving)
        problem = _refusal(release, host, record)
        if problem is not None:
            record.set(reason=str(problem), failed_phase="prove")
            record.end("refused", serving)
            return 1
        kept = host.units.is_active(release.serve_unit)
        try:
            kept = kept and _proves_running(release, host, record)
            if kept:
                steps.take_over(release, host, record)
            else:
                steps.replace(release, old, host, record)
        except steps.FAILURES as error:
            record.set(reason=str(error), failed_phase=record.data.phase)
            if kept:  # a release that runs is only stopped when its check says so
                record.end("refused", release.name)
            else:
                back(release, old, host, record)
            return 1
        record.end("switched", release.name)
        return 0


def _previous(release: Release, host: Host) -> Release | None:
    candidates = (
        boot.active(release.service, host),
        *boot.enabled(release.service, host),
        *boot.good(release.service, host).all,
    )
    others = (host.release(name) for name in candidates if name != release.name)
    return next((other for other in others if other), None)


def _refusal(release: Release, host: Host, record: Record) -> HostToolError | None:
    """Prove image, tree and gateway while the old release still answers."""
    with record.phase("prove"):
        if boot.is_stopped(release.service, host):
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
        return host.engines.problem(release, host.paths) or host.gateway.problem(
            release, host.paths
        )


def _proves_running(release: Release, host: Host, record: Record) -> bool:
    """Prove a candidate that already runs; ``False`` when it has to be started anew."""
    try:
        if not steps.is_proven(release, host):
            with record.phase("check"):
                steps.check(release, host, record)
    except steps.TrialError as error:
        record.report(f"it runs but fails: {error}; starting it again")
        return False
    return True


def back(release: Release, old: Release | None, host: Host, record: Record) -> None:
    """Stop the candidate and have the old release serve, proven, again."""
    record.report(f"failed in {record.data.failed_phase}: {record.data.reason}")
    with record.phase("rollback"):
        # Of a candidate that was not started there are only words of its earlier runs.
        if not record.data.log_tail and record.data.failed_phase not in _BEFORE_START:
            record.set(log_tail=steps.log_tail(release, host))
        host.traffic.close(release.service, host.paths)
        steps.stop(release.serve_unit, host)
        host.units.reset(release.serve_unit)
        undo = [partial(proof.withdraw, release, record.data.started_at, host)]
        # Only this phase writes the good record: an older one of the same release stays.
        if "enable" in (*record.data.times_s, record.data.failed_phase):
            undo.append(partial(boot.withdraw_good, release, host))
        for step in undo:
            try:
                step()
            except OSError as error:  # first of all the old release has to come back
                record.report(f"not taken back: {error}")
        if old is None:
            _give_up(release, host)
        else:
            failure = _restore(old, host, record)
    if old is None:
        record.end("failed-no-previous", None)
    elif failure is None:
        record.end("rolled-back", old.name)
    else:
        record.set(reason=f"{record.data.reason}; and the old release: {failure}")
        record.end("rollback-failed", boot.active(release.service, host))


def _give_up(release: Release, host: Host) -> None:
    """Have nothing boot where nothing is good; what was good before this may be so again."""
    if boot.good(release.service, host).release != release.name:
        try:
            host.units.disable(release.serve_unit)
        except HostToolError as error:
            log(str(error))


def _restore(old: Release, host: Host, record: Record) -> str | None:
    try:
        if not host.units.is_active(old.serve_unit):
            steps.start(old, host, record)
        if not steps.is_proven(old, host):
            steps.check(old, host, record)
        steps.open_traffic(old, host)
        boot.enable_only(old, host)
    except steps.FAILURES as error:
        return str(error)
    return None


@contextmanager
def one_at_a_time(service: str, host: system.Host) -> Iterator[None]:
    """Keep every other change of the service out for the duration of a block."""
    with ExitStack() as held:
        try:
            held.enter_context(host.disk.locked(host.paths.run / f"switch-{service}.lock"))
        except BlockingIOError as error:
            raise HostToolError(
                f"rollout of {service}",
                "another change is under way",
                f"wait for it: systemctl list-units '{SWITCH.of('*')}'",
            ) from error
        yield
