"""Let our key in and sudo work without a password; sudo's rules are tried before they count."""

from __future__ import annotations

import re
import shlex

from pyinfra.api.command import FunctionCommand
from pyinfra.api.hiddenvalue import HiddenValue
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from spark_deploy.errors import Problem
from spark_deploy.facts.machine.access import Access, LoginAccess
from spark_deploy.facts.memo import read
from spark_deploy.operations.commands import CommandFailed, run
from spark_deploy.operations.host_errors import Commands, Refused, host_command, host_errors, refuse
from spark_deploy.planning.types import BootstrapPlan

# Names that mean nothing special in sudoers(5).
_PLAIN_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}")


def state_of(plan: BootstrapPlan) -> Access:
    """Look once for all operations, as the login user."""
    return read(
        LoginAccess, _sudo=False, public_key=plan.public_key, sudoers_path=plan.sudoers_path
    )


def sudoers(user: str) -> str:
    """Build the one rule: pyinfra runs `sudo sh -c ...`, so nothing less than ALL would do."""
    return f"# Managed by dgx-spark-deploy.\n{user} ALL=(ALL:ALL) NOPASSWD: ALL\n"


@operation()
@host_errors
def authorized_key(plan: BootstrapPlan) -> Commands:
    """Have our public key among the login user's authorized keys; others stay."""
    if state_of(plan).key_installed:
        host.noop("our key is installed")
        return
    key = shlex.quote(plan.public_key)
    yield (
        "umask 077; mkdir -p ~/.ssh && touch ~/.ssh/authorized_keys && "
        # A last line without its end would swallow our key.
        '{ [ -z "$(tail -c 1 ~/.ssh/authorized_keys)" ] || echo >> ~/.ssh/authorized_keys; } && '
        f"printf '%s\\n' {key} >> ~/.ssh/authorized_keys && "
        "chmod 700 ~/.ssh && chmod 600 ~/.ssh/authorized_keys"
    )


@operation()
@host_errors
def free_sudo(plan: BootstrapPlan, password: HiddenValue | None) -> Commands:
    """Have sudo work without a password for the login user."""
    access = state_of(plan)
    wanted = sudoers(access.user)
    if access.is_root:
        host.noop("the login user is root")
        return
    if access.sudo_free and access.sudoers in (None, wanted):
        host.noop("sudo asks for no password")
        return
    if not access.sudo_there:
        fix = "install sudo as root, or log in as root (ssh.user: root, sudo: false)"
        refuse("sudo", "is not installed", fix)
    if not _PLAIN_USER.fullmatch(access.user):
        fix = "add the rule by hand with visudo"
        refuse("sudo", f"cannot write a rule for user {access.user!r}", fix)
    yield FunctionCommand(_write_sudoers, [plan.sudoers_path, wanted, password], {})


@host_command
def _write_sudoers(
    state: State, host: Host, path: str, content: str, password: HiddenValue | None
) -> bool:
    # A name with a dot is ignored by sudo, so the file counts only once visudo has read it.
    trial, target = shlex.quote(f"{path}.new"), shlex.quote(path)
    script = f"""set -e; umask 0337
printf '%s' {shlex.quote(content)} > {trial}
if visudo -cqf {trial}; then chown root:root {trial}; mv -fT {trial} {target}
else rm -f {trial}; echo 'visudo refuses the rule'; exit 3; fi
visudo -cq || {{ rm -f {target}; echo 'the rules together are refused'; exit 3; }}"""
    # -k: a password typed minutes ago must not leave ours unread on the script's input.
    command = f"LC_ALL=C sudo -k -S -p '' sh -c {shlex.quote(script)}"
    try:
        run(host, command, timeout_s=60, stdin=password.unmask() if password else "")
        run(host, "sudo -k; sudo -n true", timeout_s=30)
    except CommandFailed as failure:
        raise Refused(explained(failure.output)) from failure
    return True


def explained(output: str) -> Problem:
    """Turn what sudo said into a cause and a way out."""
    if "incorrect password" in output or "Sorry, try again" in output:
        return Problem("sudo", "refuses the password", "run again with the right one")
    if "not in the sudoers" in output or "not allowed" in output:
        fix = "add the user to group sudo at the machine (`usermod -aG sudo USER`)"
        return Problem("sudo", "the login user may not use sudo at all", fix)
    tail = "\n".join(output.strip().splitlines()[-5:])
    return Problem("sudo", f"the rule was not activated: {tail}", "see /etc/sudoers.d on the host")


@operation()
@host_errors
def proven_access(ready: bool, check: FunctionCommand) -> Commands:
    """Prove by a fresh login that key and sudo work without a password."""
    if ready:
        host.noop("the key logged in and sudo asked for nothing")
        return
    yield check
