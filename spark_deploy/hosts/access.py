"""SSH key, deploy account and sudo rule of a host."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.hiddenvalue import HiddenValue
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.commands import CommandFailed, run
from spark_deploy.hosts.facts import HostFact, build_script, parse_sections, read_fact
from spark_deploy.hosts.host_errors import Commands, Refused, host_command, host_errors, refuse
from spark_deploy.plan.machine import BootstrapPlan

ACCOUNT = "spark-deploy"  # made by bootstrap, for deploys alone


ACCOUNT_HOME = "/var/lib/spark-deploy"


ACCOUNT_KEYS = f"{ACCOUNT_HOME}/.ssh/authorized_keys"


@dataclass(frozen=True, slots=True)
class Access:
    """Key and sudo of the login user."""

    user: str
    is_root: bool
    key_installed: bool
    sudo_free: bool  # sudo asks for no password
    sudo_there: bool
    sudoers: str | None  # our file; None: absent, or not readable without a password
    came_from: str = ""  # address of this login, as the host sees it
    account_key: str = ""  # line of authorized_keys with our key, of the account for deploys
    account_there: bool = False


class LoginAccess(HostFact[Access]):
    """Look at key and sudo of the login user, as that user, and at the account for deploys."""

    def command(self, public_key: str, sudoers_path: str) -> str:
        # Type and body of the key; the comment behind them is anybody's.
        body = shlex.quote(" ".join(public_key.split()[:2]))
        keys = (
            f"echo '== key'; grep -cF -- {body} ~/.ssh/authorized_keys 2>/dev/null",
            f"echo '== account'; grep -F -- {body} {ACCOUNT_KEYS} 2>/dev/null | head -n 1",
        )
        return build_script(
            "echo '== user'; id -un; id -u",
            *(keys if public_key else ()),  # grep finds an empty text in every line
            "echo '== sudo'; command -v sudo >/dev/null && echo there",
            # -k: at this machine a password typed minutes ago would count for a while.
            "sudo -k -n true 2>/dev/null && echo free",
            f"echo '== sudoers'; sudo -n cat {shlex.quote(sudoers_path)} 2>/dev/null",
            "echo '== from'; echo \"${SSH_CONNECTION%% *}\"",
            f"echo '== account-there'; getent passwd {ACCOUNT}",
        )

    def process(self, output: list[str]) -> Access:
        found = parse_sections(output)
        user, uid = [*found["user"], "", ""][:2]
        sudo = found["sudo"]
        sudoers = found["sudoers"]
        return Access(
            user=user,
            is_root=uid == "0",
            key_installed=found.first("key") not in ("", "0"),
            sudo_free=uid == "0" or "free" in sudo,
            sudo_there="there" in sudo,
            sudoers="\n".join(sudoers) + "\n" if sudoers else None,
            came_from=found.first("from").partition("%")[0],
            account_key=found.first("account"),
            account_there=bool(found["account-there"]),
        )


# Names that mean nothing special in sudoers(5).
_PLAIN_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}")


def read_state(plan: BootstrapPlan) -> Access:
    """Look once for all operations, as the login user."""
    return read_fact(
        LoginAccess, _sudo=False, public_key=plan.public_key, sudoers_path=plan.sudoers_path
    )


def account_line(plan: BootstrapPlan, access: Access) -> str:
    """Return the line of authorized_keys for the deploys' account; one that suits is kept."""
    allowed = plan.allowed_from or tuple(filter(None, (access.came_from,)))
    if not plan.allowed_from and access.account_key.startswith('from="'):
        return access.account_key
    if not allowed:
        fix = "set ssh.allowed_from to the addresses that deploys come from"
        refuse("ssh.allowed_from", "the host does not say where this login comes from", fix)
    # Tunnels of `spark-deploy connect` need forwarding; nothing needs an agent or X11.
    return f'from="{",".join(allowed)}",restrict,pty,port-forwarding {plan.public_key}'


def sudoers(user: str) -> str:
    """Build the one rule: pyinfra runs `sudo sh -c ...`, so nothing less than ALL would do."""
    return f"# Managed by dgx-spark-deploy.\n{user} ALL=(ALL:ALL) NOPASSWD: ALL\n"


@operation()
@host_errors
def install_key(plan: BootstrapPlan) -> Commands:
    """Have our public key among the login user's authorized keys; others stay."""
    if read_state(plan).key_installed:
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
def create_account(plan: BootstrapPlan, password: HiddenValue | None) -> Commands:
    """Have an account for deploys alone: our key from named addresses, sudo without a password.

    The login user's own rights stay as they were before any bootstrap: a rule that an earlier one
    made for that user is replaced.
    """
    access = read_state(plan)
    line, wanted = account_line(plan, access), sudoers(ACCOUNT)
    if access.account_there and access.account_key == line and access.sudoers == wanted:
        host.noop(f"{ACCOUNT} is there, with our key and its rule")
        return
    if not access.sudo_there:
        refuse("sudo", "is not installed", "install sudo as root")
    if access.sudoers is not None and access.sudoers != wanted:
        host.log(f"{plan.sudoers_path} let another account be root without a password: no longer")
    script = f"{_account_script(plan.public_key, line)}\n{_rule_script(plan.sudoers_path, wanted)}"
    yield FunctionCommand(_as_root, [script, access.is_root, password], {})


