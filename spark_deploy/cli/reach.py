"""Whether hosts let us in, and what helps where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from spark_deploy.cli.hosts import Listed, few, say
from spark_deploy.config.errors import Problem
from spark_deploy.inventory.host_keys import Endpoint, Seen, look
from spark_deploy.inventory.login import endpoint, try_key
from spark_deploy.ticking import ticking

QUIET_S = 2.0  # after which it is said whom a command waits for
_SWITCH_ON = "see that it is on, and that its address and port are right"
_LET_IN = "run `spark-deploy up`, or deploys/bootstrap.py: it installs key and sudo rule"
# By words of pyinfra on why it has no connection.
_FIXES = {
    "Could not connect": _SWITCH_ON,
    "Could not resolve hostname": _SWITCH_ON,
    "EOF error": _SWITCH_ON,
    "Authentication error": _LET_IN,
    "SSH host key error": _LET_IN,  # there both keys are shown, and what to do
    "No host key": _LET_IN,
}


def with_fix(reason: str) -> str:
    """Return why pyinfra has no connection to a host, with what helps."""
    fix = next((fix for words, fix in _FIXES.items() if words in reason), "")
    return f"{reason}; fix: {fix}" if fix else reason


@dataclass(frozen=True, slots=True)
class Reached:
    """Hosts that are not ready for a deploy, each for one of two reasons."""

    silent: tuple[Seen, ...]
    closed: tuple[Endpoint, ...]  # our key does not log in, or sudo asks for a password

    def problems(self) -> Iterator[Problem]:
        """Yield what is to be done about each."""
        for one in self.silent:
            what = f"cannot be reached at {one.entry_name}: {one.detail}"
            yield Problem(one.endpoint.host, what, _SWITCH_ON)
        for closed in self.closed:
            what = "sudo asks for a password"
            if not closed.is_local:
                what = f"does not let our key in, or {what}"
            yield Problem(closed.host, what, _LET_IN)


def reach(hosts: Sequence[Listed]) -> Reached:
    """Try a login on each host at the same time, and look at those where it fails."""
    endpoints = [endpoint(host.name, host.data) for host in hosts]
    asking = f"asking {few([one.host for one in endpoints])}"
    with ticking(asking, say, first_s=QUIET_S), ThreadPoolExecutor(max_workers=16) as pool:
        found = list(pool.map(try_key, endpoints))
        closed = [one for one, access in zip(endpoints, found, strict=True) if not access.ready]
        seen = list(pool.map(look, [one for one in closed if not one.is_local]))
    silent = tuple(one for one in seen if one.state == "unreachable")
    off = [one.endpoint for one in silent]
    return Reached(silent, tuple(one for one in closed if one not in off))
