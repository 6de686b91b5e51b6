"""Peer downloads: hosts of one run fetch from each other what one of them has."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.documents import text_of
from spark_contract.job import ReceiptProof
from spark_contract.paths import RECEIPT_NAME
from spark_contract.sharing import SHARE_KEY, SHARE_SETTINGS, Share, SharedTree
from spark_contract.units import (
    PREPARE,
    SHARE_UNIT,
)

from spark_deploy.config.settings.sources import FleetSettings
from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.facts import FileStates, HostFact, read_fact
from spark_deploy.hosts.files import place_files
from spark_deploy.hosts.host_errors import Commands, host_errors
from spark_deploy.hosts.status import JobStates
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.managed_files import ManagedFile
from spark_deploy.plan.peer_download import (
    Member,
    State,
    lacks,
    shared_trees,
    wanted_of,
    with_peers,
)


class LoginAddress(HostFact[str]):
    """The host's address that this login goes to; "" where there was no SSH login.

    To be asked without sudo, which drops the variable.
    """

    default = str

    def command(self) -> str:
        return "printf '%s\\n' \"$SSH_CONNECTION\""

    def process(self, output: Iterable[str]) -> str:
        words = " ".join(output).split()
        return words[2] if len(words) == 4 else ""


# A key for each run, kept with its first host: a new one ends what an earlier one left open.
_keys: WeakKeyDictionary[Host, str] = WeakKeyDictionary()


_members: WeakKeyDictionary[Host, Member] = WeakKeyDictionary()


_sharing: WeakSet[Host] = WeakSet()


@operation()
@host_errors
def note_files(jobs: Sequence[Work], release: str, fleet: FleetSettings) -> None:
    """Note what this host has of its trees, for the others to know."""
    if not host.state.is_executing:
        host.noop("told when it runs")
        return
    names = tuple(work.job.digest12 for work in jobs)
    found = read_fact(JobStates, jobs=names, target=PREPARE.of(release))
    if found.lends:  # left open by a run that came to no end here: this one closes it
        _sharing.add(_current())
    if not fleet.share:
        host.noop("this host does not share")
        return
    trees: dict[str, State] = {}
    for work in jobs:
        told = found.states.get(work.job.digest12)
        state = _STATES.get(told.state if told else "", "missing")
        if isinstance(work.job.proof, ReceiptProof):
            trees[work.job.proof.digest] = state
        elif work.layers is not None and trees.get(work.layers.digest) != "there":
            # Whether an image's blobs are kept beside it is asked where somebody wants them.
            trees[work.layers.digest] = "needless" if state == "there" else state
    _members[_current()] = Member(host.name, "", trees)
    host.noop("what it has is known")


_STATES: dict[str, State] = {"done": "there", "running": "under way"}


@operation()
@host_errors
def start_sharing(jobs: Sequence[Work], fleet: FleetSettings) -> Commands:
    """Lend what another host of this run lacks, and have the key to what others lend."""
    members = _active_members()
    if len(members) < 2 or _current() not in _members:
        host.noop("no other host of this run shares")
        return
    wanted = wanted_of(host.name, members)
    ours = _members[_current()].trees
    trees = tuple(
        tree
        for tree in shared_trees(jobs)
        if tree.digest in wanted and (ours[tree.digest] != "needless" or _kept(tree))
    )
    if not trees and not any(map(lacks, ours.values())):
        host.noop("no host lacks what another one has")
        return
    files = [ManagedFile(SHARE_KEY, f"{_key()}\n".encode(), 0o600)]
    # Without sudo, which would hide what the login told.
    address = fleet.address or read_fact(LoginAddress, _sudo=False)
    lends = bool(trees and address)
    if lends:
        files.append(
            ManagedFile(SHARE_SETTINGS, text_of(Share(address, fleet.port, trees)).encode())
        )
        _members[_current()] = _sharing_member(_members[_current()], address, fleet.port, trees)
    elif trees:
        host.log("does not lend: its address is not known; set fleet.address")
    yield from place_files(files)
    if lends:
        yield shell(
            f"systemctl reset-failed {SHARE_UNIT} 2>/dev/null; systemctl restart {SHARE_UNIT}"
        )
    _sharing.add(_current())


def _kept(tree: SharedTree) -> bool:
    """Return whether a tree is there that this host does not need; it is then lent."""
    receipt = f"{tree.dir}/{RECEIPT_NAME}"
    if receipt not in host.get_fact(FileStates, paths=[receipt]):
        return False
    me = _members[_current()]
    _members[_current()] = replace(me, trees={**me.trees, tree.digest: "there"})
    return True


def _sharing_member(member: Member, address: str, port: int, trees: Sequence[SharedTree]) -> Member:
    """Return what others have to know of a host that lends: its receipts come over this way."""
    built = [one for one in trees if not one.unfinished and member.trees[one.digest] == "there"]
    where = {one.digest: f"{one.dir}/{RECEIPT_NAME}" for one in built}
    states = host.get_fact(FileStates, paths=list(where.values())) if where else {}
    known = {digest: states[path].sha256 for digest, path in where.items() if path in states}
    shown = f"[{address}]" if ":" in address else address
    return replace(member, url=f"http://{shown}:{port}", receipts=known)


@operation()
@host_errors
def stop_sharing() -> Commands:
    """Lend nothing any more; the key goes."""
    if _current() not in _sharing:
        host.noop("nothing is lent")
        return
    yield shell(f"systemctl stop {SHARE_UNIT}; rm -f {SHARE_KEY} {SHARE_SETTINGS}")
    _sharing.discard(_current())


def with_known_peers(work: Work) -> Work:
    """Return a job that knows which hosts of this run lend what it makes."""
    if _current() not in _members:
        return work
    members = [one for one in _active_members() if one.url or one.name == host.name]
    return with_peers(work, host.name, members)


def _key() -> str:
    return _keys.setdefault(next(iter(host.state.inventory)), secrets.token_urlsafe(32))


def _current() -> Host:
    return host.state.inventory.get_host(host.name)


def _active_members() -> list[Member]:
    """Return the hosts of this run that share and are still there, in the inventory's order."""
    state = host.state
    return [
        _members[one]
        for one in state.inventory
        if one in _members and one not in state.failed_hosts
    ]
