"""Configure a host's download sources: an HTTP proxy, and the other hosts in the run (peers).

A host opens a port only if another host lacks files. Jobs and docker read the proxy from a file
that only root can read.
"""

import re
import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from weakref import WeakKeyDictionary, WeakSet

from pyinfra import host
from pyinfra.api import Host
from spark_contract.documents import to_json
from spark_contract.fetching import SHARE_KEY, SHARE_SETTINGS, Share, SharedTree
from spark_contract.paths import PROXY, RECEIPT_NAME
from spark_contract.units import PREPARE, SHARE_UNIT

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.load import read_secret
from spark_deploy.config.settings.patterns import SecretRef
from spark_deploy.config.settings.sources import FleetSettings, ProxySettings
from spark_deploy.hosts.commands import current_host, log, shell
from spark_deploy.hosts.facts import FileStates, LineFact, read_fact
from spark_deploy.hosts.files import file_states, place_files, remove_files, sync_files
from spark_deploy.hosts.operations import Commands, host_operation
from spark_deploy.hosts.status import JobStates
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.peers import (
    Member,
    State,
    is_incomplete,
    shared_trees,
    trees_to_share,
    with_peers,
)
from spark_deploy.plan.types import ManagedFile


class DaemonProxy(LineFact):
    """Docker's proxy compared with the file; "" if docker does not run.

    ``same``, ``same-proxy`` (only no_proxy differs) or ``differs``; case and order do not matter.
    """

    def command(self, path: str) -> str:
        return rf"""
proxy_lines() {{
  grep -aiE '^(http|https|no)_proxy=' | sed 's/^[^=]*/\L&/; s,/$,,' | LC_ALL=C sort -u
}}
urls() {{ printf '%s\n' "$1" | grep -v ^no_; }}
pid=$(systemctl show -p MainPID --value docker.service 2>/dev/null)
[ "${{pid:-0}}" -gt 0 ] || exit 0
running=$(tr '\0' '\n' < /proc/$pid/environ | proxy_lines)
configured=$(cat {shlex.quote(path)} 2>/dev/null | proxy_lines)
if [ "$running" = "$configured" ]; then echo same; exit; fi
[ "$(urls "$running")" = "$(urls "$configured")" ] && echo same-proxy || echo differs
"""


DROP_IN_PATH = "/etc/systemd/system/docker.service.d/spark-proxy.conf"
DOCKER_DROP_IN = ManagedFile(DROP_IN_PATH, f"[Service]\nEnvironmentFile=-{PROXY}\n".encode())
# The values are not quoted in systemd's environment file.
_VALID_URL = re.compile(r"https?://[!-~]{1,500}")
_QUOTES = re.compile(r"[\"'\\\\]")
_RESTART = (
    "systemctl daemon-reload; ! systemctl is-active --quiet docker.service || "
    "{ systemctl restart docker.service && "
    "timeout 90 sh -c 'until docker version >/dev/null 2>&1; do sleep 1; done'; }"
)


@host_operation
def configure_job_proxy(proxy: ProxySettings) -> Commands:
    if not (yield from sync_files((proxy_file(proxy),), enabled=proxy.url is not None)):
        host.noop("the proxy is configured" if proxy.url is not None else "no proxy is set")


@host_operation
def configure_docker_proxy(proxy: ProxySettings) -> Commands:
    """Let docker pull through the proxy; restart docker if it uses a different proxy.

    Keep the owner's own configuration of the same proxy: a restart would restart every container.
    """
    if proxy.url is None:
        if (yield from remove_files((DROP_IN_PATH,))):
            yield shell(_RESTART)
        else:
            host.noop("docker's proxy is not managed")
        return
    comparison = host.get_fact(DaemonProxy, path=PROXY)
    is_managed = DROP_IN_PATH in file_states([DROP_IN_PATH])
    if not is_managed and comparison in ("same", "same-proxy"):
        host.noop("docker already uses this proxy, which the host's owner configured")
        return
    changed = yield from place_files((DOCKER_DROP_IN,))
    if changed or comparison in ("same-proxy", "differs"):
        if comparison:  # docker is running
            log("restarting docker to use the proxy; systemd will restart the engines")
        yield shell(_RESTART)
    else:
        host.noop("docker pulls through the proxy")


def proxy_file(proxy: ProxySettings) -> ManagedFile:
    variables = {"no_proxy": ",".join(proxy.direct)}
    if proxy.url is not None:
        address = _proxy_address(proxy.url)
        variables = {"http_proxy": address, "https_proxy": address, **variables}
    lines = [
        f"{name}={value}\n"
        for variable, value in variables.items()
        for name in (variable, variable.upper())
    ]
    return ManagedFile(PROXY, "".join(lines).encode(), 0o600)


def _proxy_address(url: str | SecretRef) -> str:
    address = read_secret(url, setting="proxy.url") if isinstance(url, SecretRef) else url
    if not _VALID_URL.fullmatch(address) or _QUOTES.search(address):
        message = "invalid URL; expected a URL such as http://user:password@proxy.example.org:3128"
        fix = "write quotes, backslashes and spaces in the URL as %22, %27, %5C and %20"
        raise SettingsError.single("proxy.url", message, fix)
    return address