def _account_script(public_key: str, line: str) -> str:
    """Return the script that makes the account; nothing of it belongs to the account itself."""
    body = shlex.quote(" ".join(public_key.split()[:2]))
    return f"""set -e; umask 022
if ! getent passwd {ACCOUNT} >/dev/null; then
  useradd --system --user-group --no-create-home --home-dir {ACCOUNT_HOME} --shell /bin/sh \\
    --comment 'deploys of dgx-spark-deploy' --password '*' {ACCOUNT}
fi
install -d -o root -g root -m 0755 {ACCOUNT_HOME} {ACCOUNT_HOME}/.ssh
k={ACCOUNT_KEYS}; touch $k
{{ grep -vF -- {body} $k || :; printf '%s\\n' {shlex.quote(line)}; }} > $k.new
chmod 0644 $k.new; sync $k.new; mv -fT $k.new $k"""


@host_command
def _as_root(
    state: State, host: Host, script: str, is_root: bool, password: HiddenValue | None
) -> bool:
    # -k: a password typed minutes ago must not leave ours unread on the script's input.
    sudo = "" if is_root else "LC_ALL=C sudo -k -S -p '' "
    try:
        given = password.unmask() if password else ""
        run(host, f"{sudo}sh -c {shlex.quote(script)}", timeout_s=60, stdin=given)
    except CommandFailed as failure:
        raise Refused(explain_sudo_error(failure.output)) from failure
    return True


@operation()
@host_errors
def revoke_access(plan: BootstrapPlan, check: FunctionCommand) -> Commands:
    """Have nothing left of what bootstrap granted: account, rule, and our key at the login user."""
    access = read_state(plan)
    if not plan.public_key:  # this machine; an account for deploys belongs to another controller
        if access.sudoers != sudoers(access.user):
            host.noop("nothing of a bootstrap is here")
            return
        yield f"rm -f {shlex.quote(plan.sudoers_path)}"
        yield check
        return
    if not access.account_there and access.sudoers is None and not access.key_installed:
        host.noop("nothing of a bootstrap is here")
        return
    body = shlex.quote(" ".join(plan.public_key.split()[:2]))
    keys = "~/.ssh/authorized_keys"
    if access.user != ACCOUNT and access.key_installed:
        # The last login: what follows goes through the connection that is there.
        yield StringCommand(
            f"set -e; umask 077; {{ grep -vF -- {body} {keys} || :; }} > {keys}.new; "
            f"mv -f {keys}.new {keys}",
            _sudo=False,
        )
    # The rule goes last: until then a run that was cut off can be repeated.
    yield (
        f"cd /; rm -rf {ACCOUNT_HOME}; "
        # With this session in it an account is not removed without force.
        f"if getent passwd {ACCOUNT} >/dev/null; then userdel --force {ACCOUNT} 2>&1; fi; "
        f"rm -f {shlex.quote(plan.sudoers_path)} && ! getent passwd {ACCOUNT}"
    )
    yield check


@operation()
@host_errors
def allow_sudo(plan: BootstrapPlan, password: HiddenValue | None) -> Commands:
    """Have sudo work without a password for the login user."""
    access = read_state(plan)
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


def _rule_script(path: str, content: str) -> str:
    """Return the script that has sudo's rule there, tried before it counts."""
    # A name with a dot is ignored by sudo, so the file counts only once visudo has read it.
    trial, target = shlex.quote(f"{path}.new"), shlex.quote(path)
    return f"""set -e; umask 0337
printf '%s' {shlex.quote(content)} > {trial}
if visudo -cqf {trial}; then chown root:root {trial}; mv -fT {trial} {target}
else rm -f {trial}; echo 'visudo refuses the rule'; exit 3; fi
visudo -cq || {{ rm -f {target}; echo 'the rules together are refused'; exit 3; }}"""


@host_command
def _write_sudoers(
    state: State, host: Host, path: str, content: str, password: HiddenValue | None
) -> bool:
    script = _rule_script(path, content)
    # -k: a password typed minutes ago must not leave ours unread on the script's input.
    command = f"LC_ALL=C sudo -k -S -p '' sh -c {shlex.quote(script)}"
    try:
        run(host, command, timeout_s=60, stdin=password.unmask() if password else "")
        run(host, "sudo -k; sudo -n true", timeout_s=30)
    except CommandFailed as failure:
        raise Refused(explain_sudo_error(failure.output)) from failure
    return True


def explain_sudo_error(output: str) -> Problem:
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
def verify_access(ready: bool, check: FunctionCommand) -> Commands:
    """Prove by a fresh login that key and sudo work without a password."""
    if ready:
        host.noop("the key logged in and sudo asked for nothing")
        return
    yield check
