"""Hosts lend each other what they have fetched, from here to the end of the run.

What the hosts of a run have is asked first, then each knows whether it is of use to another. A run
in which nobody lacks anything opens nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.documents import text_of
from spark_contract.job import ReceiptProof
from spark_contract.paths import RECEIPT_NAME
from spark_contract.sharing import SHARE_KEY, SHARE_SETTINGS, Share, SharedTree
from spark_contract.units import PREPARE, SHARE_UNIT

from spark_deploy.config.settings.sources import FleetSettings
from spark_deploy.hosts.facts.fact_cache import read
from spark_deploy.hosts.facts.jobs import JobStates, LoginAddress
from spark_deploy.hosts.facts.reading import FileStates
from spark_deploy.hosts.operations.commands import shell
from spark_deploy.hosts.operations.files import place
from spark_deploy.hosts.operations.host_errors import Commands, host_errors
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

# A key for each run, kept with its first host: a new one ends what an earlier one left open.
_keys: WeakKeyDictionary[Host, str] = WeakKeyDictionary()
_members: WeakKeyDictionary[Host, Member] = WeakKeyDictionary()
_lending: WeakSet[Host] = WeakSet()


@operation()
@host_errors
def surveyed(jobs: Sequence[Work], release: str, fleet: FleetSettings) -> None:
    """Note what this host has of its trees, for the others to know."""
    if not host.state.is_executing:
        host.noop("told when it runs")
        return
    names = tuple(work.job.digest12 for work in jobs)
    found = read(JobStates, jobs=names, target=PREPARE.of(release))
    if found.lends:  # left open by a run that came to no end here: this one closes it
        _lending.add(_this())
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
    _members[_this()] = Member(host.name, "", trees)
    host.noop("what it has is known")


_STATES: dict[str, State] = {"done": "there", "running": "under way"}


@operation()
@host_errors
def lent(jobs: Sequence[Work], fleet: FleetSettings) -> Commands:
    """Lend what another host of this run lacks, and have the key to what others lend."""
    members = _present()
    if len(members) < 2 or _this() not in _members:
        host.noop("no other host of this run shares")
        return
    wanted = wanted_of(host.name, members)
    ours = _members[_this()].trees
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
    address = fleet.address or read(LoginAddress, _sudo=False)
    lends = bool(trees and address)
    if lends:
        files.append(
            ManagedFile(SHARE_SETTINGS, text_of(Share(address, fleet.port, trees)).encode())
        )
        _members[_this()] = _lender(_members[_this()], address, fleet.port, trees)
    elif trees:
        host.log("does not lend: its address is not known; set fleet.address")
    yield from place(files)
    if lends:
        yield shell(
            f"systemctl reset-failed {SHARE_UNIT} 2>/dev/null; systemctl restart {SHARE_UNIT}"
        )
    _lending.add(_this())


def _kept(tree: SharedTree) -> bool:
    """Return whether a tree is there that this host does not need; it is then lent."""
    receipt = f"{tree.dir}/{RECEIPT_NAME}"
    if receipt not in host.get_fact(FileStates, paths=[receipt]):
        return False
    me = _members[_this()]
    _members[_this()] = replace(me, trees={**me.trees, tree.digest: "there"})
    return True


def _lender(member: Member, address: str, port: int, trees: Sequence[SharedTree]) -> Member:
    """Return what others have to know of a host that lends: its receipts come over this way."""
    built = [one for one in trees if not one.unfinished and member.trees[one.digest] == "there"]
    where = {one.digest: f"{one.dir}/{RECEIPT_NAME}" for one in built}
    states = host.get_fact(FileStates, paths=list(where.values())) if where else {}
    known = {digest: states[path].sha256 for digest, path in where.items() if path in states}
    shown = f"[{address}]" if ":" in address else address
    return replace(member, url=f"http://{shown}:{port}", receipts=known)


@operation()
@host_errors
def closed() -> Commands:
    """Lend nothing any more; the key goes."""
    if _this() not in _lending:
        host.noop("nothing is lent")
        return
    yield shell(f"systemctl stop {SHARE_UNIT}; rm -f {SHARE_KEY} {SHARE_SETTINGS}")
    _lending.discard(_this())


def knowing_peers(work: Work) -> Work:
    """Return a job that knows which hosts of this run lend what it makes."""
    if _this() not in _members:
        return work
    members = [one for one in _present() if one.url or one.name == host.name]
    return with_peers(work, host.name, members)


def _key() -> str:
    return _keys.setdefault(next(iter(host.state.inventory)), secrets.token_urlsafe(32))


def _this() -> Host:
    return host.state.inventory.get_host(host.name)


def _present() -> list[Member]:
    """Return the hosts of this run that share and are still there, in the inventory's order."""
    state = host.state
    return [
        _members[one]
        for one in state.inventory
        if one in _members and one not in state.failed_hosts
    ]
