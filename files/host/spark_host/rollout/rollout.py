"""Rollouts that systemd starts and recovers after a kill, and manual rollbacks.

The process may be killed at any point: all state is in systemd and files, and the candidate is
enabled last, so ``recover`` or the next boot finds the old release.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from spark_contract.paths import Paths
from spark_contract.records import Rollout
from spark_contract.release import Release, parse_service
from spark_contract.status import NamedRelease, Rollback
from spark_contract.tool import HostToolError, Problem
from spark_contract.units import SWITCH

from spark_host.records import boot
from spark_host.rollout import steps
from spark_host.rollout.record import Record, begin
from spark_host.rollout.steps import Host
from spark_host.system import docker
from spark_host.system.host import Host as SystemHost
from spark_host.system.host import release_names
from spark_host.system.programs import log, print_json

_BEFORE_START = ("drain", "stop", "memory")


def roll_out(name: str, host: Host) -> int:
    """Switch the service to a release; return 0 only if it is proven and enabled at boot."""
    release = host.disk.load_release(name, host.paths)
    with rollout_lock(release.service, host):
        record = Record(release, host)
        old = _find_previous(release, host)
        serving = boot.active_release(release.service, host)
        record.set(previous=old.name if old else None, serving=serving)
        problem = _find_obstacle(release, host, record)
        if problem is not None:
            record.set(reason=str(problem), failed_phase="prove")
            record.end("refused", serving)
            return 1
        keeps_running = host.units.is_active(release.serve_unit)
        try:
            keeps_running = keeps_running and _passes_check(release, host, record)
            if keeps_running:
                steps.activate(release, host, record)
            else:
                steps.replace_running(release, old, host, record)
        except steps.FAILURES as error:
            record.set(reason=str(error), failed_phase=record.data.phase)
            if keeps_running:  # nothing stopped it, so it still serves
                record.end("refused", release.name)
            else:
                roll_back(release, old, host, record)
            return 1
        record.end("switched", release.name)
        return 0


def _find_previous(release: Release, host: Host) -> Release | None:
    names = (
        boot.active_release(release.service, host),
        *boot.enabled_releases(release.service, host),
        *boot.read_known_good(release.service, host).names,
    )
    others = (host.release(name) for name in names if name != release.name)
    return next((other for other in others if other), None)


def _find_obstacle(release: Release, host: Host, record: Record) -> HostToolError | None:
    """Return why the rollout must not begin; the old release still serves."""
    with record.phase("prove"):
        if boot.is_stopped(release.service, host):
            fix = f"run `spark-host start-service {release.service}`, then deploy again"
            return HostToolError(release.service, "was stopped on purpose", fix)
        if error := record.unwritten:
            message = f"cannot be written: {error.strerror}"
            fix = "free space on its disk (see `df -h`, or run deploys/prune.py), then deploy again"
            return HostToolError(str(error.filename), message, fix)
        problem = host.engines.find_problem(release, host.paths)
        return problem or host.gateway.find_problem(release, host.paths)


def _passes_check(release: Release, host: Host, record: Record) -> bool:
    """Check a release that is already running; return ``False`` if it must be restarted."""
    try:
        if not steps.is_proven(release, host):
            with record.phase("check"):
                steps.check(release, host, record)
    except steps.TrialError as error:
        record.report(f"restarting the engine, because it failed the check: {error}")
        return False
    return True


def roll_back(release: Release, old: Release | None, host: Host, record: Record) -> None:
    record.report(f"the rollout failed in phase {record.data.failed_phase}: {record.data.reason}")
    with record.phase("rollback"):
        # Before the start, a candidate has only logs of earlier runs.
        if not record.data.log_tail and record.data.failed_phase not in _BEFORE_START:
            record.set(log_tail=steps.read_log_tail(release, host))
        host.gateway.close_traffic(release.service, host.paths)
        steps.stop(release.serve_unit, host)
        host.units.reset_failed(release.serve_unit)
        _withdraw(release, host, record)
        failure = None
        if old is not None:
            failure = _restore(old, host, record)
        elif boot.read_known_good(release.service, host).release != release.name:
            try:  # but leave a known-good release enabled, because it may pass the next check
                host.units.disable(release.serve_unit)
            except HostToolError as error:
                log(str(error))
    if old is None:
        record.end("failed-no-previous", None)
    elif failure is None:
        record.end("rolled-back", old.name)
    else:
        record.set(reason=f"{record.data.reason}; the old release was not restored: {failure}")
        record.end("rollback-failed", boot.active_release(release.service, host))


def _withdraw(release: Release, host: Host, record: Record) -> None:
    """Undo the records that a failed rollout wrote."""
    phases = (*record.data.times_s, record.data.failed_phase)
    undo = []
    if "start" in phases:
        undo.append(partial(boot.invalidate_proof, release, host))
    # Only this phase records a known-good release.
    if "enable" in phases:
        undo.append(partial(boot.withdraw_known_good, release, host))
    for step in undo:
        try:
            step()
        except OSError as error:  # restoring the old release is more important
            record.report(f"cannot remove the state of the new release: {error}")


def _restore(old: Release, host: Host, record: Record) -> str | None:
    """Start and check the old release, and open traffic; return the error, or None."""
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


def recover(name: str, host: Host) -> int:
    """Finish or roll back a rollout that was killed; systemd runs this after every rollout."""
    release = host.disk.load_release(name, host.paths)
    last = host.disk.read(Rollout, host.paths.rollout(name))
    if host.exit_status == "0":  # even if a full disk prevented the final record
        return 0
    if last is None or last.state != "running":
        return 0
    is_this_run = (last.boot_id, last.invocation_id) == (host.boot_id, host.invocation_id)
    if not is_this_run or host.units.is_stopping():
        return 0
    # Wait, because prune or a request may have taken the lock since the kill.
    with rollout_lock(release.service, host, wait=True):
        record = Record(release, host, last)
        old = host.release(last.previous)
        reason = f"the rollout was killed in phase {last.phase}"
        log(reason)
        failed_phase = last.failed_phase or str(last.phase)  # before the rollback
        reasons = "; ".join(filter(None, (last.reason, reason)))
        record.set(reason=reasons, failed_phase=failed_phase)
        # If the rollout only checked the running release, that release still serves.
        untouched = last.serving == name and last.phase == "check" and "drain" not in last.times_s
        active = boot.active_release(release.service, host)
        was_replaced = active not in (None, name, last.previous, last.serving)
        if last.phase in (None, "prove") or untouched or was_replaced:
            record.end("refused", active)
        elif last.phase in ("open", "enable", "bench") and steps.is_proven(release, host):
            _finish(release, old, host, record)
        else:
            roll_back(release, old, host, record)
    return 0


def _finish(release: Release, old: Release | None, host: Host, record: Record) -> None:
    """Take the last steps of a killed rollout whose candidate is proven."""
    try:
        steps.activate(release, host, record)
    except steps.FAILURES as error:
        reason = f"{record.data.reason}; finishing it failed: {error}"
        record.set(reason=reason, failed_phase=record.data.phase)
        if record.data.serving == release.name:  # it served before this rollout
            record.end("refused", release.name)
        else:
            roll_back(release, old, host, record)
    else:
        record.set(reason=None, failed_phase=None)
        record.end("switched", release.name)


@contextmanager
def rollout_lock(service: str, host: SystemHost, *, wait: bool = False) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(host.disk.locked(host.paths.rollout_lock(service), wait=wait))
        except BlockingIOError as error:
            message = "another rollout of this service is running"
            fix = f"wait until it ends (`systemctl list-units '{SWITCH.unit('*')}'`)"
            raise HostToolError(f"rollout of {service}", message, fix) from error
        yield


@contextmanager
def all_rollout_locks(paths: Paths) -> Iterator[None]:
    with ExitStack() as stack:
        for service in sorted({parse_service(name) for name in release_names(paths)}):
            stack.enter_context(rollout_lock(service, SystemHost(paths)))
        yield


def rollback(args: list[str], host: Host) -> int:
    service, *options = [arg for arg in args if arg != "--dry"] or [""]
    known = not options or (len(options) == 2 and options[0] == "--to")
    if not service or service.startswith("-") or not known:
        usage = "run `spark-host rollback SERVICE [--to RELEASE] [--dry]`"
        raise HostToolError("rollback", f"invalid arguments {args}", usage, 2)
    dry, target = "--dry" in args, options[1] if options else None
    plan = plan_rollback(service, target, host)
    if dry or plan.done or plan.problem or plan.to is None:
        print_json(plan)
        return 1 if plan.problem and not dry else 0
    boot.record_rollback(service, plan.to.name, host)
    print_json(replace(begin(plan.to.name, host), from_release=plan.from_release, to=plan.to))
    return 0


def plan_rollback(service: str, name: str | None, host: Host) -> Rollback:
    """Return the rollback to ``name``, by default to the previous known-good release."""
    current = boot.read_known_good(service, host).release
    from_release, to = _describe(current, host), None
    try:
        target = _find_target(service, name, host)
        to = _describe(target, host)
        if target == current:
            done = f"this host already serves {target}"
            if last := boot.last_rollback(service, host):
                done = f"{target} replaced {last.from_release} at {last.at}; "
                done += "to go further back, use `--to RELEASE`"
            return Rollback(from_release, to, done=done)
        _reject_incomplete(host.disk.load_release(target, host.paths), host)
    except HostToolError as error:
        return Rollback(from_release, to, problem=Problem(error.where, error.what, error.fix))
    return Rollback(from_release, to)


def _describe(name: str | None, host: Host) -> NamedRelease | None:
    if name is None:
        return None
    if (release := host.release(name)) is None:
        return NamedRelease(name, model=None, profile=None)
    return NamedRelease(name, release.model, release.profile)


def _find_target(service: str, name: str | None, host: Host) -> str:
    """Return the name of the release to roll back to."""
    if boot.is_stopped(service, host):
        fix = f"run `spark-deploy start`, or on the host `spark-host start-service {service}`"
        raise HostToolError(service, "was stopped on purpose", fix)
    available = host.releases(service)
    if name is not None:
        if name not in available:
            names = "; ".join(str(_describe(other, host)) for other in available) or "none"
            message = f"no such release on this host (available: {names})"
            raise HostToolError(name, message, "use an available release")
        return name
    record = boot.read_known_good(service, host)
    if record.release and boot.last_rollback(service, host):  # a repeated call changes nothing
        return record.release
    target = next((previous for previous in record.previous if previous in available), None)
    if target is None:
        message = "this host has no earlier proven release"
        fix = "change model or profile in group_vars, then run deploy.py"
        raise HostToolError(service, message, fix)
    return target


def _reject_incomplete(release: Release, host: Host) -> None:
    problem = host.engines.find_artifact_problem(release)
    if problem is None:
        return
    if isinstance(problem, docker.DockerTimeoutError):
        raise problem
    others = (host.release(name) for name in boot.read_known_good(release.service, host).previous)
    complete = [
        str(_describe(other.name, host))
        for other in others
        if other and host.engines.find_artifact_problem(other) is None
    ]
    fix = f"set model: {release.model} and profile: {release.profile}, then run deploy.py"
    if complete:
        fix = f"use a complete release ({'; '.join(complete)}), or {fix}"
    raise HostToolError(f"{release.name}: {problem.where}", problem.what, fix)
