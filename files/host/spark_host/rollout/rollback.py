"""``spark-host rollback``: finds the release to go back to and starts the rollout."""

from __future__ import annotations

from dataclasses import replace

from spark_contract.errors import HostToolError, Problem
from spark_contract.release import Release
from spark_contract.status import NamedRelease, Rollback

from spark_host.records import boot
from spark_host.rollout.record import begin
from spark_host.rollout.steps import Host
from spark_host.system import docker
from spark_host.system.programs import print_json


def plan_rollback(service: str, name: str | None, host: Host) -> Rollback:
    """Return the target of a rollback: release ``name``, or the previous good release."""
    current = boot.good(service, host).release
    came, to = _describe(current, host), None
    try:
        target = _target(service, name, host)
        to = _describe(target, host)
        if target == current:
            return Rollback(came, to, done=_already_done(service, target, host))
        _refuse_incomplete(host.disk.load(target, host.paths), host)
    except HostToolError as error:
        return Rollback(came, to, problem=Problem(error.where, error.what, error.fix))
    return Rollback(came, to)


def _describe(name: str | None, host: Host) -> NamedRelease | None:
    if name is None:
        return None
    release = host.release(name)
    if release is None:
        return NamedRelease(name, None, None)
    return NamedRelease(name, release.model, release.profile)


def _target(service: str, name: str | None, host: Host) -> str:
    if boot.is_stopped(service, host):
        fix = f"run `spark-deploy start`, or on the host `spark-host start-service {service}`"
        raise HostToolError(service, "was stopped on purpose", fix)
    present = host.releases(service)
    if name is not None:
        if name not in present:
            known = "; ".join(str(_describe(other, host)) for other in present) or "none"
            message = f"is not a release on this host (there: {known})"
            raise HostToolError(name, message, "name a release from this list")
        return name
    record = boot.good(service, host)
    if record.release and boot.rolled_back(service, host):
        return record.release
    target = next((previous for previous in record.previous if previous in present), None)
    if target is None:
        message = "nothing to go back to: no earlier proven release is kept on this host"
        fix = "change model or profile in group_vars and run deploy.py"
        raise HostToolError(service, message, fix)
    return target


def _already_done(service: str, target: str, host: Host) -> str:
    last = boot.rolled_back(service, host)
    if not last:
        return f"{target} is what this host serves"
    return (
        f"{target} serves in place of {last.came} since {last.at}; "
        "to go further back name a release"
    )


def _refuse_incomplete(release: Release, host: Host) -> None:
    problem = host.engines.part_problem(release)
    if problem is None:
        return
    if isinstance(problem, docker.DaemonSilent):
        raise problem
    others = (host.release(name) for name in boot.good(release.service, host).previous)
    complete = [
        str(_describe(other.name, host))
        for other in others
        if other and host.engines.part_problem(other) is None
    ]
    fix = f"set model: {release.model} and profile: {release.profile} and run deploy.py"
    if complete:
        fix = f"name a complete release: {'; '.join(complete)}, or {fix}"
    raise HostToolError(f"{release.name}: {problem.where}", f"is gone: {problem.what}", fix)


def rollback(words: list[str], host: Host) -> int:
    if not words or words[0].startswith("-"):
        raise HostToolError("rollback", "no service named", "rollback SERVICE [--to R] [--dry]", 2)
    dry = "--dry" in words
    rest = [word for word in words if word != "--dry"]
    name = rest[rest.index("--to") + 1] if "--to" in rest[:-1] else None
    plan = plan_rollback(rest[0], name, host)
    if dry or plan.done or plan.problem or plan.to is None:
        print_json(plan)
        return 1 if plan.problem and not dry else 0
    boot.note_rollback(rest[0], plan.to.name, host)
    print_json(replace(begin(plan.to.name, host), came=plan.came, to=plan.to))
    return 0
