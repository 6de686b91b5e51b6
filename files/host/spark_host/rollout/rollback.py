"""A change taken back: where a rollback would lead, and how it is asked for."""

from __future__ import annotations

from dataclasses import replace

from spark_contract.errors import HostToolError, Problem
from spark_contract.release import Release
from spark_contract.status import NamedRelease, Rollback

from spark_host.records import boot
from spark_host.rollout.ports import Host
from spark_host.rollout.request import begin
from spark_host.system import docker
from spark_host.system.programs import print_json


def way_back(service: str, wanted: str | None, host: Host) -> Rollback:
    """Say where a rollback leads: to a release by name, or to the last good one before this."""
    current = boot.good(service, host).release
    came, to = _named(current, host), None
    try:
        target = _target(service, wanted, host)
        to = _named(target, host)
        if target == current:
            return Rollback(came, to, done=_nothing_to_do(service, target, host))
        _refuse_unfit(host.disk.load(target, host.paths), host)
    except HostToolError as error:
        return Rollback(came, to, problem=Problem(error.where, error.what, error.fix))
    return Rollback(came, to)


def _named(name: str | None, host: Host) -> NamedRelease | None:
    if name is None:
        return None
    release = host.release(name)
    known = (release.model, release.profile) if release else (None, None)
    return NamedRelease(name, *known)


def _target(service: str, wanted: str | None, host: Host) -> str:
    if boot.is_stopped(service, host):
        raise HostToolError(
            service, "was stopped on purpose", "start it first: spark-deploy start, on the host "
            f"`spark-host start-service {service}`",
        )  # fmt: skip
    here = host.releases(service)
    if wanted is not None:
        if wanted not in here:
            known = "; ".join(str(_named(name, host)) for name in here) or "none"
            raise HostToolError(wanted, f"is not a release on this host (there: {known})",
                                "name one of these")  # fmt: skip
        return wanted
    record = boot.good(service, host)
    if record.release and boot.rolled_back(service, host):
        return record.release
    for name in record.previous:
        if name in here:
            return name
    raise HostToolError(
        service,
        "nothing to go back to: no earlier proven release is kept on this host",
        "change model or profile in group_vars and run deploy.py",
    )


def _nothing_to_do(service: str, target: str, host: Host) -> str:
    back = boot.rolled_back(service, host)
    if not back:
        return f"{target} is what this host serves"
    return (
        f"{target} serves in place of {back.came} since {back.at}; "
        "to go further back name a release"
    )


def _refuse_unfit(release: Release, host: Host) -> None:
    problem = host.engines.part_problem(release)
    if problem is None:
        return
    if isinstance(problem, docker.DaemonSilent):
        raise problem
    others = (host.release(name) for name in boot.good(release.service, host).previous)
    whole = [
        str(_named(other.name, host))
        for other in others
        if other and host.engines.part_problem(other) is None
    ]
    fix = f"set model: {release.model} and profile: {release.profile} and run deploy.py"
    if whole:
        fix = f"name one that is whole: {'; '.join(whole)}, or {fix}"
    raise HostToolError(f"{release.name}: {problem.where}", f"is gone: {problem.what}", fix)


def rollback(words: list[str], host: Host) -> int:
    """Run ``rollback SERVICE [--to RELEASE] [--dry]``; prints what :func:`way_back` says."""
    if not words or words[0].startswith("-"):
        raise HostToolError("rollback", "no service named", "rollback SERVICE [--to R] [--dry]", 2)
    dry = "--dry" in words
    rest = [word for word in words if word != "--dry"]
    wanted = rest[rest.index("--to") + 1] if "--to" in rest[:-1] else None
    way = way_back(rest[0], wanted, host)
    if dry or way.done or way.problem or way.to is None:
        print_json(way)
        return 1 if way.problem and not dry else 0
    boot.note_rollback(rest[0], way.to.name, host)
    print_json(replace(begin(way.to.name, host), came=way.came, to=way.to))
    return 0
