"""Peer downloads: the hosts of a run fetch files from each other until the run is over.

Every host first notes which files it has, so missing files of another host are known. A run without
missing files opens no port.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.documents import text_of
from spark_contract.fetching import SHARE_KEY, SHARE_SETTINGS, Share, SharedTree
from spark_contract.job import ReceiptProof
from spark_contract.paths import RECEIPT_NAME
from spark_contract.units import PREPARE, SHARE_UNIT

from spark_deploy.config.settings.sources import FleetSettings
from spark_deploy.hosts.commands import current_host, shell
from spark_deploy.hosts.facts import FileStates, LineFact, read_fact
from spark_deploy.hosts.files import place_files
from spark_deploy.hosts.host_errors import Commands, host_errors
from spark_deploy.hosts.status import JobStates
from spark_deploy.plan.jobs import (
    Member,
    State,
    Work,
    lacks,
    shared_trees,
    trees_to_share,
    with_peers,
)
from spark_deploy.plan.types import ManagedFile


class LoginAddress(LineFact):
    """The host's address that this SSH login uses; sudo would drop the variable."""

    def command(self) -> str:
        return "printf '%s\\n' \"$SSH_CONNECTION\""

    def process(self, output: Iterable[str]) -> str:
        words = " ".join(output).split()
        return words[2] if len(words) == 4 else ""


# A key per run, kept with the first host: a new key revokes that of an interrupted run.
_keys: WeakKeyDictionary[Host, str] = WeakKeyDictionary()
_members: WeakKeyDictionary[Host, Member] = WeakKeyDictionary()
_sharing: WeakSet[Host] = WeakSet()
_STATES: dict[str, State] = {"done": "there", "running": "under way"}
_PORT = 8010


@operation()
@host_errors
def note_files(jobs: Sequence[Work], release: str, fleet: FleetSettings) -> None:
    if not host.state.is_executing:
        host.noop("read when it runs")
        return
    names = tuple(work.job.digest12 for work in jobs)
    states = read_fact(JobStates, jobs=names, target=PREPARE.of(release))
    if states.lends:  # left open by an interrupted run, closed by this run
        _sharing.add(current_host())
    if not fleet.share:
        host.noop("this host does not share")
        return
    trees: dict[str, State] = {}
    for work in jobs:
        job = states.states.get(work.job.digest12)
        state = _STATES.get(job.state if job else "", "missing")
        if isinstance(work.job.proof, ReceiptProof):
            trees[work.job.proof.digest] = state
        elif work.layers is not None and trees.get(work.layers.digest) != "there":
            # Whether an image's blobs are kept is checked only if another host needs them.
            trees[work.layers.digest] = "needless" if state == "there" else state
    _members[current_host()] = Member(host.name, "", trees)
    host.noop("files noted")


@operation()
@host_errors
def start_sharing(jobs: Sequence[Work], fleet: FleetSettings) -> Commands:
    """Serve files that another host of this run lacks, and install the key for downloads."""
    members = _active_members()
    if len(members) < 2 or current_host() not in _members:
        host.noop("no other host of this run shares")
        return
    wanted = trees_to_share(host.name, members)
    own = _members[current_host()].trees
    trees = tuple(
        tree
        for tree in shared_trees(jobs)
        if tree.digest in wanted and (own[tree.digest] != "needless" or _is_kept(tree))
    )
    if not trees and not any(map(lacks, own.values())):
        host.noop("no host lacks files of another host")
        return
    files = [ManagedFile(SHARE_KEY, f"{_run_key()}\n".encode(), 0o600)]
    address = fleet.address or read_fact(LoginAddress, _sudo=False)
    serves = bool(trees and address)
    if serves:
        settings = text_of(Share(address, _PORT, trees))
        files.append(ManagedFile(SHARE_SETTINGS, settings.encode()))
        _note_url(address, _PORT, trees)
    elif trees:
        host.log("serves no peers: the address is not known; set fleet.address")
    yield from place_files(files)
    if serves:
        yield shell(
            f"systemctl reset-failed {SHARE_UNIT} 2>/dev/null; systemctl restart {SHARE_UNIT}"
        )
    _sharing.add(current_host())


def _is_kept(tree: SharedTree) -> bool:
    """Whether this host has files that it does not need itself; they are then shared."""
    receipt = f"{tree.dir}/{RECEIPT_NAME}"
    if receipt not in host.get_fact(FileStates, paths=[receipt]):
        return False
    member = _members[current_host()]
    _members[current_host()] = replace(member, trees={**member.trees, tree.digest: "there"})
    return True


def _note_url(address: str, port: int, trees: Sequence[SharedTree]) -> None:
    """Note where this host serves, and the hashes of the receipts, read over this host's login."""
    member = _members[current_host()]
    built = [tree for tree in trees if not tree.unfinished and member.trees[tree.digest] == "there"]
    paths = {tree.digest: f"{tree.dir}/{RECEIPT_NAME}" for tree in built}
    states = host.get_fact(FileStates, paths=list(paths.values())) if paths else {}
    receipts = {digest: states[path].sha256 for digest, path in paths.items() if path in states}
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    _members[current_host()] = replace(member, url=url, receipts=receipts)


@operation()
@host_errors
def stop_sharing() -> Commands:
    if current_host() not in _sharing:
        host.noop("serves no peers")
        return
    yield shell(f"systemctl stop {SHARE_UNIT}; rm -f {SHARE_KEY} {SHARE_SETTINGS}")
    _sharing.discard(current_host())


def with_known_peers(work: Work) -> Work:
    """Return a job with the hosts of this run that serve the result."""
    if current_host() not in _members:
        return work
    members = [each for each in _active_members() if each.url or each.name == host.name]
    return with_peers(work, host.name, members)


def _run_key() -> str:
    return _keys.setdefault(next(iter(host.state.inventory)), secrets.token_urlsafe(32))


def _active_members() -> list[Member]:
    """Return the sharing hosts of this run that have not failed, in the inventory's order."""
    state = host.state
    return [
        _members[each]
        for each in state.inventory
        if each in _members and each not in state.failed_hosts
    ]
