"""First contact: host keys, and the one password that key and sudo rule then replace.

This machine (``@local``) has no login: it needs the sudo rule alone.

Runs while the inventory is loaded, before pyinfra connects: hosts that already let our key in
and need no password for sudo are left as they are, the others get the password that is asked
once for all of them. It is kept in memory, sent on SSH's own channel or standard input, and never
part of a command line or a log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pyinfra.api.hiddenvalue import HiddenValue
from pyinfra.api.host import Host

from spark_deploy.config.errors import SettingsError
from spark_deploy.hosts.access import ACCOUNT
from spark_deploy.inventory.host_keys import Endpoint, Seen, is_named, look, problems_of, record
from spark_deploy.inventory.host_names import KEY, Known
from spark_deploy.inventory.login import (
    Access,
    Asked,
    Password,
    endpoint,
    public_key,
    takes_password,
    try_key,
)

HOST_KEYS_FILE_VARIABLE = "SPARK_BOOTSTRAP_HOST_KEYS_FILE"
CONTACT_KEY = "spark_deploy_contact"  # in pyinfra's data of a host


@dataclass(frozen=True, slots=True)
class Contact:
    """What the role needs to know of one host."""

    endpoint: Endpoint  # where deploys log in, from this run on
    ready: bool  # they do already
    public_key: str  # "": this machine, which has no login
    password: HiddenValue | None

    def to_json(self) -> str:
        """Say nothing of it in ``debug-inventory``."""
        return "***"


def contact_of(host: Host) -> Contact:
    """Return what ``prepare`` found out about a host of this run.

    Raises:
        SettingsError: no inventory file of ours named the host, so nobody looked.
    """
    contact = host.data.get(CONTACT_KEY)
    if not isinstance(contact, Contact):
        fix = (
            "run with an inventory file, such as inventory/spark.py; for this machine list '@local'"
        )
        raise SettingsError.one(host.name, "no inventory file of ours named this host", fix)
    return contact


def prepare(
    hosts: Mapping[str, Mapping[str, Any]],
    *,
    asked: Asked,
    confirm: Callable[[str], str] = input,
) -> dict[str, dict[str, Any]]:
    """Record host keys, find out who needs a password and ask for it once.

    Args:
        hosts: pyinfra's data of each host (``ssh_hostname``, ``ssh_user``, ...).
        asked: the password of this run, shared by all its groups.
        confirm: reads the answer about new host keys.

    Returns:
        Further data for each host, its ``Contact`` among it.

    Raises:
        SettingsError: there is no key of ours, a host key changed, new keys were not agreed to, or
            there is nobody to ask.
    """
    endpoints = [endpoint(host, data) for host, data in hosts.items()]
    with ThreadPoolExecutor(max_workers=16) as pool:
        seen = list(pool.map(look, [one for one in endpoints if not one.is_local]))
    reachable = [one for one in endpoints if one.is_local]
    reachable += [item.endpoint for item in seen if item.state != "unreachable"]
    # Before anybody is asked: without a key to install the answers would be lost.
    keys = ["" if found.is_local else public_key(found.key_file) for found in reachable]
    _trust(seen, confirm)
    entries = [
        _entry(found, access, hosts[found.host])
        for found, access in zip(reachable, _tried(reachable), strict=True)
    ]
    accesses = dict(zip((e.host for e in entries), _tried(entries), strict=True))
    needing = [entry for entry in entries if not accesses[entry.host].ready]
    password = asked.password_of(needing) if needing else None
    _refuse_wrong(password, [e for e in needing if not accesses[e.host].logs_in])
    return {
        found.host: _data(found, entry, accesses[entry.host], password, key)
        for found, entry, key in zip(reachable, entries, keys, strict=True)
    }


def _tried(endpoints: Sequence[Endpoint]) -> list[Access]:
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(try_key, endpoints))


def _entry(found: Endpoint, access: Access, data: Mapping[str, Any]) -> Endpoint:
    """Return where this run logs in: elsewhere, while the account for deploys is still to make."""
    if found.user != ACCOUNT or access.ready:
        return found
    known = data.get(KEY)
    first_user = known.found.settings.ssh.first_user if isinstance(known, Known) else None
    return replace(found, user=first_user)


def _trust(seen: Sequence[Seen], confirm: Callable[[str], str]) -> None:
    """Record new host keys that a person saw, or brought along; ``-y`` agrees to none.

    A password goes to whoever shows the key, so nobody must be able to skip the look at it.
    """
    changed = problems_of(seen)
    if changed:
        raise SettingsError(changed)
    new = [item for item in seen if item.state == "new"]
    if not new:
        return
    for item in new:
        _say(f"{item.endpoint.host} ({item.entry_name}) shows the host key {item.fingerprint}")
    brought = os.environ.get(HOST_KEYS_FILE_VARIABLE)
    unseen = [item for item in new if not (brought and is_named(item, brought))]
    if unseen and not sys.stdin.isatty():
        raise SettingsError.one(
            f"host key of {', '.join(item.endpoint.host for item in unseen)}",
            "is new and nobody is there to agree, which -y does not do",
            f"run in a terminal, or set {HOST_KEYS_FILE_VARIABLE} to a known_hosts file with the "
            "key as the machine itself shows it",
        )
    if unseen:
        many = "it" if len(unseen) == 1 else "them"
        if confirm(f"record {many}? [y/N] ").strip().lower() != "y":
            raise SettingsError.one("host keys", "were not agreed to", "compare them and run again")
    record(new)
    for path in sorted({str(item.path) for item in new}):
        _say(f"recorded in {path}")


def _refuse_wrong(password: str | None, endpoints: Sequence[Endpoint]) -> None:
    if password is None or not endpoints:
        return
    with ThreadPoolExecutor(max_workers=16) as pool:
        taken = list(pool.map(lambda endpoint: takes_password(endpoint, password), endpoints))
    refusing = [e.host for e, takes in zip(endpoints, taken, strict=True) if not takes]
    if not refusing:
        return
    if len(refusing) == len(endpoints):
        raise SettingsError.one(
            "password",
            f"refused by {', '.join(refusing)}",
            "run again with the right one, and check ssh.user",
        )
    _say(f"{', '.join(refusing)} refuses this password: run again for it with --limit")


def _data(
    found: Endpoint, entry: Endpoint, access: Access, password: str | None, key: str
) -> dict[str, Any]:
    hidden = None
    if password and not access.ready:
        hidden = HiddenValue(password)  # type: ignore[no-untyped-call]  # pyinfra
    ready = access.ready and entry == found
    contact = Contact(found, ready, key, hidden)
    data: dict[str, Any] = {CONTACT_KEY: contact}
    if entry != found:
        data["ssh_user"] = entry.user
    if access.ready:
        return data
    # Its operations become root by themselves: pyinfra would put the password into an argv.
    data["_sudo"] = False
    if not access.logs_in:
        # An agent full of keys would use up the attempts the server allows.
        data.update(ssh_password=Password(password), ssh_allow_agent=False, ssh_look_for_keys=False)
    return data


def _say(text: str) -> None:
    sys.stderr.write(f"    {text}\n")
    sys.stderr.flush()
