"""What bootstrap grants on a host; a fresh login proves that it is granted, or taken back."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paramiko import AuthenticationException, SSHException
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host, HostData
from pyinfra.api.state import State
from pyinfra.connectors.ssh_util import load_key_with_certificate
from pyinfra.connectors.sshuserclient.client import SSHClient

from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.hosts.access import ACCOUNT
from spark_deploy.inventory.host_keys import CONNECT_TIMEOUT_S, Endpoint, readable_ssh_files
from spark_deploy.inventory.host_names import known_of
from spark_deploy.plan.types import BootstrapPlan

PASSWORD_FILE_VARIABLE = "SPARK_BOOTSTRAP_PASSWORD_FILE"


def refuse_prompt(prompt: str) -> NoReturn:
    """Fail instead of pyinfra's prompt for a sudo password, which pyinfra puts into an argv."""
    raise SettingsError.one("sudo", "asks for a password", "run deploys/bootstrap.py once")


class Password(str):
    """Text that pyinfra's and paramiko's debug output shows as stars."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class Asked:
    """The one password of a run: asked when a host first needs it, then remembered."""

    def __init__(self, ask: Callable[[str], str] = getpass.getpass):
        self._ask = ask
        self._password: Password | None = None

    def password_of(self, endpoints: Sequence[Endpoint]) -> str:
        """Return the password; the question names the first hosts that need it."""
        if self._password is None:
            self._password = Password(_password_of(endpoints, self._ask))
        return self._password


def _password_of(endpoints: Sequence[Endpoint], ask: Callable[[str], str]) -> str:
    file = os.environ.get(PASSWORD_FILE_VARIABLE)
    if file:
        try:
            text = Path(file).expanduser().read_text().split("\n")[0]
        except OSError as error:
            raise SettingsError.one(
                PASSWORD_FILE_VARIABLE, f"{file}: {error.strerror}", "name a readable file"
            ) from error
    elif sys.stdin.isatty():
        users = ", ".join(sorted({endpoint.user or getpass.getuser() for endpoint in endpoints}))
        names = ", ".join(endpoint.host for endpoint in endpoints)
        text = ask(f"password of {users} on {names} (for login and sudo, asked once): ")
    else:
        raise SettingsError.one(
            "password",
            f"{', '.join(e.host for e in endpoints)} asks for one and nobody is there to give it",
            f"run in a terminal, or set {PASSWORD_FILE_VARIABLE} to a file that holds it",
        )
    if not text:
        raise SettingsError.one("password", "is empty", "run again and type it")
    return text


_USUAL_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
# -k: a password typed in this terminal minutes ago must not pass for a rule.
_TRY_SUDO = '[ "$(id -u)" = 0 ] || sudo -k -n true 2>/dev/null && echo free'


@dataclass(frozen=True, slots=True)
class Access:
    """How far our key gets on a host."""

    logs_in: bool
    sudo_free: bool
    detail: str = ""

    @property
    def ready(self) -> bool:
        """Whether nothing is left to do."""
        return self.logs_in and self.sudo_free


def endpoint(host: str, data: Mapping[str, Any] | HostData) -> Endpoint:
    """Return where deploys log in, by pyinfra's data of a host."""
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


def try_key(endpoint: Endpoint) -> Access:
    """Log in with the key alone (this machine: no login) and try sudo without a password."""
    if endpoint.is_local:
        return Access(True, _sudo_is_free_here())
    client = SSHClient()
    arguments: dict[str, Any] = {"allow_agent": True}
    if endpoint.key_file:
        key = _private_key(endpoint.key_file)
        arguments = {"pkey": key, "allow_agent": False, "look_for_keys": False}
    try:
        _connect(client, endpoint, arguments)
        _, out, _ = client.exec_command(_TRY_SUDO, timeout=CONNECT_TIMEOUT_S)
        return Access(True, out.read().decode().strip() == "free")
    except (SSHException, OSError, EOFError) as error:
        # Without key and agent too: paramiko's "No authentication methods available".
        return Access(False, False, str(error))
    finally:
        client.close()


def _sudo_is_free_here() -> bool:
    command = ["sh", "-c", _TRY_SUDO]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return done.stdout.strip() == b"free"


def takes_password(endpoint: Endpoint, password: str) -> bool:
    """Whether the host does not refuse the password; other trouble is left to the real login."""
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
    named = {"username": endpoint.user, "port": endpoint.port}
    with readable_ssh_files():
        client.connect(  # type: ignore[no-untyped-call]  # pyinfra
            endpoint.hostname,
            _pyinfra_ssh_config_file=endpoint.config_file,
            _pyinfra_ssh_known_hosts_file=endpoint.known_hosts,
            _pyinfra_ssh_strict_host_key_checking="yes",
            timeout=CONNECT_TIMEOUT_S,
            **{name: value for name, value in named.items() if value},
            **arguments,
        )


def _private_key(key_file: str) -> Any:
    try:
        return load_key_with_certificate(key_file, allow_prompt=False)
    except PyinfraError as error:
        path = Path(key_file).expanduser()
        fix = f"make one with `ssh-keygen -t ed25519 -f {path}`"
        if path.exists():
            fix = "name the private key, as ssh-keygen wrote it"
        raise SettingsError.one("ssh.key_file", f"{path}: {error}", fix) from error


def public_key(key_file: str | None, home: Path | None = None) -> str:
    """Return the public key to install: of ``ssh.key_file``, else of the usual names in ~/.ssh."""
    if key_file:
        beside = Path(f"{Path(key_file).expanduser()}.pub")
        if beside.exists():
            return _first_line(beside)
        key = _private_key(key_file)
        return f"{key.get_name()} {key.get_base64()}"
    folder = (home or Path.home()) / ".ssh"
    for name in _USUAL_KEYS:
        if (folder / f"{name}.pub").exists():
            return _first_line(folder / f"{name}.pub")
    raise SettingsError.one(
        "ssh.key_file", f"is not set and there is no key in {folder}", "run `ssh-keygen -t ed25519`"
    )


def _first_line(path: Path) -> str:
    lines = path.read_text().strip().splitlines()
    if len(lines) != 1 or len(lines[0].split()) < 2:
        raise SettingsError.one(str(path), "is not one public key", "set ssh.key_file to another")
    return lines[0]


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
