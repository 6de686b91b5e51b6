"""The proxy of a host: a file only root can read, used by jobs and by docker's daemon."""

import re
import shlex
from collections.abc import Iterator

from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.paths import PROXY

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.read_secret import read_secret
from spark_deploy.config.settings.secrets import SecretRef
from spark_deploy.config.settings.sources import ProxySettings
from spark_deploy.hosts.commands import log, shell
from spark_deploy.hosts.facts import LineFact
from spark_deploy.hosts.files import file_states, place_files, remove_files
from spark_deploy.hosts.host_errors import Commands, host_errors
from spark_deploy.plan.types import ManagedFile


class DaemonProxy(LineFact):
    """``same``, ``same-proxy`` (another no_proxy) or ``differs``; "" when docker does not run.

    Compares docker's environment with the file; names may be in small or capital letters.
    """

    def command(self, path: str) -> str:
        lines = (
            "grep -aiE '^(http|https|no)_proxy=' | sed 's/^[^=]*/\\L&/; s,/$,,' | LC_ALL=C sort -u"
        )
        return (
            "pid=$(systemctl show -p MainPID --value docker.service 2>/dev/null); "
            '[ "${pid:-0}" -gt 0 ] || exit 0; '
            f"a=$(tr '\\0' '\\n' < /proc/$pid/environ | {lines}); "
            f"b=$(cat {shlex.quote(path)} 2>/dev/null | {lines}); "
            'if [ "$a" = "$b" ]; then echo same; exit; fi; '
            "without() { printf '%s\\n' \"$1\" | grep -v ^no_; }; "
            '[ "$(without "$a")" = "$(without "$b")" ] && echo same-proxy || echo differs'
        )


DROP_IN_PATH = "/etc/systemd/system/docker.service.d/spark-proxy.conf"
DOCKER_DROP_IN = ManagedFile(DROP_IN_PATH, f"[Service]\nEnvironmentFile=-{PROXY}\n".encode())
# Values that systemd reads from an environment file without quotes.
_USABLE = re.compile(r"https?://[!-~]{1,500}")
_QUOTES = re.compile(r"[\"'\\\\]")
_RESTART = (
    "systemctl daemon-reload; ! systemctl is-active --quiet docker.service || "
    "{ systemctl restart docker.service && "
    "timeout 90 sh -c 'until docker version >/dev/null 2>&1; do sleep 1; done'; }"
)


@operation()
@host_errors
def configure_job_proxy(proxy: ProxySettings) -> Commands:
    """Install the file with the proxy of jobs, or remove it."""
    if proxy.used:
        changed = yield from place_files((proxy_file(proxy),))
    else:
        changed = yield from remove_files((PROXY,))
    if not changed:
        host.noop("the proxy is as planned" if proxy.used else "no proxy is set")


@operation()
@host_errors
def configure_docker_proxy(proxy: ProxySettings) -> Commands:
    """Let docker's daemon pull through the proxy; restart it if it uses another proxy.

    A proxy set by the owner stays, unless the settings name another: a restart would restart
    every container of the host.
    """
    if not proxy.used:
        if (yield from remove_files((DROP_IN_PATH,))):
            yield shell(_RESTART)
        else:
            host.noop("docker's proxy is not managed")
        return
    daemon = host.get_fact(DaemonProxy, path=PROXY)
    managed = DROP_IN_PATH in file_states([DROP_IN_PATH])
    if not managed and daemon in ("same", "same-proxy"):
        host.noop("docker pulls through this proxy by the owner's settings")
        return
    changed = yield from place_files((DOCKER_DROP_IN,))
    if changed or daemon in ("same-proxy", "differs"):
        if daemon:
            log("docker is restarted for the proxy; engines on it start again by themselves")
        yield shell(_RESTART)
    else:
        host.noop("docker pulls through the proxy")


def proxy_file(proxy: ProxySettings) -> ManagedFile:
    """Return the environment file; tools read the names in small or capital letters."""
    pairs = [*_addresses(proxy), ("no_proxy", ",".join(proxy.direct))]
    lines = [f"{name}={value}\n" for key, value in pairs for name in (key, key.upper())]
    return ManagedFile(PROXY, "".join(lines).encode(), 0o600)


def _addresses(proxy: ProxySettings) -> Iterator[tuple[str, str]]:
    for key, given in (("http", proxy.http), ("https", proxy.https)):
        if given is None:
            continue
        setting = f"proxy.{key}"
        address = read_secret(given, setting=setting) if isinstance(given, SecretRef) else given
        if not _USABLE.fullmatch(address) or _QUOTES.search(address):
            raise SettingsError.one(
                setting,
                "is not an address such as http://user:password@proxy.example.org:3128",
                "write quotes, backslashes and blanks in it as %22, %27, %5C and %20",
            )
        yield f"{key}_proxy", address
