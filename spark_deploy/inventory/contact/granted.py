"""What bootstrap grants on a host; a fresh login proves that it is granted, or taken back."""

from __future__ import annotations

from pyinfra.api.host import Host
from pyinfra.api.state import State

from spark_deploy.errors import Problem
from spark_deploy.facts.machine.access import ACCOUNT
from spark_deploy.inventory.contact.host_keys import Endpoint
from spark_deploy.inventory.contact.login import endpoint, public_key, try_key
from spark_deploy.inventory.known import known_of
from spark_deploy.planning.machine import BootstrapPlan


def endpoint_of(host: Host) -> Endpoint:
    """Return where deploys log in to a host of this run."""
    return endpoint(host.name, host.data)


def plan_of(host: Host) -> BootstrapPlan:
    """Return what a host grants: an account for deploys, or key and rule of its login user."""
    if endpoint_of(host).is_local:
        return BootstrapPlan(public_key="")
    ssh = known_of(host).found.settings.ssh
    return BootstrapPlan(
        public_key=public_key(ssh.key_file),
        account=ACCOUNT if ssh.user == ACCOUNT else None,
        allowed_from=ssh.allowed_from,
    )


def prove(state: State, host: Host, endpoint: Endpoint) -> bool:
    """Log in anew with the key alone, and become root without a password."""
    access = try_key(endpoint)
    if access.ready:
        login = "" if endpoint.is_local else "the key logs in, "
        host.log(f"{login}sudo needs no password")
        return True
    if endpoint.is_local:
        what = "sudo still asks for a password"
        return _refused(host, what, "look for a later rule in /etc/sudoers and /etc/sudoers.d")
    what = "our key logs in, but sudo still asks for a password"
    if not access.logs_in:
        what = f"our key still does not log in ({access.detail})"
    fix = "look at `journalctl -u ssh` and /etc/sudoers.d on the host"
    if endpoint.user == ACCOUNT:
        fix += f", and whether sshd's AllowUsers and AllowGroups let {ACCOUNT} in"
    return _refused(host, what, fix)


def prove_way(state: State, host: Host, endpoint: Endpoint) -> bool:
    """Log in anew: the host is still reached the way that deploys take."""
    access = try_key(endpoint)
    if access.ready:
        host.log("a new login works")
        return True
    fix = "wait: the old network returns by itself; then look at cable and `ip route`"
    return _refused(host, f"no new login at {endpoint.hostname} ({access.detail})", fix)


def prove_shut(state: State, host: Host, endpoint: Endpoint) -> bool:
    """Try the key anew: it must not lead to root any more."""
    access = try_key(endpoint)
    if not access.ready:
        here = "sudo asks for a password again"
        host.log(here if endpoint.is_local else "our key opens nothing here any more")
        return True
    if endpoint.is_local:
        what = "sudo still needs no password"
        return _refused(host, what, "look for another rule in /etc/sudoers and /etc/sudoers.d")
    fix = "look for another rule in /etc/sudoers.d, and for the key in AuthorizedKeysFile of sshd"
    return _refused(host, "our key still logs in and sudo asks for nothing", fix)


def _refused(host: Host, what: str, fix: str) -> bool:
    for line in str(Problem(host.name, what, fix)).splitlines():
        host.log_styled(line, fg="red")
    return False
