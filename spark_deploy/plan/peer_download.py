"""Peer download: one host downloads, the others copy from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spark_contract import orders, tool
from spark_contract.documents import parse, text_of
from spark_contract.fetching import CopyPlan, FetchPlan, FinishedTree, LayersPlan, Peers, SharedTree
from spark_contract.job import FETCH_JOB, ReceiptProof

from spark_deploy.plan.jobs import PYTHON, Work
from spark_deploy.plan.types import ManagedFile

# Copies that one host sends at once; a local network is ten times as fast as most lines.
_COPIES = 8
# "needless": missing, but the result exists.
State = Literal["there", "under way", "missing", "needless"]


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    url: str  # of the shared files
    trees: dict[str, State]  # by digest
    receipts: dict[str, str] = field(default_factory=dict)  # sha256, of built trees


def shared_trees(jobs: Iterable[Work]) -> tuple[SharedTree, ...]:
    """Return the trees that jobs can share: downloads while they run, builds when complete.

    The blobs of an image's base are a single tree.
    """
    trees: dict[str, SharedTree] = {}
    for work in jobs:
        proof, name = work.job.proof, work.job.digest12
        if isinstance(proof, ReceiptProof):
            whole_only = work.job.kind != FETCH_JOB
            trees[proof.digest] = SharedTree(proof.digest, proof.tree, name, not whole_only)
        elif work.layers is not None:
            layers = work.layers
            trees.setdefault(
                layers.digest, SharedTree(layers.digest, layers.out, name, unfinished=True)
            )
    return tuple(trees.values())


def trees_to_share(me: str, members: Sequence[Member]) -> frozenset[str]:
    """Return the trees of a host that another host lacks."""
    mine = next(member.trees for member in members if member.name == me)
    return frozenset(
        digest
        for digest in mine
        for other in members
        if other.name != me and lacks(other.trees.get(digest, "there"))
    )


def lacks(state: State) -> bool:
    return state in ("under way", "missing")


def peers_of(me: str, digest: str, members: Sequence[Member]) -> tuple[str, ...]:
    """Return the URLs from which a host copies a tree, in order.

    First hosts that have it, each client starting at another host; then hosts that download it;
    then hosts before this one that start now, the nearest first. So no two hosts wait for each
    other, and the first host uses the hub. Of many hosts only the first copy from complete ones and
    the others from neighbours, so that no host sends more copies than its network carries.
    """
    place = [member.name for member in members].index(me)
    rank = sum(member.trees.get(digest) == "missing" for member in members[:place])

    def among(state: State, some: Sequence[Member]) -> list[str]:
        return [m.url for m in some if m.name != me and m.trees.get(digest) == state]

    there = among("there", members)
    there = there if rank < _COPIES * len(there) else []
    turn = place % len(there) if there else 0
    running = among("under way", members)
    before = among("missing", members[:place])
    return (*there[turn:], *there[:turn], *running, *reversed(before[-_COPIES:]))


def with_peers(work: Work, me: str, members: Sequence[Member]) -> Work:
    """Return a job that copies from peers if they have the result."""
    proof = work.job.proof
    if work.layers is not None:
        return _through_layers(work, work.layers, me, members)
    if not isinstance(proof, ReceiptProof):
        return work
    urls = peers_of(me, proof.digest, members)
    if work.job.kind == FETCH_JOB and urls:
        return replace(work, inputs=tuple(_add_peers(file, Peers(urls)) for file in work.inputs))
    receipts = {member.url: member.receipts.get(proof.digest) for member in members}
    built = tuple(FinishedTree(url, sha256) for url in urls if (sha256 := receipts[url]))
    return _or_copied(work, CopyPlan(proof.digest, built)) if built else work


def _through_layers(work: Work, layers: LayersPlan, me: str, members: Sequence[Member]) -> Work:
    """Return the job of an image that copies its base from peers, or shares it.

    A host without peers keeps the blobs for hosts that join later.
    """
    urls = peers_of(me, layers.digest, members)
    if not urls and layers.digest not in trees_to_share(me, members):
        return work
    order = replace(layers, peers=Peers(urls) if urls else None, keep=not urls)
    file = ManagedFile(f"{work.job.dir}/layers.json", text_of(order).encode())
    argv = (*work.job.argv[:2], tool.LAYERS_OPTION, file.path, *work.job.argv[2:])
    env = {**work.job.env, **PYTHON}
    job = replace(work.job, argv=argv, env=env)
    return replace(work, job=job, inputs=(*work.inputs, file))


def _add_peers(file: ManagedFile, peers: Peers) -> ManagedFile:
    order = replace(parse(FetchPlan, file.content.decode()), peers=peers)
    return replace(file, content=text_of(order).encode())


def _or_copied(work: Work, order: CopyPlan) -> Work:
    file = ManagedFile(f"{work.job.dir}/copy.json", text_of(order).encode())
    job = replace(work.job, argv=(*work.job.argv, orders.OR_COPY, file.path))
    return replace(work, job=job, inputs=(*work.inputs, file))
