"""Install and revoke the SSH key, deploy account and sudo rule of a host."""

import re
import shlex
from dataclasses import dataclass

from pyinfra import host
from pyinfra.api import FunctionCommand, HiddenValue, Host, State, StringCommand

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.commands import CommandError, run
from spark_deploy.hosts.facts import HostFact, build_script, parse_sections, read_fact
from spark_deploy.hosts.operations import Commands, HostError, fail, host_command, host_operation
from spark_deploy.plan.types import BootstrapPlan

ACCOUNT = "spark-deploy"
ACCOUNT_HOME = "/var/lib/spark-deploy"
ACCOUNT_KEYS = f"{ACCOUNT_HOME}/.ssh/authorized_keys"
_LOGIN_KEYS = "~/.ssh/authorized_keys"
_PLAIN_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}")


def _key_body(public_key: str) -> str:
    return shlex.quote(" ".join(public_key.split()[:2]))


@dataclass(frozen=True, slots=True)
class Access:
    user: str
    is_root: bool
    key_installed: bool
    passwordless_sudo: bool
    sudo_installed: bool
    sudoers: str | None  # content of our file; None if missing or unreadable without a password
    login_address: str = ""  # address of this login, as the host sees it
    account_key: str = ""  # line of the account's authorized_keys that contains our key
    account_exists: bool = False


class LoginAccess(HostFact[Access]):
    """Access of the login user; must be read without sudo."""

    def command(self, public_key: str, sudoers_path: str) -> str:
        body = _key_body(public_key)
        keys = (
            f"echo '== key'; grep -cF -- {body} {_LOGIN_KEYS} 2>/dev/null",
            f"echo '== account'; grep -F -- {body} {ACCOUNT_KEYS} 2>/dev/null | head -n 1",
        )
        return build_script(
            "echo '== user'; id -un; id -u",
            *(keys if public_key else ()),  # an empty pattern matches every line
            "echo '== sudo'; command -v sudo >/dev/null && echo installed",
            # -k: ignore a password that sudo still remembers.
            "sudo -k -n true 2>/dev/null && echo passwordless",
            f"echo '== sudoers'; sudo -n cat {shlex.quote(sudoers_path)} 2>/dev/null",
            "echo '== from'; echo \"${SSH_CONNECTION%% *}\"",
            f"echo '== account-exists'; getent passwd {ACCOUNT}",
        )

    def process(self, output: list[str]) -> Access:
        sections = parse_sections(output)
        user, uid = [*sections["user"], "", ""][:2]
        return Access(
            user=user,
            is_root=uid == "0",
            key_installed=sections.first("key") not in ("", "0"),
            passwordless_sudo=uid == "0" or "passwordless" in sections["sudo"],
            sudo_installed="installed" in sections["sudo"],
            sudoers=f"{sections.text('sudoers')}\n" if sections["sudoers"] else None,
            login_address=sections.first("from").partition("%")[0],
            account_key=sections.first("account"),
            account_exists=bool(sections["account-exists"]),
        )


def read_state(plan: BootstrapPlan) -> Access:
    return read_fact(
        LoginAccess, _sudo=False, public_key=plan.public_key, sudoers_path=plan.sudoers_path
    )


def authorized_keys_line(plan: BootstrapPlan, access: Access) -> str:
    """Return our line for authorized_keys; if no addresses are set, keep those of our old line."""
    if not plan.allowed_from and access.account_key.startswith('from="'):
        return access.account_key
    addresses = ",".join(plan.allowed_from) or access.login_address
    if not addresses:
        message = "must be set, because the host cannot tell which address this login comes from"
        fix = "set ssh.allowed_from to the addresses of the controllers"
        fail("ssh.allowed_from", message, fix)
    # The tunnels of `spark-deploy connect` need port forwarding; agent and X11 stay off.
    return f'from="{addresses}",restrict,pty,port-forwarding {plan.public_key}'


def sudoers(user: str) -> str:
    """Return the sudo rule, which allows ALL commands because pyinfra runs `sudo sh -c ...`."""
    return f"# Managed by dgx-spark-deploy.\n{user} ALL=(ALL:ALL) NOPASSWD: ALL\n"


@host_operation
def install_key(plan: BootstrapPlan) -> Commands:
    if read_state(plan).key_installed:
        host.noop("our key is installed")
        return
    yield (
        f"umask 077; k={_LOGIN_KEYS}; mkdir -p ~/.ssh && touch $k && "
        # If the last line lacks a newline, our key must not be appended to it.
        '{ [ -z "$(tail -c 1 $k)" ] || echo >> $k; } && '
        f"printf '%s\\n' {shlex.quote(plan.public_key)} >> $k && chmod 700 ~/.ssh && chmod 600 $k"
    )


@host_operation
def create_account(plan: BootstrapPlan, password: HiddenValue | None) -> Commands:
    """Create the deploy account; the login user loses at most a sudo rule that we wrote earlier."""
    access = read_state(plan)
    line, rule = authorized_keys_line(plan, access), sudoers(ACCOUNT)
    if access.account_exists and access.account_key == line and access.sudoers == rule:
        host.noop(f"{ACCOUNT} has our SSH key and sudo rule")
        return
    if not access.sudo_installed:
        fail("sudo", "is not installed", "install sudo as root")
    if access.sudoers is not None and access.sudoers != rule:
        host.log(f"replacing another account's sudo rule in {plan.sudoers_path}")
    account_script = _account_script(plan.public_key, line)
    script = f"{account_script}\n{_sudo_rule_script(plan.sudoers_path, rule)}"
    yield FunctionCommand(_run_as_root, [script, access.is_root, password], {})


