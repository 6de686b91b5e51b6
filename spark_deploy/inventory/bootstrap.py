"""First contact with hosts: record host keys, and read a password if needed.

This happens while the inventory is loaded, before pyinfra connects. The password stays in memory
and is sent through SSH or standard input, never in a command line or log. This machine (``@local``)
needs only the sudo rule.
"""

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
    LoginResult,
    Password,
    PasswordPrompt,
    accepts_password,
    build_endpoint,
    find_public_key,
    try_key,
)

HOST_KEYS_FILE_VARIABLE = "SPARK_BOOTSTRAP_HOST_KEYS_FILE"
CONTACT_KEY = "spark_deploy_contact"


@dataclass(frozen=True, slots=True)
class Contact:
    """Login, key and password with which bootstrap sets up a host."""

    endpoint: Endpoint  # where later deploys log in
    ready: bool  # whether deploys can already log in and become root
    public_key: str  # the key to install; "" for this machine
    password: HiddenValue | None

    def to_json(self) -> str:
        """Hide the password in the output of pyinfra's ``debug-inventory``."""
        return "***"


def contact_of(host: Host) -> Contact:
    contact = host.data.get(CONTACT_KEY)
    if not isinstance(contact, Contact):
        raise SettingsError.single(host.name, *NOT_LISTED)
    return contact


def prepare(
    hosts: Mapping[str, Mapping[str, Any]],
    *,
    prompt: PasswordPrompt,
    confirm: Callable[[str], str] = input,
) -> dict[str, dict[str, Any]]:
    """Record host keys, and read the password if a host needs it.

    Returns pyinfra's data for each reachable host, with a ``Contact``. Raises SettingsError if the
    controller has no key, a host key changed or is not confirmed, or a prompt needs a terminal.
    """
    endpoints = [build_endpoint(host, data) for host, data in hosts.items()]
    local = [target for target in endpoints if target.is_local]
    remote = [target for target in endpoints if not target.is_local]
    with ThreadPoolExecutor(max_workers=16) as pool:
        host_keys = list(pool.map(query_host_key, remote))
        targets = [*local, *(key.endpoint for key in host_keys if key.state != "unreachable")]
        # Check before any prompt that there is a key to install.
        public_keys = ["" if target.is_local else find_public_key(target) for target in targets]
        _confirm_host_keys(host_keys, confirm)
        logins = [
            _first_login(target, result, hosts[target.host])
            for target, result in zip(targets, pool.map(try_key, targets), strict=True)
        ]
        results = list(pool.map(try_key, logins))
        needs_password = {
            login: result for login, result in zip(logins, results, strict=True) if not result.ready
        }
        passwords = _read_passwords(needs_password, prompt, pool)
    data = {}
    for target, login, result, key in zip(targets, logins, results, public_keys, strict=True):
        ready = result.ready and login == target
        contact = Contact(target, ready, public_key=key, password=None)
        data[target.host] = _contact_data(contact, login, result, passwords.get(login.host))
    return data


def _first_login(target: Endpoint, result: LoginResult, data: Mapping[str, Any]) -> Endpoint:
    """Return the login for bootstrap: as ``ssh.first_user`` until the account exists."""
    if target.user != ACCOUNT or result.ready:
        return target
    context = data.get(CONTEXT_KEY)
    if not isinstance(context, HostContext):
        return replace(target, user=None)
    return replace(target, user=context.loaded.settings.ssh.first_user)


def _confirm_host_keys(keys: Sequence[HostKey], confirm: Callable[[str], str]) -> None:
    """Record new host keys that the user confirms or a file lists; ``-y`` confirms none.

    The owner of the key receives the password, so this check is never skipped.
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
        raise SettingsError.single(
            f"host key of {', '.join(key.endpoint.host for key in unknown)}",
            "is not in known_hosts, and -y does not confirm it",
            "run in a terminal, or copy the host key from the machine into a known_hosts file "
            f"and set {HOST_KEYS_FILE_VARIABLE} to its path",
        )
    question = f"record {'it' if len(unknown) == 1 else 'them'}? [y/N] "
    if unknown and confirm(question).strip().lower() != "y":
        fix = "compare the fingerprints, then retry"
        raise SettingsError.single("host keys", "were not confirmed", fix)
    record_host_keys(new)
    for path in sorted({str(key.path) for key in new}):
        _log(f"recorded in {path}")


def _read_passwords(
    logins: Mapping[Endpoint, LoginResult], prompt: PasswordPrompt, pool: ThreadPoolExecutor
) -> dict[str, str]:
    """Return the password of each host; prompt again for hosts that reject it.

    Raises SettingsError if every host rejects the last password.
    """
    passwords: dict[str, str] = {}
    # If login with the key works, only sudo needs the password, and bootstrap tests sudo itself.
    checkable = {login for login, result in logins.items() if not result.logs_in}
    pending = list(logins)
    while pending:
        password = prompt.password_for(pending)
        passwords |= dict.fromkeys((login.host for login in pending), password)
        checked = [login for login in pending if login in checkable]
        accepted = pool.map(accepts_password, checked, repeat(password))
        pending = [login for login, ok in zip(checked, accepted, strict=True) if not ok]
        if not pending:
            break
        names = ", ".join(login.host for login in pending)
        if prompt.forget():
            _log(f"{names}: password rejected; try again")
            continue
        if set(pending) == checkable:
            fix = "check ssh.user, then run again with the correct password"
            raise SettingsError.single("password", f"rejected by {names}", fix)
        _log(f"{names}: password rejected; run the command again with --limit to retry these hosts")
        break
    return passwords


def _contact_data(
    contact: Contact, login: Endpoint, result: LoginResult, password: str | None
) -> dict[str, Any]:
    if password and not result.ready:
        hidden = HiddenValue(password)  # type: ignore[no-untyped-call]  # pyinfra
        contact = replace(contact, password=hidden)
    data: dict[str, Any] = {CONTACT_KEY: contact}
    if login != contact.endpoint:
        data["ssh_user"] = login.user
    if result.ready:
        return data
    # Bootstrap calls sudo itself, because pyinfra would put the password into argv.
    data["_sudo"] = False
    if not result.logs_in:
        # sshd would count an agent's keys as login attempts.
        data.update(ssh_password=Password(password), ssh_allow_agent=False, ssh_look_for_keys=False)
    return data


def _log(text: str) -> None:
    sys.stderr.write(f"    {text}\n")
    sys.stderr.flush()
