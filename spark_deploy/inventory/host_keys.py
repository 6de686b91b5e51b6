"""Query, compare and record SSH host keys; set connection timeouts."""

import base64
import hashlib
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paramiko import HostKeys, PKey, SSHException, Transport
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.ssh_exception import ConfigParseError
from pyinfra.connectors.sshuserclient.client import SSHClient, get_host_keys

from spark_deploy.config.errors import Problem, SettingsError, one_line
from spark_deploy.inventory.connections import network_reason
from spark_deploy.inventory.host_names import LOCAL

CONNECT_TIMEOUT_S = 10.0

# Otherwise paramiko also prints a traceback.
logging.getLogger("paramiko.transport").setLevel(logging.CRITICAL)

KeyState = Literal["known", "new", "changed", "unreachable"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str  # name in the inventory
    hostname: str
    user: str | None
    port: int | None
    known_hosts: str | None
    config_file: str | None
    key_file: str | None

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL


@dataclass(frozen=True, slots=True)
class HostKey:
    """The key that a host presents, compared with known_hosts."""

    endpoint: Endpoint
    entry_name: str  # name of the host in known_hosts
    path: Path  # known_hosts file
    state: KeyState
    key: PKey | None
    recorded: PKey | None  # recorded key of the same type
    detail: str = ""  # why the host is unreachable

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key) if self.key else ""


def fingerprint(key: PKey) -> str:
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


def query_host_key(endpoint: Endpoint) -> HostKey:
    """Read a host's key without a login, through jump hosts if they are configured."""
    arguments: dict[str, object] = {"timeout": CONNECT_TIMEOUT_S}
    if endpoint.port:
        arguments["port"] = endpoint.port
    with readable_ssh_files():
        hostname, config, _, _, files, _, _ = SSHClient().parse_config(  # type: ignore[no-untyped-call]  # pyinfra
            endpoint.hostname, arguments, ssh_config_file=endpoint.config_file
        )
        port = int(config["port"])
        name = hostname if port == 22 else f"[{hostname}]:{port}"
        path = Path(endpoint.known_hosts or files[0]).expanduser()
        known_hosts = HostKeys(str(path)) if path.exists() else HostKeys()
    recorded: Mapping[str, PKey] = known_hosts.lookup(name) or {}
    try:
        sock = config.get("sock") or socket.create_connection((hostname, port), CONNECT_TIMEOUT_S)
        transport = Transport(sock)
        try:
            # Request a recorded key type first: a host may have several keys.
            options = transport.get_security_options()
            options.key_types = sorted(options.key_types, key=lambda kind: kind not in recorded)
            transport.start_client(timeout=CONNECT_TIMEOUT_S)
            key = transport.get_remote_server_key()
        finally:
            transport.close()
    except (OSError, EOFError, SSHException) as error:
        reason = network_reason(hostname, port, error)
        return HostKey(endpoint, name, path, "unreachable", None, None, reason)
    recorded_key = recorded.get(key.get_name())
    if recorded_key is None:
        return HostKey(endpoint, name, path, "changed" if recorded else "new", key, None)
    state: KeyState = "known" if recorded_key == key else "changed"
    return HostKey(endpoint, name, path, state, key, recorded_key)


@contextmanager
def readable_ssh_files() -> Iterator[None]:
    """Raise SettingsError for mistakes in ~/.ssh/config and known_hosts."""
    try:
        yield
    except RecursionError as error:
        fix = "correct ProxyJump; run `ssh -G HOST` to print it"
        message = "ProxyJump makes a jump host connect through itself"
        raise SettingsError.single("~/.ssh/config", message, fix) from error
    except (ValueError, ConfigParseError, InvalidHostKey) as error:
        reason = error.line if isinstance(error, InvalidHostKey) else error
        fix = "correct that line; run `ssh -G HOST` to print the configuration that ssh uses"
        where = "~/.ssh/config or known_hosts"
        raise SettingsError.single(where, f"cannot be read: {one_line(reason)}", fix) from error


def changed_key_problems(keys: Sequence[HostKey]) -> list[Problem]:
    problems = []
    for key in keys:
        if key.state == "changed":
            recorded = fingerprint(key.recorded) if key.recorded else "keys of other types"
            problems.append(
                Problem(
                    key.endpoint.host,
                    f"presents the host key {key.fingerprint}, but {key.path} has {recorded}: "
                    "the host was reinstalled, or the connection is being intercepted",
                    "run `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the machine; "
                    "if it prints the first fingerprint, remove the old key: "
                    f"run `ssh-keygen -f {key.path} -R '{key.entry_name}'`",
                )
            )
    return problems


def is_listed(key: HostKey, file: str) -> bool:
    """Return whether ``file``, in known_hosts format, lists the presented key.

    Raises SettingsError if the file cannot be read or lists a different key.
    """
    path = Path(file).expanduser()
    try:
        with readable_ssh_files():
            listed: Mapping[str, PKey] = HostKeys(str(path)).lookup(key.entry_name) or {}
    except OSError as error:
        fix = "set the variable to the path of a readable known_hosts file"
        raise SettingsError.single(str(path), str(error.strerror), fix) from error
    listed_key = listed.get(key.key.get_name()) if key.key else None
    if listed and listed_key != key.key:
        message = f"presents the host key {key.fingerprint}, but {path} has a different key"
        fix = "compare both with the key on the machine, because the connection may be intercepted"
        raise SettingsError.single(key.endpoint.host, message, fix)
    return listed_key is not None


def record_host_keys(keys: Sequence[HostKey]) -> None:
    for host_key in keys:
        if host_key.state != "new" or host_key.key is None:
            continue
        host_key.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = host_key.path.read_text() if host_key.path.exists() else ""
        line = HostKeyEntry([host_key.entry_name], host_key.key).to_line() or ""
        lacks_newline = bool(content) and not content.endswith("\n")
        with host_key.path.open("a") as file:
            file.write(f"\n{line}" if lacks_newline else line)
    get_host_keys.cache.clear()  # pyinfra caches these files


LOST_AFTER_S = 60
_SOCKET_OPTIONS = (
    # Saves 40 ms per command.
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", LOST_AFTER_S // 4),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", LOST_AFTER_S // 4),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", LOST_AFTER_S * 1000),
)


def open_transport(sock: Any, **keywords: Any) -> Transport:
    """Return a transport with timeouts; none are set for a proxy command, which has no socket."""
    if isinstance(sock, socket.socket):
        for level, name, value in _SOCKET_OPTIONS:
            option = getattr(socket, name, None)  # missing on some systems
            if option is not None:
                sock.setsockopt(level, option, value)
    return Transport(sock, **keywords)
