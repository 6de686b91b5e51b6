"""Try login and sudo over new connections, and find the key to install."""

import getpass
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramiko import Agent, AuthenticationException, PKey, SSHException
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host, HostData
from pyinfra.api.state import State
from pyinfra.connectors.ssh_util import load_key_with_certificate
from pyinfra.connectors.sshuserclient.client import SSHClient, get_ssh_config

from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.hosts.access import ACCOUNT
from spark_deploy.inventory.host_keys import CONNECT_TIMEOUT_S, Endpoint, readable_ssh_files
from spark_deploy.inventory.host_names import context_of
from spark_deploy.plan.types import BootstrapPlan

PASSWORD_FILE_VARIABLE = "SPARK_BOOTSTRAP_PASSWORD_FILE"
PASSWORD_ATTEMPTS = 3
_KEY_FILES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
# -k makes sudo ignore a recently typed password.
_TRY_SUDO = '[ "$(id -u)" = 0 ] || sudo -k -n true 2>/dev/null && echo passwordless'


class Password(str):
    """A password, which debug output shows as stars."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class PasswordPrompt:
    """Prompts for the password once per run, and again after ``forget``."""

    def __init__(self, ask: Callable[[str], str] = getpass.getpass):
        self._ask = ask
        self._password: Password | None = None
        self._attempts = 0

    def password_for(self, endpoints: Sequence[Endpoint]) -> str:
        """Return the password; if it is not known yet, prompt for it and list the hosts."""
        if self._password is None:
            self._password = Password(self._read(endpoints))
        return self._password

    def forget(self) -> bool:
        """Forget the password; return whether the user can type another password."""
        self._password, self._attempts = None, self._attempts + 1
        can_type = PASSWORD_FILE_VARIABLE not in os.environ and sys.stdin.isatty()
        return can_type and self._attempts < PASSWORD_ATTEMPTS

    def _read(self, endpoints: Sequence[Endpoint]) -> str:
        hosts = ", ".join(endpoint.host for endpoint in endpoints)
        if file := os.environ.get(PASSWORD_FILE_VARIABLE):
            try:
                password = Path(file).expanduser().read_text().split("\n")[0]
            except OSError as error:
                message = f"{file}: {error.strerror}"
                fix = "set the variable to the path of a readable file"
                raise SettingsError.single(PASSWORD_FILE_VARIABLE, message, fix) from error
        elif sys.stdin.isatty():
            users = sorted({endpoint.user or getpass.getuser() for endpoint in endpoints})
            prompt = f"password of {', '.join(users)} on {hosts} (for login and sudo): "
            password = self._ask(prompt)
        else:
            message = f"is needed for {hosts}, but there is no terminal to enter it in"
            fix = f"run in a terminal, or set {PASSWORD_FILE_VARIABLE} to a file with the password"
            raise SettingsError.single("password", message, fix)
        if not password:
            raise SettingsError.single("password", "is empty", "run again and enter the password")
        return password


@dataclass(frozen=True, slots=True)
class LoginResult:
    """Whether login with the controller's key works, and sudo needs no password."""

    logs_in: bool
    passwordless_sudo: bool
    detail: str = ""

    @property
    def ready(self) -> bool:
        return self.logs_in and self.passwordless_sudo


def build_endpoint(host: str, data: Mapping[str, Any] | HostData) -> Endpoint:
    port = data.get("ssh_port")
    return Endpoint(
        host=host,
        hostname=data.get("ssh_hostname") or host,
        user=data.get("ssh_user"),
        port=int(port) if port else None,
        known_hosts=data.get("ssh_known_hosts_file"),
        config_file=data.get("ssh_config_file"),
        key_file=data.get("ssh_key"),
    )


def try_key(endpoint: Endpoint) -> LoginResult:
    """Try login with the key and sudo without a password."""
    if endpoint.is_local:
        command = ["sh", "-c", _TRY_SUDO]
        result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        return LoginResult(True, result.stdout.strip() == b"passwordless")
    client = SSHClient()
    arguments: dict[str, Any] = {"allow_agent": True}
    if endpoint.key_file:
        key = _private_key(endpoint.key_file)
        arguments = {"pkey": key, "allow_agent": False, "look_for_keys": False}
    try:
        _connect(client, endpoint, arguments)
        _, out, _ = client.exec_command(_TRY_SUDO, timeout=CONNECT_TIMEOUT_S)
        return LoginResult(True, out.read().decode().strip() == "passwordless")
    except (SSHException, OSError, EOFError) as error:
        return LoginResult(False, False, str(error))
    finally:
        client.close()


def accepts_password(endpoint: Endpoint, password: str) -> bool:
    """Return whether the host accepts the password; ``True`` if it does not respond."""
    client = SSHClient()
    arguments = {"password": Password(password), "allow_agent": False, "look_for_keys": False}
    try:
        _connect(client, endpoint, arguments)
    except AuthenticationException:
        return False
    except (SSHException, OSError, EOFError):
        return True
    finally:
        client.close()
    return True


