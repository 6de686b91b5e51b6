"""Go back to a release that was proven before; remove what no kept release needs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from pyinfra.api.command import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract.documents import plain
from spark_contract.keep import Keep
from spark_contract.paths import HOST_TOOL

from spark_deploy.errors import Problem
from spark_deploy.facts.memo import read
from spark_deploy.facts.service.releases import Prunable, WayBack
from spark_deploy.facts.service.serve import Status
from spark_deploy.operations.commands import CommandFailed, heartbeat, log_once, run
from spark_deploy.operations.host_errors import Commands, host_errors, refuse, show
from spark_deploy.operations.service.rollout import go_back, held_back

_PRUNE_TIMEOUT_S = 3600


@operation()
@host_errors
def rolled_back(service: str, to: str | None, timeout_s: int) -> Commands:
    """Serve the release before the current one, or a named one, proven again.

    Args:
        service: which service.
        to: a release by name; ``None``: the last good one before the current.
        timeout_s: give up watching after this long; the host finishes by itself.
    """
    way = read(WayBack, service=service, to=to)
    if not way:
        yield refuse(_no_answer("rollback"))
        return
    if way.get("problem"):
        yield refuse(Problem(**way["problem"]))
        return
    if way.get("done"):
        log_once(way["done"])
        host.noop(way["done"])
        return
    problem = held_back(f"left alone on {_named(way['from'])}")
    if problem:
        yield refuse(problem)
        return
    target = way["to"]["name"]
    log_once(f"goes back from {_named(way['from'])} to {_named(way['to'])}")
    yield go_back(service, target, timeout_s)


def _named(release: dict[str, Any] | None) -> str:
    if release is None:
        return "nothing"
    return f"{release['name']} ({release['model']} with {release['profile']})"


@operation()
@host_errors
def still_proven(service: str) -> Commands:
    """Refuse to call a rollback good unless what the host serves is proven.

    Args:
        service: which service.
    """
    if not host.state.is_executing:
        host.noop("judged after the change")
        return
    status = read(Status)
    state = status.service(service)
    release = state.good if state else None
    why = status.unproven(service, release) if release else "no release was ever proven here"
    if why:
        yield refuse(
            Problem(
                f"{host.name}: {release or service}",
                f"not proven: {why}",
                "`spark-check` on the host says which check fails; deploy.py repairs the rest",
            )
        )
        return
    host.log(f"serves {release}, proven; the next deploy.py goes to what group_vars say")
    host.noop("proven")


@operation()
@host_errors
def pruned(keep: Keep) -> Commands:
    """Remove releases, trees, sources, images and caches of ours that nothing kept needs.

    Args:
        keep: what has to stay, as ``planning/work/keep.py`` says it.
    """
    wanted = json.dumps(plain(keep), sort_keys=True)
    found = read(Prunable, keep=wanted)
    if not found:
        yield refuse(_no_answer("prune --dry"))
        return
    if found.get("problem"):
        yield refuse(Problem(**found["problem"]))
        return
    for line in lines(found):
        log_once(line)
    if not found["items"]:
        host.noop("nothing can go")
        return
    yield FunctionCommand(_prune, [wanted], {})


def _no_answer(verb: str) -> Problem:
    return Problem(
        f"{host.name}: spark-host {verb}",
        "did not answer; the host tools are missing or older than this checkout",
        "run deploy.py for this host first",
    )


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what a prune finds: each thing that goes with its bytes, and why releases stay."""
    for item in found["items"]:
        if item["kind"] != "job":
            yield f"goes   {gigabytes(item['bytes']):>9}  {item['kind']} {item['name']}"
    jobs = sum(1 for item in found["items"] if item["kind"] == "job")
    if jobs:
        yield f"goes              records of {jobs} jobs that made it"
    for name, why in sorted(found["kept"].items()):
        yield f"stays             release {name}: {why}"
    for path in found["not_ours"]:
        yield f"stays             {path}: not made by us"
    yield f"in all {gigabytes(found['bytes']):>9}"


def gigabytes(size_bytes: int) -> str:
    """Write bytes for people."""
    return f"{size_bytes / 1e9:.2f} GB"


def _prune(state: State, host: Host, keep: str) -> bool:
    try:
        with heartbeat(host, "removing"):
            said = run(host, f"{HOST_TOOL} prune {shlex.quote(keep)}", timeout_s=_PRUNE_TIMEOUT_S)
    except CommandFailed as error:
        show(host, f"{error.output.strip() or error}\n  fix: see above, then run again")
        return False
    removed = json.loads("\n".join(said))
    host.log(f"removed {len(removed['items'])} things, {gigabytes(removed['bytes'])}")
    return True
