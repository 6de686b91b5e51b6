"""Go back to a release that was proven before; remove what no kept release needs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pyinfra.api.command import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import ctx_host, host
from spark_contract.documents import parse, plain
from spark_contract.host import tool
from spark_contract.host.units import MAIN_SERVICE
from spark_contract.serving.status import ReleaseState
from spark_contract.work.keep import Keep, Pruning

from spark_deploy.errors import Problem
from spark_deploy.facts.memo import read
from spark_deploy.facts.service.releases import Prunable, WayBack
from spark_deploy.facts.service.serve import Status
from spark_deploy.operations.commands import CommandFailed, heartbeat, log_once, run
from spark_deploy.operations.host_errors import Commands, Refused, host_errors, refuse, show
from spark_deploy.operations.service.rollout import go_back, hold_back

_PRUNE_TIMEOUT_S = 3600


@operation()
@host_errors
def rolled_back(service: str, to: str | None, timeout_s: int) -> Commands:
    """Serve the release before the current one, or a named one, proven again."""
    way = read(WayBack, service=service, to=to)
    if isinstance(way, Problem):
        if not host.state.is_executing:  # nobody shall read of a change where there will be none
            show(ctx_host.get(), str(way))  # type: ignore[no-untyped-call]  # pyinfra
            host.noop("refused")
            return
        raise Refused(way)
    if way.to is None or way.done:
        why = way.done or "nothing to go back to"
        log_once(why)
        host.noop(why)
        return
    came = way.came or "nothing"
    hold_back(f"left alone on {came}")
    log_once(f"goes back from {came} to {way.to}")
    yield go_back(service, way.to.name, timeout_s)


@operation()
@host_errors
def still_proven(service: str, chosen: str) -> None:
    """Refuse to call a rollback good unless what the host serves is proven.

    Args:
        service: what went back.
        chosen: the MODEL/PROFILE of it that the settings say, or "none".
    """
    if not host.state.is_executing:
        host.noop("judged after the change")
        return
    status = read(Status)
    state = status.service(service)
    release = state.good if state else None
    why = status.unproven(service, release) if release else "no release was ever proven here"
    if why:
        refuse(
            f"{host.name}: {release or service}",
            f"not proven: {why}",
            "`spark-check` on the host says which check fails; deploy.py repairs the rest",
        )
    host.log(_after(service, status.release(release), chosen))
    host.noop("proven")


def _after(service: str, serves: ReleaseState | None, chosen: str) -> str:
    """Say what serves after a rollback, and that the settings still say what they said."""
    if serves is None:  # said of a service that is proven
        raise ValueError(f"{service} serves nothing")
    pair = f"{serves.model}/{serves.profile}"
    next_up = "the next `spark-deploy up` goes to"
    then = f"{next_up} {chosen} again"
    if chosen == pair:
        then = f"{next_up} what the settings say of it now"
    elif service == MAIN_SERVICE:
        then += f"; to stay: `spark-deploy use {pair}`"
    return f"serves {pair} ({serves.name}), proven; {then}"


@operation()
@host_errors
def pruned(keep: Keep) -> Commands:
    """Remove releases, trees, sources, images and caches of ours that nothing kept needs."""
    wanted = json.dumps(plain(keep), sort_keys=True)
    found = read(Prunable, keep=wanted)
    if isinstance(found, Problem):
        raise Refused(found)
    for line in lines(found):
        log_once(line)
    if not found.items:
        host.noop("nothing can go")
        return
    yield FunctionCommand(_prune, [wanted], {})


def lines(found: Pruning) -> Iterator[str]:
    """Yield what a prune finds: each thing that goes with its bytes, and why releases stay."""
    for item in found.items:
        if item.kind != "job":
            yield f"goes   {gigabytes(item.bytes):>9}  {item.kind} {item.name}"
    jobs = sum(1 for item in found.items if item.kind == "job")
    if jobs:
        yield f"goes              records of {jobs} jobs that made it"
    for name, why in sorted(found.kept.items()):
        yield f"stays             release {name}: {why}"
    for path in found.not_ours:
        yield f"stays             {path}: not made by us"
    yield f"in all {gigabytes(found.bytes):>9}"


def gigabytes(size_bytes: int) -> str:
    """Write bytes for people."""
    unit, factor = ("GB", 1e9) if size_bytes >= 1e8 else ("MB", 1e6)
    return f"{size_bytes / factor:.2f} {unit}"


def _prune(state: State, host: Host, keep: str) -> bool:
    try:
        with heartbeat(host, "removing"):
            said = run(host, tool.line(tool.PRUNE, keep), timeout_s=_PRUNE_TIMEOUT_S)
    except CommandFailed as error:
        show(host, f"{error.output.strip() or error}\n  fix: see above, then run again")
        return False
    removed = parse(Pruning, "\n".join(said))
    host.log(f"removed {len(removed.items)} things, {gigabytes(removed.bytes)}")
    return True
