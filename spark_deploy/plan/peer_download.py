"""Which host lends which tree to whom: one fetches, the others take from it. Pure."""

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

# Copies that one host sends at most where many ask; a network is ten times as fast as most lines.
_ASKERS = 8
# "needless": it is not there, and what it would be for is.
State = Literal["there", "under way", "missing", "needless"]


@dataclass(frozen=True, slots=True)
class Member:
    """A host of the run, with the trees that it has or shall have."""

    name: str
    url: str  # where it lends
    trees: dict[str, State]  # by digest
    receipts: dict[str, str] = field(default_factory=dict)  # sha256 of those of built trees


def shared_trees(jobs: Iterable[Work]) -> tuple[SharedTree, ...]:
    """Return the trees of jobs that peers can use: of those that are built only whole ones.

    Of an image they are the blobs of its base; those of several jobs are one tree.
    """
    found: dict[str, SharedTree] = {}
    for work in jobs:
        proof, name = work.job.proof, work.job.digest12
        if isinstance(proof, ReceiptProof):
            whole_only = work.job.kind != FETCH_JOB
            found[proof.digest] = SharedTree(proof.digest, proof.tree, name, not whole_only)
        elif work.layers is not None:
            layers = work.layers
            found.setdefault(
                layers.digest, SharedTree(layers.digest, layers.out, name, unfinished=True)
            )
    return tuple(found.values())


def trees_to_share(me: str, members: Sequence[Member]) -> frozenset[str]:
    """Return the trees of a host that another one lacks."""
    mine = next(one.trees for one in members if one.name == me)
    return frozenset(
        digest
        for digest in mine
        for other in members
        if other.name != me and lacks(other.trees.get(digest, "there"))
    )


def lacks(state: State) -> bool:
    """Return whether a host wants a tree that it does not have."""
    return state in ("under way", "missing")


def peers_of(me: str, digest: str, members: Sequence[Member]) -> tuple[str, ...]:
    """Return where a host asks for a tree, in that order.

    First who has it, beginning with another one for each asker. Then who is at it, and of those
    that begin now the ones before this host, the nearest first: so none waits for one that waits
    for it, and the first of all goes to the hub. Among many hosts only the first ask who has it,
    and each one the nearest few: nobody sends more copies than its network carries in the time
    that the line brings one.
    """
    place = [one.name for one in members].index(me)
    rank = sum(one.trees.get(digest) == "missing" for one in members[:place])

    def among(state: State, some: Sequence[Member]) -> list[str]:
        return [one.url for one in some if one.name != me and one.trees.get(digest) == state]

    there = among("there", members)
    there = there if rank < _ASKERS * len(there) else []
    turn = place % len(there) if there else 0
    at_it = among("under way", members)
    before = among("missing", members[:place])
    return (*there[turn:], *there[:turn], *at_it, *reversed(before[-_ASKERS:]))


def with_peers(work: Work, me: str, members: Sequence[Member]) -> Work:
    """Return a job that knows which hosts have what it makes."""
    proof = work.job.proof
    if work.layers is not None:
        return _through_layers(work, work.layers, me, members)
    if not isinstance(proof, ReceiptProof):
        return work
    urls = peers_of(me, proof.digest, members)
    if work.job.kind == FETCH_JOB and urls:
        return replace(work, inputs=tuple(_naming(file, Peers(urls)) for file in work.inputs))
    receipts = {one.url: one.receipts.get(proof.digest) for one in members}
    there = tuple(FinishedTree(url, known) for url in urls if (known := receipts[url]))
    return _or_copied(work, CopyPlan(proof.digest, there)) if there else work


def _through_layers(work: Work, layers: LayersPlan, me: str, members: Sequence[Member]) -> Work:
    """Return the job of an image that takes its base from peers, or has it to lend.

    Who asks no peer keeps the blobs, so that hosts which come later find them in the lab.
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


def _naming(file: ManagedFile, peers: Peers) -> ManagedFile:
    order = replace(parse(FetchPlan, file.content.decode()), peers=peers)
    return replace(file, content=text_of(order).encode())


def _or_copied(work: Work, order: CopyPlan) -> Work:
    file = ManagedFile(f"{work.job.dir}/copy.json", text_of(order).encode())
    job = replace(work.job, argv=(*work.job.argv, orders.OR_COPY, file.path))
    return replace(work, job=job, inputs=(*work.inputs, file))
