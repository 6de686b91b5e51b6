"""A change of release as others see it: asked for once, followed under its id, or taken back.

What happens in between is in ``switch.py`` and belongs to systemd alone.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release, load, load_if_present, names, service_of

from spark_host.engine import serve
from spark_host.records import boot
from spark_host.system import docker, systemd

UNIT_FIELDS = ("ActiveState", "Job", "InvocationID", "Result")
_UNDER_WAY = ("activating", "active", "deactivating")


def unit_of(name: str) -> str:
    """Return the unit that changes over to a release."""
    return f"spark-switch@{name}.service"


def begin(name: str, paths: Paths) -> dict[str, Any]:
    """Ask systemd for the change to a release; return the id its record will carry.

    A change to this release that is under way is joined, not started again.
    """
    load(name, paths)
    unit = unit_of(name)
    state = systemd.state(unit, *UNIT_FIELDS)
    if state.get("ActiveState") in _UNDER_WAY or _pending(state):
        return {"release": name, "request": request_of(name, paths), "joined": True}
    request = uuid.uuid4().hex
    # What an earlier change left would read as the outcome of this one.
    files.remove(paths.switch(name))
    files.write_json(paths.request(name), {"id": request, "at": files.now()})
    systemd.systemctl("daemon-reload")
    systemd.systemctl("reset-failed", unit)
    said = systemd.systemctl("start", "--no-block", unit)
    if said.returncode != 0:
        raise HostToolError(unit, said.stderr.strip() or "did not start", f"journalctl -u {unit}")
    return {"release": name, "request": request, "joined": False}


def request_of(name: str, paths: Paths) -> str | None:
    """Return the id under which the change to a release was last asked for."""
    found = files.read_json(paths.request(name)) or {}
    return found.get("id")


def poll(name: str, paths: Paths, request: str | None = None) -> dict[str, Any]:
    """Return how the change to a release stands.

    Args:
        name: The release.
        paths: Where the record is.
        request: Only a record with this id counts; ``None`` takes the last one.
    """
    return judge(name, systemd.state(unit_of(name), *UNIT_FIELDS), paths, request)


def judge(
    name: str, unit: systemd.UnitState, paths: Paths, request: str | None = None
) -> dict[str, Any]:
    """Return how a change stands, given its unit's :data:`UNIT_FIELDS`.

    A record of another release, of another request or of an earlier run of the unit says nothing
    of this change.
    """
    state, pending = unit.get("ActiveState", "inactive"), _pending(unit)
    running = pending or state in _UNDER_WAY
    found = files.read_json(paths.switch(name)) or {}
    if (
        found.get("release") != name
        or (request is not None and found.get("request") != request)
        or (running and _of_another_run(found, unit))
    ):
        found = {"release": name, "state": "none"}
    if found["state"] == "running" and not running:
        found["state"] = "interrupted"
    if found["state"] == "none" and request is not None and not running:
        found.update(
            state="not-started",
            failed_phase="begin",
            reason=_last_words(name, unit)
            or f"{unit_of(name)} did not run ({unit.get('Result') or state})",
        )
    return {**found, "unit": "activating" if pending and state == "inactive" else state}


def _last_words(name: str, unit: systemd.UnitState) -> str | None:
    """Return the error with which a run ended before it could write a record, if it said one."""
    run = unit.get("InvocationID")
    said = systemd.journal(run, unit_of(name), lines=20) if run else []
    return next((line[7:] for line in reversed(said) if line.startswith("error: ")), None)


def _pending(unit: systemd.UnitState) -> bool:
    return unit.get("Job", "0") not in ("", "0")


def _of_another_run(found: dict[str, Any], unit: systemd.UnitState) -> bool:
    ours, theirs = unit.get("InvocationID"), found.get("invocation_id")
    return bool(ours and theirs and ours != theirs)


def way_back(service: str, wanted: str | None, paths: Paths) -> dict[str, Any]:
    """Say where a rollback would lead.

    Args:
        service: The service to change.
        wanted: A release by name; ``None`` means the last good one before the current.
        paths: Where the records are.

    Returns:
        ``from`` and ``to`` as ``{name, model, profile}``; ``done`` when there is nothing to do;
        ``problem`` as ``{where, what, fix}`` when it cannot be done.
    """
    current = boot.good(service, paths)["release"]
    answer: dict[str, Any] = {"from": _named(current, paths), "to": None}
    try:
        target = _target(service, wanted, paths)
        answer["to"] = _named(target, paths)
        if target == current:
            answer["done"] = _nothing_to_do(service, target, paths)
            return answer
        _refuse_unfit(load(target, paths), paths)
    except HostToolError as error:
        answer["problem"] = {"where": error.where, "what": error.what, "fix": error.fix}
    return answer


def _named(name: str | None, paths: Paths) -> dict[str, Any] | None:
    if name is None:
        return None
    release = load_if_present(name, paths)
    return {
        "name": name,
        "model": release.model if release else None,
        "profile": release.profile if release else None,
    }


def _in_words(name: str, paths: Paths) -> str:
    release = load_if_present(name, paths)
    return f"{name} = {release.model} with {release.profile}" if release else name


def _target(service: str, wanted: str | None, paths: Paths) -> str:
    if paths.stopped(service).exists():
        raise HostToolError(
            service, "was stopped on purpose", "start it first: spark-deploy start, on the host "
            f"`spark-host start-service {service}`",
        )  # fmt: skip
    here = [name for name in names(paths) if service_of(name) == service]
    if wanted is not None:
        if wanted not in here:
            known = "; ".join(_in_words(name, paths) for name in here) or "none"
            raise HostToolError(wanted, f"is not a release on this host (there: {known})",
                                "name one of these")  # fmt: skip
        return wanted
    record = boot.good(service, paths)
    if boot.rolled_back(service, paths):
        return str(record["release"])
    for name in record["previous"]:
        if name in here:
            return str(name)
    raise HostToolError(
        service,
        "nothing to go back to: no earlier proven release is kept on this host",
        "change model or profile in group_vars and run deploy.py",
    )


def _nothing_to_do(service: str, target: str, paths: Paths) -> str:
    back = boot.rolled_back(service, paths)
    if not back:
        return f"{target} is what this host serves"
    return (
        f"{target} serves in place of {back['from']} since {back['at']}; "
        "to go further back name a release"
    )


def _refuse_unfit(release: Release, paths: Paths) -> None:
    problem = serve.part_problem(release)
    if problem is None:
        return
    if isinstance(problem, docker.DaemonSilent):
        raise problem
    record = boot.good(release.service, paths)
    whole = [
        _in_words(name, paths)
        for name in record["previous"]
        if (other := load_if_present(name, paths)) and serve.part_problem(other) is None
    ]
    fix = f"set model: {release.model} and profile: {release.profile} and run deploy.py"
    if whole:
        fix = f"name one that is whole ({'; '.join(whole)}), or {fix}"
    raise HostToolError(f"{release.name}: {problem.where}", f"is gone: {problem.what}", fix)


def rollback(words: list[str], paths: Paths) -> int:
    """Run ``rollback SERVICE [--to RELEASE] [--dry]``; prints what :func:`way_back` says."""
    dry = "--dry" in words
    rest = [word for word in words if word != "--dry"]
    wanted = rest[rest.index("--to") + 1] if "--to" in rest[:-1] else None
    answer = way_back(rest[0], wanted, paths)
    if not dry and not answer.get("done") and not answer.get("problem"):
        target = answer["to"]["name"]
        boot.note_rollback(rest[0], target, paths)
        answer |= begin(target, paths)
    json.dump(answer, sys.stdout)
    print()
    return 1 if answer.get("problem") and not dry else 0
