"""Describe unreachable hosts, with the same messages for pyinfra, paramiko and ssh."""

import re
from typing import NoReturn

from paramiko import AuthenticationException
from paramiko.ssh_exception import NoValidConnectionsError
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host

CHECK_NETWORK = "check that the host is on, and check its address and port"
BOOTSTRAP = "run `spark-deploy up` or deploys/bootstrap.py to install the key and sudo rule"
_REJECTED = "rejects our SSH key"
_UNKNOWN_KEY = "its host key is not in known_hosts, or differs from the recorded key"
# Messages of the ssh program.
_SSH_ERRORS = (
    (re.compile(r"ssh: connect to host (\S+) port (\d+): (.+)"), CHECK_NETWORK),
    (re.compile(r"ssh: Could not resolve hostname (\S+)(): (.+)"), CHECK_NETWORK),
    (re.compile(r"(?P<user>\S+): Permission denied \("), BOOTSTRAP),
    (re.compile(r"Host key verification failed"), BOOTSTRAP),
)


def network_reason(hostname: str, port: int | None, error: BaseException) -> str:
    if isinstance(error, NoValidConnectionsError):
        [(address, error), *_] = error.errors.items()
        port = address[1]
    name = hostname if port in (None, 22) else f"[{hostname}]:{port}"
    reason = getattr(error, "strerror", None) or str(error) or "closed the connection"
    return f"{name}: {reason}"


def ssh_reason(output: str) -> tuple[str, str] | None:
    """Return why ssh could not connect and how to fix it; ``None`` if it connected."""
    for pattern, fix in _SSH_ERRORS:
        if match := pattern.search(output):
            if fix == CHECK_NETWORK:
                error = OSError(0, match[3].strip())
                return network_reason(match[1], int(match[2] or 22), error), fix
            return (_REJECTED if match.groupdict() else _UNKNOWN_KEY), fix
    return None


def raise_connect_error(host: Host, message: str, data: object) -> NoReturn:
    """Raise ConnectError with our message; replaces pyinfra's function of this name."""
    reason, fix = f"{message} ({data})", ""
    if isinstance(data, AuthenticationException):
        reason, fix = _REJECTED, BOOTSTRAP
    elif "host key" in reason.lower():  # raised by pyinfra's policy
        reason, fix = _UNKNOWN_KEY, BOOTSTRAP
    elif isinstance(data, Exception):
        hostname, port = host.data.get("ssh_hostname") or host.name, host.data.get("ssh_port")
        reason = network_reason(hostname, int(port) if port else None, data)
        fix = CHECK_NETWORK
    raise ConnectError(f"unreachable: {reason}{f'; fix: {fix}' if fix else ''}")
