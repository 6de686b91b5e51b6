"""First contact: record host keys, and find hosts that need a password.

Runs while the inventory is loaded, before pyinfra connects. The password is typed once, stays in
memory, and is sent through SSH or standard input, never in a command line or log. This machine
(``@local``) needs only the sudo rule.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from pyinfra.api.hiddenvalue import HiddenValue
from pyinfra.api.host import Host

from spark_deploy.config.errors import SettingsError
from spark_deploy.hosts.access import ACCOUNT
from spark_deploy.inventory.host_keys import (
    Endpoint,
    HostKey,
    changed_key_problems,
    is_listed,
    query_host_key,
    record_host_keys,
)
from spark_deploy.inventory.host_names import CONTEXT_KEY, NOT_LISTED, HostContext
from spark_deploy.inventory.login import (
    Access,
    Password,
    PasswordPrompt,
    accepts_password,
    endpoint,
    public_key,
    try_key,
)

HOST_KEYS_FILE_VARIABLE = "SPARK_BOOTSTRAP_HOST_KEYS_FILE"
CONTACT_KEY = "spark_deploy_contact"  # in pyinfra's data of a host


@dataclass(frozen=True, slots=True)
class Contact:
    """How to bootstrap a host."""

    endpoint: Endpoint  # of later deploys
    ready: bool  # deploys can log in and become root
    public_key: str  # "" for this machine
    password: HiddenValue | None

    def to_json(self) -> str:
        """Hide the password from ``debug-inventory``."""
        return "***"


def contact_of(host: Host) -> Contact:
    contact = host.data.get(CONTACT_KEY)
    if not isinstance(contact, Contact):
        raise SettingsError.one(host.name, *NOT_LISTED)
    return contact


def prepare(
    hosts: Mapping[str, Mapping[str, Any]],
    *,
    prompt: PasswordPrompt,
    confirm: Callable[[str], str] = input,
) -> dict[str, dict[str, Any]]:
    """Record host keys, and read the password if a host needs it.

    Returns pyinfra's data of each reachable host, with a ``Contact``. Raises SettingsError if the
    controller has no key, a host key changed or is not confirmed, or a terminal is missing.
    """
    endpoints = [endpoint(host, data) for host, data in hosts.items()]
    with ThreadPoolExecutor(max_workers=16) as pool:
        keys = list(pool.map(query_host_key, [each for each in endpoints if not each.is_local]))
        reachable = [each for each in endpoints if each.is_local]
        reachable += [key.endpoint for key in keys if key.state != "unreachable"]
        # Before any prompt: without a key to install, answers would be lost.
        public_keys = ["" if e.is_local else public_key(e) for e in reachable]
        _confirm_host_keys(keys, confirm)
        logins = [
            _bootstrap_login(target, access, hosts[target.host])
            for target, access in zip(reachable, pool.map(try_key, reachable), strict=True)
        ]
        accesses = list(pool.map(try_key, logins))
        pairs = list(zip(logins, accesses, strict=True))
        passwords = _ask_passwords([pair for pair in pairs if not pair[1].ready], prompt, pool)
    data = {}
    for target, login, access, key in zip(reachable, logins, accesses, public_keys, strict=True):
        contact = Contact(target, access.ready and login == target, key, None)
        data[target.host] = _contact_data(contact, login, access, passwords.get(login.host))
    return data


def _bootstrap_login(target: Endpoint, access: Access, data: Mapping[str, Any]) -> Endpoint:
    """Return where this run logs in: as another user until the deploy account exists."""
    if target.user != ACCOUNT or access.ready:
        return target
    context = data.get(CONTEXT_KEY)
    if not isinstance(context, HostContext):
        return replace(target, user=None)
    return replace(target, user=context.loaded.settings.ssh.first_user)


def _confirm_host_keys(keys: Sequence[HostKey], confirm: Callable[[str], str]) -> None:
    """Record new host keys, confirmed by a person or listed in a file; ``-y`` confirms none.

    The password goes to the owner of the key, so this cannot be skipped.
    """
    if changed := changed_key_problems(keys):
        raise SettingsError(changed)
    new = [key for key in keys if key.state == "new"]
    if not new:
        return
    for key in new:
        _log(f"{key.endpoint.host} ({key.entry_name}) presents the host key {key.fingerprint}")
    file = os.environ.get(HOST_KEYS_FILE_VARIABLE)
    unknown = [key for key in new if not (file and is_listed(key, file))]
    if unknown and not sys.stdin.isatty():
        raise SettingsError.one(
            f"host key of {', '.join(key.endpoint.host for key in unknown)}",
            "is new, and -y does not confirm it",
            f"run in a terminal, or set {HOST_KEYS_FILE_VARIABLE} to a known_hosts file with the "
            "key as read on the machine itself",
        )
    question = f"record {'it' if len(unknown) == 1 else 'them'}? [y/N] "
    if unknown and confirm(question).strip().lower() != "y":
        raise SettingsError.one(
            "host keys", "were not confirmed", "compare the fingerprints, then run again"
        )
    record_host_keys(new)
    for path in sorted({str(key.path) for key in new}):
        _log(f"recorded in {path}")


def _ask_passwords(
    waiting: Sequence[tuple[Endpoint, Access]], prompt: PasswordPrompt, pool: ThreadPoolExecutor
) -> dict[str, str]:
    """Return the password of each host; ask again for hosts that reject it.

    Stop if every host rejects the password; otherwise print the hosts that do.
    """
    passwords: dict[str, str] = {}
    unchecked = {login for login, access in waiting if not access.logs_in}
    refusing = [login for login, _ in waiting]
    while refusing:
        password = prompt.password_for(refusing)
        passwords |= dict.fromkeys((login.host for login in refusing), password)
        checked = [login for login in refusing if login in unchecked]
        accepted = pool.map(accepts_password, checked, repeat(password))
        refusing = [e for e, accepts in zip(checked, accepted, strict=True) if not accepts]
        names = ", ".join(login.host for login in refusing)
        if refusing and prompt.forget():
            _log(f"{names}: password rejected; try again")
        elif {*refusing} == unchecked and refusing:
            fix = "run again with the right password, and check ssh.user"
            raise SettingsError.one("password", f"rejected by {names}", fix)
        elif refusing:
            _log(f"{names}: password rejected; to retry, run again with --limit")
            break
    return passwords


def _contact_data(
    contact: Contact, login: Endpoint, access: Access, password: str | None
) -> dict[str, Any]:
    if password and not access.ready:
        hidden = HiddenValue(password)  # type: ignore[no-untyped-call]  # pyinfra
        contact = replace(contact, password=hidden)
    data: dict[str, Any] = {CONTACT_KEY: contact}
    if login != contact.endpoint:
        data["ssh_user"] = login.user
    if access.ready:
        return data
    # Bootstrap calls sudo itself: pyinfra would put the password into an argv.
    data["_sudo"] = False
    if not access.logs_in:
        # An agent's keys would use up the server's allowed attempts.
        data.update(ssh_password=Password(password), ssh_allow_agent=False, ssh_look_for_keys=False)
    return data


def _log(text: str) -> None:
    sys.stderr.write(f"    {text}\n")
    sys.stderr.flush()
