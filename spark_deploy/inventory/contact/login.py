"""How far key and password get on a host, and which key to install."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramiko import AuthenticationException, SSHException
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import HostData
from pyinfra.connectors.ssh_util import load_key_with_certificate
from pyinfra.connectors.sshuserclient.client import SSHClient

from spark_deploy.errors import SettingsError
from spark_deploy.inventory.contact.host_keys import (
    CONNECT_TIMEOUT_S,
    Endpoint,
    readable_ssh_files,
)
from spark_deploy.inventory.contact.password import Password

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
