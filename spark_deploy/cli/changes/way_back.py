"""Where a rollback leads on each host, said before anybody agrees to it."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.host import Host
from spark_contract.errors import Problem
from spark_contract.host.units import MAIN_SERVICE
from spark_contract.serving.release import service_of
from spark_contract.serving.status import Rollback

from spark_deploy.cli.hosts import Listed, say
from spark_deploy.cli.looking import Answer, look
from spark_deploy.facts.service.releases import WayBack


def ended(hosts: Sequence[Listed], to: str | None) -> int | None:
    """Say of each host from where to where it goes; an exit code where there is nothing to do."""
    service = service_of(to) if to else MAIN_SERVICE
    codes = list[int]()

    def ask(host: Host, _: Listed) -> Rollback | Problem:
        found: Rollback | Problem = host.get_fact(WayBack, service=service, to=to)
        return found

    answers: list[Answer[Rollback | Problem]] = look(hosts, ask)
    for one in answers:
        way = one.value
        if way is None or isinstance(way, Problem):
            say(f"{one.host.name}: {way or one.problem}")
            codes.append(1)
        elif way.done or way.to is None:
            say(f"{one.host.name}: {way.done or 'nothing to go back to'}")
            codes.append(0)
        else:
            say(f"{one.host.name}: goes back from {way.came or 'nothing'} to {way.to}")
    return max(codes) if len(codes) == len(hosts) else None