def _account_script(public_key: str, line: str) -> str:
    """Return a script that creates the account. Root owns its key file: it cannot add keys."""
    return f"""set -e; umask 022
if ! getent passwd {ACCOUNT} >/dev/null; then
  useradd --system --user-group --no-create-home --home-dir {ACCOUNT_HOME} --shell /bin/sh \\
    --comment 'dgx-spark-deploy deployment account' --password '*' {ACCOUNT}
fi
install -d -o root -g root -m 0755 {ACCOUNT_HOME} {ACCOUNT_HOME}/.ssh
k={ACCOUNT_KEYS}; touch $k
{{ grep -vF -- {_key_body(public_key)} $k || :; printf '%s\\n' {shlex.quote(line)}; }} > $k.new
chmod 0644 $k.new; sync $k.new; mv -fT $k.new $k"""


@host_command
def _run_as_root(
    state: State, host: Host, script: str, is_root: bool, password: HiddenValue | None
) -> bool:
    # -k: sudo always reads the password, which the script would otherwise get as input.
    sudo = "" if is_root else "LC_ALL=C sudo -k -S -p '' "
    try:
        stdin = password.unmask() if password else ""
        run(host, f"{sudo}sh -c {shlex.quote(script)}", timeout_s=60, stdin=stdin)
    except CommandError as failure:
        raise HostError(explain_sudo_error(failure.output)) from failure
    return True


@host_operation
def revoke_access(plan: BootstrapPlan, check: FunctionCommand) -> Commands:
    access = read_state(plan)
    rule_path = shlex.quote(plan.sudoers_path)
    if plan.public_key:
        granted = access.account_exists or access.sudoers is not None or access.key_installed
    else:  # without a key, bootstrap granted only the login user's sudo rule
        granted = access.sudoers == sudoers(access.user)
    if not granted:
        host.noop("bootstrap did not grant any access")
        return
    if not plan.public_key:
        yield f"rm -f {rule_path}"
        yield check
        return
    if access.user != ACCOUNT and access.key_installed:
        # From here on, new logins fail, but the open connection still works.
        yield StringCommand(
            f"set -e; umask 077; k={_LOGIN_KEYS}; "
            f"{{ grep -vF -- {_key_body(plan.public_key)} $k || :; }} > $k.new; mv -f $k.new $k",
            _sudo=False,
        )
    # Remove the rule last, so that an interrupted run can be repeated.
    yield (
        f"cd /; rm -rf {ACCOUNT_HOME}; "
        # --force: this session may belong to the account.
        f"if getent passwd {ACCOUNT} >/dev/null; then userdel --force {ACCOUNT} 2>&1; fi; "
        f"rm -f {rule_path} && ! getent passwd {ACCOUNT}"
    )
    yield check


@host_operation
def allow_sudo(plan: BootstrapPlan, password: HiddenValue | None) -> Commands:
    access = read_state(plan)
    rule = sudoers(access.user)
    if access.is_root:
        host.noop("the login user is root")
        return
    if access.passwordless_sudo and access.sudoers in (None, rule):
        host.noop("sudo needs no password")
        return
    if not access.sudo_installed:
        fail("sudo", "is not installed", "install sudo as root, or log in as root (ssh.user: root)")
    if not _PLAIN_USER.fullmatch(access.user):
        fix = "add the rule by hand with visudo"
        fail("sudo", f"cannot write a rule for user {access.user!r}", fix)
    yield FunctionCommand(_write_sudoers, [plan.sudoers_path, rule, password], {})


def _sudo_rule_script(path: str, content: str) -> str:
    # visudo checks the rule in a file that sudo ignores, because its name contains a dot.
    candidate, target = shlex.quote(f"{path}.new"), shlex.quote(path)
    return f"""set -e; umask 0337
printf '%s' {shlex.quote(content)} > {candidate}
if visudo -cqf {candidate}; then chown root:root {candidate}; mv -fT {candidate} {target}
else rm -f {candidate}; echo 'visudo rejected the rule'; exit 3; fi
visudo -cq || {{ rm -f {target}; echo 'visudo rejected the combination of all rules'; exit 3; }}"""


@host_command
def _write_sudoers(
    state: State, host: Host, path: str, content: str, password: HiddenValue | None
) -> bool:
    script = _sudo_rule_script(path, content)
    if not _run_as_root(state, host, script, is_root=False, password=password):
        return False
    try:
        run(host, "sudo -k; sudo -n true", timeout_s=30)
    except CommandError as failure:
        raise HostError(explain_sudo_error(failure.output)) from failure
    return True


def explain_sudo_error(output: str) -> Problem:
    if "incorrect password" in output or "Sorry, try again" in output:
        return Problem("sudo", "rejected the password", "run again with the correct password")
    if "not in the sudoers" in output or "not allowed" in output:
        fix = "add the user to the sudo group on the host (`usermod -aG sudo USER`)"
        return Problem("sudo", "the login user is not allowed to use sudo", fix)
    tail = "\n".join(output.strip().splitlines()[-5:])
    fix = "check /etc/sudoers.d on the host"
    return Problem("sudo", f"the sudo rule was not activated: {tail}", fix)


@host_operation
def verify_access(ready: bool, check: FunctionCommand) -> Commands:
    if ready:
        host.noop("login with the key works, and sudo needs no password")
        return
    yield check
