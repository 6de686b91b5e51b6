"""Make pyinfra's SSH connections fast, and have them end when the host is gone."""

from __future__ import annotations

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

from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.printable import one_line
from spark_deploy.inventory.host_names import LOCAL

# known_hosts format: sshd(8). Fingerprints are printed as `ssh-keygen -l` does (SHA256, base64
# without padding), so that they can be compared with the ones shown at the machine itself.


CONNECT_TIMEOUT_S = 10.0

# Whoever connects says why it failed; paramiko would print a traceback of it as well.
logging.getLogger("paramiko.transport").setLevel(logging.CRITICAL)

KeyState = Literal["known", "new", "changed", "unreachable"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a host is reached: everything taken from settings and the SSH configuration."""

    host: str  # name in the inventory
    hostname: str
    user: str | None
    port: int | None
    known_hosts: str | None
    config_file: str | None
    key_file: str | None

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine, without SSH."""
        return self.host == LOCAL


@dataclass(frozen=True, slots=True)
class Seen:
    """The key a host showed, compared with what is recorded."""

    endpoint: Endpoint
    entry_name: str  # how known_hosts names the host
    path: Path  # the known_hosts file
    state: KeyState
    key: PKey | None
    recorded: PKey | None  # of the same type, when it differs
    detail: str = ""

    @property
    def fingerprint(self) -> str:
        """Type and fingerprint of the key that was shown."""
        return describe(self.key) if self.key else ""


def describe(key: PKey) -> str:
    """Return a key's type and SHA256 fingerprint."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


def look(endpoint: Endpoint) -> Seen:
    """Ask a host for its key without logging in, through jump hosts where configured."""
    given: dict[str, object] = {"timeout": CONNECT_TIMEOUT_S}
    if endpoint.port:
        given["port"] = endpoint.port
    with readable_ssh_files():
        hostname, config, _, _, files, _, _ = SSHClient().parse_config(  # type: ignore[no-untyped-call]  # pyinfra
            endpoint.hostname, given, ssh_config_file=endpoint.config_file
        )
        port = int(config["port"])
        name = hostname if port == 22 else f"[{hostname}]:{port}"
        path = Path(endpoint.known_hosts or files[0]).expanduser()
        known = HostKeys(str(path)) if path.exists() else HostKeys()
    recorded: Mapping[str, PKey] = known.lookup(name) or {}
    try:
        place = (hostname, port)
        transport = Transport(
            config.get("sock") or socket.create_connection(place, timeout=CONNECT_TIMEOUT_S)
        )
        try:
            _prefer(transport, list(recorded.keys()))
            transport.start_client(timeout=CONNECT_TIMEOUT_S)
            key = transport.get_remote_server_key()
        finally:
            transport.close()
    except (OSError, EOFError, SSHException) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Seen(endpoint, name, path, "unreachable", None, None, why)
    same_type = recorded.get(key.get_name())
    if same_type is None:
        return Seen(endpoint, name, path, "changed" if recorded else "new", key, None)
    state: KeyState = "known" if same_type == key else "changed"
    return Seen(endpoint, name, path, state, key, same_type)


@contextmanager
def readable_ssh_files() -> Iterator[None]:
    """Have what is wrong in files of ssh itself told as theirs.

    Raises:
        SettingsError: they hold what nobody can read, or a way that has no end.
    """
    try:
        yield
    except RecursionError as error:
        what, fix = "a jump host is reached through itself", "mend ProxyJump; ssh -G HOST shows it"
        raise SettingsError.one("~/.ssh/config", what, fix) from error
    except (ValueError, ConfigParseError, InvalidHostKey) as error:
        said = error.line if isinstance(error, InvalidHostKey) else error
        what = f"holds what cannot be read: {one_line(said)}"
        fix = "mend that line; `ssh -G HOST` shows what ssh makes of the configuration"
        raise SettingsError.one("~/.ssh/config or known_hosts", what, fix) from error


def _prefer(transport: Transport, types: Sequence[str]) -> None:
    """Ask for a key type that is recorded, so that a host with several keys is recognised."""
    options = transport.get_security_options()
    wanted = [t for t in options.key_types if t in types]
    options.key_types = tuple([*wanted, *(t for t in options.key_types if t not in wanted)])


def problems_of(seen: Sequence[Seen]) -> list[Problem]:
    """List hosts whose key is not the recorded one."""
    return [
        Problem(
            item.endpoint.host,
            f"shows the host key {item.fingerprint}, but {item.path} has "
            f"{describe(item.recorded) if item.recorded else 'keys of other types'}: "
            "it was reinstalled, or someone stands between",
            f"compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` at the machine; "
            f"if it is right: ssh-keygen -f {item.path} -R '{item.entry_name}'",
        )
        for item in seen
        if item.state == "changed"
    ]


def is_named(item: Seen, file: str) -> bool:
    """Return whether a known_hosts file names exactly the key that a host showed.

    Raises:
        SettingsError: The file cannot be read, or has another key for the host.
    """
    path = Path(file).expanduser()
    try:
        with readable_ssh_files():
            named: Mapping[str, PKey] = HostKeys(str(path)).lookup(item.entry_name) or {}
    except OSError as error:
        fix = "name a readable known_hosts file"
        raise SettingsError.one(str(path), str(error.strerror), fix) from error
    key = named.get(item.key.get_name()) if item.key else None
    if named and key != item.key:
        what = f"shows the host key {item.fingerprint}, {path} has another"
        fix = "compare with the machine itself: someone may stand between"
        raise SettingsError.one(item.endpoint.host, what, fix)
    return key is not None


def record(seen: Sequence[Seen]) -> None:
    """Append new keys to their known_hosts files, which are made when missing."""
    for item in seen:
        if item.state != "new" or item.key is None:
            continue
        item.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = item.path.read_text() if item.path.exists() else ""
        line = HostKeyEntry([item.entry_name], item.key).to_line() or ""
        with item.path.open("a") as file:
            file.write(("" if not text or text.endswith("\n") else "\n") + line)
    # pyinfra reads each file once; let it see what was added.
    get_host_keys.cache.clear()


GONE_AFTER_S = 60
_OPTIONS = (
    # Each command costs 40 ms more without it, and so does the login.
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    # A host without power or cable says nothing: a command there would wait for ever, and all
    # other hosts with it.
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", GONE_AFTER_S // 4),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", GONE_AFTER_S // 4),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", GONE_AFTER_S * 1000),
)


def transport(sock: Any, **keywords: Any) -> Transport:
    """Return the transport of a connection, whose options hold from its first byte on.

    A connection through another process has no socket to set them on.
    """
    if isinstance(sock, socket.socket):
        for level, name, value in _OPTIONS:
            option = getattr(socket, name, None)  # not every system has all of them
            if option is not None:
                sock.setsockopt(level, option, value)
    return Transport(sock, **keywords)