def _connect(client: SSHClient, endpoint: Endpoint, arguments: Mapping[str, Any]) -> None:
    optional = {"username": endpoint.user, "port": endpoint.port}
    with readable_ssh_files():
        client.connect(  # type: ignore[no-untyped-call]  # pyinfra
            endpoint.hostname,
            _pyinfra_ssh_config_file=endpoint.config_file,
            _pyinfra_ssh_known_hosts_file=endpoint.known_hosts,
            _pyinfra_ssh_strict_host_key_checking="yes",
            timeout=CONNECT_TIMEOUT_S,
            **{name: value for name, value in optional.items() if value},
            **arguments,
        )


def _private_key(key_file: str) -> Any:
    try:
        return load_key_with_certificate(key_file, allow_prompt=False)
    except PyinfraError as error:
        path, problem = Path(key_file).expanduser(), str(error)
        fix = f"create it with `ssh-keygen -t ed25519 -f {path}`"
        if "encrypted" in problem:
            problem, fix = "has a passphrase", f"run `ssh-add {path}`, then remove ssh.key_file"
        elif path.exists():
            fix = "set it to a private key in a format that ssh-keygen writes"
        raise SettingsError.single("ssh.key_file", f"{path}: {problem}", fix) from error


def find_public_key(endpoint: Endpoint) -> str:
    """Return the public key to install.

    Look in ``ssh.key_file``, ``IdentityFile`` of ~/.ssh/config, ~/.ssh and the agent in turn.
    """
    files = [endpoint.key_file] if endpoint.key_file else [*_identities(endpoint), *_KEY_FILES]
    for file in (Path(name).expanduser() for name in files):
        public = file if file.suffix == ".pub" else Path(f"{file}.pub")
        if public.exists():
            return _read_public_key(public)
    if endpoint.key_file:
        return _public_key_line(_private_key(endpoint.key_file))
    if keys := Agent().get_keys():
        return _public_key_line(keys[0])
    message = "is not set, and neither ~/.ssh nor an agent has a key"
    raise SettingsError.single("ssh.key_file", message, "run `ssh-keygen -t ed25519`")


def _identities(endpoint: Endpoint) -> Sequence[str]:
    with readable_ssh_files():
        config = get_ssh_config(endpoint.config_file)
        files = config.lookup(endpoint.hostname).get("identityfile", ()) if config else ()
    if not files:
        return ()
    return files if isinstance(files, list) else [files]


def _public_key_line(key: PKey) -> str:
    return f"{key.get_name()} {key.get_base64()}"


def _read_public_key(path: Path) -> str:
    lines = path.read_text().strip().splitlines()
    if len(lines) != 1 or len(lines[0].split()) < 2:
        fix = "set ssh.key_file to a valid key"
        raise SettingsError.single(str(path), "invalid public key", fix)
    return lines[0]


def endpoint_of(host: Host) -> Endpoint:
    return build_endpoint(host.name, host.data)


def bootstrap_plan(host: Host) -> BootstrapPlan:
    if endpoint_of(host).is_local:
        return BootstrapPlan(public_key="")
    ssh = context_of(host).loaded.settings.ssh
    return BootstrapPlan(
        public_key=find_public_key(endpoint_of(host)),
        account=ACCOUNT if ssh.user == ACCOUNT else None,
        allowed_from=ssh.allowed_from,
    )


def check_access(state: State, host: Host, endpoint: Endpoint) -> bool:
    """Return whether login with the key works and sudo needs no password; log the result."""
    result = try_key(endpoint)
    if result.ready:
        prefix = "" if endpoint.is_local else "login with the key works, and "
        host.log(f"{prefix}sudo needs no password")
        return True
    if endpoint.is_local:
        fix = "remove the rule in /etc/sudoers or /etc/sudoers.d that overrides our rule"
        return _log_problem(host, "sudo still asks for a password", fix)
    message = "login with the key works, but sudo still asks for a password"
    if not result.logs_in:
        message = f"login with the key still fails ({result.detail})"
    fix = "check `journalctl -u ssh` and /etc/sudoers.d on the host"
    if endpoint.user == ACCOUNT:
        fix += f", and check that sshd's AllowUsers and AllowGroups include {ACCOUNT}"
    return _log_problem(host, message, fix)


def check_login(state: State, host: Host, endpoint: Endpoint) -> bool:
    result = try_key(endpoint)
    if result.ready:
        host.log("a new login works")
        return True
    fix = (
        "wait until the host restores its old network settings, then check the cable and `ip route`"
    )
    return _log_problem(host, f"cannot log back in to {endpoint.hostname} ({result.detail})", fix)


def check_no_access(state: State, host: Host, endpoint: Endpoint) -> bool:
    if not try_key(endpoint).ready:
        local, remote = "sudo asks for a password again", "the key no longer grants access"
        host.log(local if endpoint.is_local else remote)
        return True
    if endpoint.is_local:
        fix = "remove the other rule in /etc/sudoers or /etc/sudoers.d"
        return _log_problem(host, "sudo still works without a password", fix)
    fix = "remove other rules in /etc/sudoers.d, and the key from sshd's AuthorizedKeysFile"
    return _log_problem(host, "login with the key still works, and sudo needs no password", fix)


def _log_problem(host: Host, message: str, fix: str) -> bool:
    for line in str(Problem(host.name, message, fix)).splitlines():
        host.log_styled(line, fg="red")
    return False
