"""The plan of a host for a deploy."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import inventory

from spark_deploy.errors import PlanError
from spark_deploy.facts.network.fabric import Fabric, Ports
from spark_deploy.inventory.held import held_for
from spark_deploy.inventory.known import known_of
from spark_deploy.lockfile.resolve import locked_for
from spark_deploy.payload.content import SITE_REQUIREMENTS, quantiser_digest, read_payload
from spark_deploy.planning.host import plan_host
from spark_deploy.planning.machine import PayloadIdentity
from spark_deploy.planning.resolve import Request
from spark_deploy.planning.serving.waves import Wave, waves_of
from spark_deploy.planning.types import HostPlan

# Hosts run at the same time; the first one asks the hub, the others wait for its answer.
_locking = threading.Lock()


def payload_identity() -> PayloadIdentity:
    """Return what this checkout would send to hosts, by content."""
    payload = read_payload()
    return PayloadIdentity(
        tools_digest=payload.tools_digest,
        image_context_digest=payload.image_context_digest,
        python_requirements=SITE_REQUIREMENTS,
        quantiser_digest=quantiser_digest(),
    )


def waves_for(state: State) -> tuple[Wave, ...]:
    """Return in which waves the hosts of this run replace what they serve."""
    chosen = [host for host in state.inventory if state.is_host_in_limit(host)]
    settings = {host.name: known_of(host).found.settings for host in chosen}
    rollouts = {name: one.rollout for name, one in settings.items()}
    return waves_of(rollouts, (one.cluster.hosts for one in settings.values()))


def plan_for(host: Host) -> HostPlan:
    """Return the plan of ``host``; names it is the first to need are locked and shown."""
    known = known_of(host)
    found, catalog = known.found, known.catalog
    with _locking:
        lock = locked_for(found.settings, catalog, found.lock_path, logger.info)
        lock = held_for(found.settings, catalog, found.lock_path, lock, logger.info)
    fabric = ports_of(found.settings.cluster.hosts)
    plan = plan_host(Request(host.name, found.settings, catalog, lock, payload_identity(), fabric))
    for warning in plan.warnings:
        logger.warning(f"[{host.name}] {warning}")
    return plan


def ports_of(members: Sequence[str]) -> dict[str, Ports]:
    """Ask every host on the cables how it reaches the others.

    Raises:
        PlanError: one of them is no part of this run.
    """
    known = {one.name: one for one in inventory}
    away = [name for name in members if name not in known or not known[name].connected]
    if away:
        what = f"cannot be asked for {', '.join(away)}: not reached, or left out by --limit"
        fix = "name all of them, and have all of them up: each is asked about its ports"
        raise PlanError.one(f"cluster of {', '.join(members)}", what, fix)
    return {name: known[name].get_fact(Fabric, _sudo=False) for name in members}
