"""Plan peer downloads: a host downloads, other hosts copy from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spark_contract import builder_api, tool
from spark_contract.documents import parse, to_json
from spark_contract.fetching import (
    CopyPlan,
    FetchPlan,
    FinishedTree,
    LayersPlan,
    Peers,
    SharedTree,
)
from spark_contract.job import FETCH_JOB

from spark_deploy.plan.jobs import PYTHON, Work
from spark_deploy.plan.types import ManagedFile

# Concurrent copies per host; a local network is ten times as fast as most uplinks.
_MAX_COPIES = 8
# "not needed": absent, but the job's result exists.
State = Literal["complete", "running", "missing", "not needed"]


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    url: str
    trees: dict[str, State]
    receipts: dict[str, str] = field(default_factory=dict)  # sha256, of built trees


def shared_trees(jobs: Iterable[Work]) -> tuple[SharedTree, ...]:
    """Return the folders that jobs can share: downloads in progress and complete builds."""
    trees: dict[str, SharedTree] = {}
    for work in jobs:
        name = work.job.digest12
        if proof := work.shared:
            unfinished = work.job.kind == FETCH_JOB
            trees[proof.digest] = SharedTree(proof.digest, proof.tree, name, unfinished)
        elif (layers := work.layers) is not None:
            tree = SharedTree(layers.digest, layers.out, name, unfinished=True)
            trees.setdefault(layers.digest, tree)
    return tuple(trees.values())


def trees_to_share(host: str, members: Sequence[Member]) -> frozenset[str]:
    """Return the digests of this host's trees that another host lacks."""
    states = next(member.trees for member in members if member.name == host)
    return frozenset(
        digest
        for digest in states
        for other in members
        if other.name != host and is_incomplete(other.trees.get(digest, "complete"))
    )


def is_incomplete(state: State) -> bool:
    return state in ("running", "missing")


def peer_urls(host: str, digest: str, members: Sequence[Member]) -> tuple[str, ...]:
    """Return the URLs from which a host copies a tree, in the order to try.

    Hosts with the complete tree come first, in a different order for each client. Then come hosts
    that are downloading it, and preceding hosts that start now, the nearest first. So no two hosts
    wait for each other, and the first host uses the hub. No host sends more than 8 copies at once.
    """
    position = [member.name for member in members].index(host)
    earlier = sum(member.trees.get(digest) == "missing" for member in members[:position])

    def urls_of(state: State, candidates: Sequence[Member]) -> list[str]:
        return [m.url for m in candidates if m.name != host and m.trees.get(digest) == state]

    complete = urls_of("complete", members)
    complete = complete if earlier < _MAX_COPIES * len(complete) else []
    start = position % len(complete) if complete else 0
    running = urls_of("running", members)
    preceding = urls_of("missing", members[:position])
    return (*complete[start:], *complete[:start], *running, *reversed(preceding[-_MAX_COPIES:]))


def with_peers(work: Work, host: str, members: Sequence[Member]) -> Work:
    """Return a job that copies from peers if they have the result."""
    if work.layers is not None:
        return _share_layers(work, work.layers, host, members)
    if (proof := work.shared) is None:
        return work
    urls = peer_urls(host, proof.digest, members)
    if work.job.kind == FETCH_JOB and urls:
        [file] = work.inputs
        fetch = replace(parse(FetchPlan, file.content.decode()), peers=Peers(urls))
        return replace(work, inputs=(replace(file, content=to_json(fetch).encode()),))
    receipts = {member.url: member.receipts.get(proof.digest) for member in members}
    built = tuple(FinishedTree(url, sha256) for url in urls if (sha256 := receipts[url]))
    if not built:
        return work
    copy = to_json(CopyPlan(proof.digest, built)).encode()
    file = ManagedFile(f"{work.job.dir}/copy.json", copy)
    job = replace(work.job, argv=(*work.job.argv, builder_api.OR_COPY, file.path))
    return replace(work, job=job, inputs=(*work.inputs, file))


def _share_layers(work: Work, layers: LayersPlan, host: str, members: Sequence[Member]) -> Work:
    """Return an image's job that copies the base's layers from peers, or keeps them for peers.

    A host without peers keeps the blobs for hosts that join later.
    """
    urls = peer_urls(host, layers.digest, members)
    if not urls and layers.digest not in trees_to_share(host, members):
        return work
    shared_layers = replace(layers, peers=Peers(urls) if urls else None, keep=not urls)
    file = ManagedFile(f"{work.job.dir}/layers.json", to_json(shared_layers).encode())
    argv = (*work.job.argv[:2], tool.LAYERS_OPTION, file.path, *work.job.argv[2:])
    job = replace(work.job, argv=argv, env={**work.job.env, **PYTHON})
    return replace(work, job=job, inputs=(*work.inputs, file))