class LoginAddress(LineFact):
    """The host's address in this SSH connection; read it without sudo, which drops the variable."""

    def command(self) -> str:
        return "printf '%s\\n' \"$SSH_CONNECTION\""

    def process(self, output: Iterable[str]) -> str:
        fields = " ".join(output).split()
        address = fields[2] if len(fields) == 4 else ""
        # Other hosts cannot use the address of a tunnel's end or of an IPv6 zone.
        return "" if "%" in address or address in ("127.0.0.1", "::1") else address


# One download key per run, stored for the run's first host.
_keys: WeakKeyDictionary[Host, str] = WeakKeyDictionary()
_members: WeakKeyDictionary[Host, Member] = WeakKeyDictionary()
_sharing: WeakSet[Host] = WeakSet()
_STATES: dict[str, State] = {"done": "complete", "running": "running"}
_FIRST_PORT = 8010


@host_operation
def record_files(jobs: Sequence[Work], release: str, fleet: FleetSettings) -> None:
    """Record which files of the jobs this host has, for the other hosts in the run."""
    if not host.state.is_executing:
        host.noop("the files will be recorded when the deploy runs")
        return
    digests = tuple(work.job.digest12 for work in jobs)
    recorded = read_fact(JobStates, jobs=digests, target=PREPARE.unit(release))
    if recorded.shares_files:
        _sharing.add(current_host())
    if not fleet.share:
        host.noop("this host does not share files")
        return
    trees: dict[str, State] = {}
    for work in jobs:
        job = recorded.states.get(work.job.digest12)
        state = _STATES.get(job.state if job else "", "missing")
        if work.shared:
            trees[work.shared.digest] = state
        elif work.layers is not None and trees.get(work.layers.digest) != "complete":
            # Check whether a host still has an image's blobs only if another host needs them.
            trees[work.layers.digest] = "not needed" if state == "complete" else state
    _members[current_host()] = Member(host.name, "", trees)
    host.noop("recorded the files")


@host_operation
def start_sharing(
    jobs: Sequence[Work], fleet: FleetSettings, used_ports: Sequence[int]
) -> Commands:
    """Serve files that other hosts lack; store the key for serving and downloading."""
    members = _active_members()
    if len(members) < 2 or current_host() not in _members:
        host.noop("no other host in this run shares files")
        return
    needed_digests = trees_to_share(host.name, members)
    states = _members[current_host()].trees
    trees = []
    for tree in shared_trees(jobs):
        if tree.digest not in needed_digests:
            continue
        if states[tree.digest] != "not needed" or _share_existing(tree):
            trees.append(tree)
    if not trees and not any(map(is_incomplete, states.values())):
        host.noop("no host needs files from another host")
        return
    first_host = next(iter(host.state.inventory))
    key = _keys.setdefault(first_host, secrets.token_urlsafe(32))
    files = [ManagedFile(SHARE_KEY, f"{key}\n".encode(), 0o600)]
    address = fleet.address or read_fact(LoginAddress, _sudo=False)
    serves = bool(trees and address)
    if serves:
        port = next(port for port in count(_FIRST_PORT) if port not in used_ports)
        settings = to_json(Share(address, port, tuple(trees)))
        files.append(ManagedFile(SHARE_SETTINGS, settings.encode()))
        _record_url(address, port, trees)
    elif trees:
        host.log(
            "other hosts cannot download from this host, because its address is unknown; "
            "set fleet.address"
        )
    yield from place_files(files)
    if serves:
        yield shell(
            f"systemctl reset-failed {SHARE_UNIT} 2>/dev/null; systemctl restart {SHARE_UNIT}"
        )
    _sharing.add(current_host())


def _share_existing(tree: SharedTree) -> bool:
    """Record a tree as complete if the host still has its receipt; return whether it does."""
    receipt = f"{tree.dir}/{RECEIPT_NAME}"
    if receipt not in host.get_fact(FileStates, paths=[receipt]):
        return False
    member = _members[current_host()]
    _members[current_host()] = replace(member, trees={**member.trees, tree.digest: "complete"})
    return True


def _record_url(address: str, port: int, trees: Sequence[SharedTree]) -> None:
    """Record this host's URL, and the hashes of the receipts, which peers verify."""
    member = _members[current_host()]
    paths = {
        tree.digest: f"{tree.dir}/{RECEIPT_NAME}"
        for tree in trees
        if not tree.unfinished and member.trees[tree.digest] == "complete"
    }
    states = host.get_fact(FileStates, paths=list(paths.values())) if paths else {}
    receipts = {digest: states[path].sha256 for digest, path in paths.items() if path in states}
    authority = f"[{address}]" if ":" in address else address
    _members[current_host()] = replace(member, url=f"http://{authority}:{port}", receipts=receipts)


@host_operation
def stop_sharing() -> Commands:
    if current_host() not in _sharing:
        host.noop("this host does not serve files to peers")
        return
    yield shell(f"systemctl stop {SHARE_UNIT}; rm -f {SHARE_KEY} {SHARE_SETTINGS}")
    _sharing.discard(current_host())


def with_known_peers(work: Work) -> Work:
    if current_host() not in _members:
        return work
    members = [member for member in _active_members() if member.url or member.name == host.name]
    return with_peers(work, host.name, members)


def _active_members() -> list[Member]:
    state = host.state
    return [
        _members[other]
        for other in state.inventory
        if other in _members and other not in state.failed_hosts
    ]
