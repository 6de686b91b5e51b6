"""A change taken back: where a rollback would lead, and how it is asked for."""

from __future__ import annotations

import json
import sys
from typing import Any

from spark_contract.errors import HostToolError
from spark_contract.release import Release

from spark_host.records import boot
from spark_host.rollout.ports import Host
from spark_host.rollout.request import begin
from spark_host.system import docker


def way_back(service: str, wanted: str | None, host: Host) -> dict[str, Any]:
    """Say where a rollback would lead.

    Args:
        service: The service to change.
        wanted: A release by name; ``None`` means the last good one before the current.
        host: Where the records are.

    Returns:
        ``from`` and ``to`` as ``{name, model, profile}``; ``done`` when there is nothing to do;
        ``problem`` as ``{where, what, fix}`` when it cannot be done.
    """
    current = boot.good(service, host).release
    answer: dict[str, Any] = {"from": _named(current, host), "to": None}
    try:
        target = _target(service, wanted, host)
        answer["to"] = _named(target, host)
        if target == current:
            answer["done"] = _nothing_to_do(service, target, host)
            return answer
        _refuse_unfit(host.disk.load(target, host.paths), host)
    except HostToolError as error:
        answer["problem"] = {"where": error.where, "what": error.what, "fix": error.fix}
    return answer


def _named(name: str | None, host: Host) -> dict[str, Any] | None:
    if name is None:
        return None
    release = host.release(name)
    return {
        "name": name,
        "model": release.model if release else None,
        "profile": release.profile if release else None,
    }


def _in_words(name: str, host: Host) -> str:
    release = host.release(name)
    return f"{name} = {release.model} with {release.profile}" if release else name


def _target(service: str, wanted: str | None, host: Host) -> str:
    if boot.is_stopped(service, host):
        raise HostToolError(
            service, "was stopped on purpose", "start it first: spark-deploy start, on the host "
            f"`spark-host start-service {service}`",
        )  # fmt: skip
    here = host.releases(service)
    if wanted is not None:
        if wanted not in here:
            known = "; ".join(_in_words(name, host) for name in here) or "none"
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
        _in_words(other.name, host)
        for other in others
        if other and host.engines.part_problem(other) is None
    ]
    fix = f"set model: {release.model} and profile: {release.profile} and run deploy.py"
    if whole:
        fix = f"name one that is whole ({'; '.join(whole)}), or {fix}"
    raise HostToolError(f"{release.name}: {problem.where}", f"is gone: {problem.what}", fix)


def rollback(words: list[str], host: Host) -> int:
    """Run ``rollback SERVICE [--to RELEASE] [--dry]``; prints what :func:`way_back` says."""
    dry = "--dry" in words
    rest = [word for word in words if word != "--dry"]
    wanted = rest[rest.index("--to") + 1] if "--to" in rest[:-1] else None
    answer = way_back(rest[0], wanted, host)
    if not dry and not answer.get("done") and not answer.get("problem"):
        target = answer["to"]["name"]
        boot.note_rollback(rest[0], target, host)
        answer |= begin(target, host)
    json.dump(answer, sys.stdout)
    print()
    return 1 if answer.get("problem") and not dry else 0
