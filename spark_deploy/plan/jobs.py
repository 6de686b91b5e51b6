"""Plan the jobs that prepare checkpoints and images on a host, and list what pruning keeps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spark_contract import builder_api, tool, units
from spark_contract.builder_api import BuildPlan, DonorUrl, RequantizePlan
from spark_contract.documents import parse, to_json
from spark_contract.fetching import (
    CopyPlan,
    FetchFile,
    FetchPlan,
    FinishedTree,
    LayersPlan,
    Peers,
    SharedTree,
)
from spark_contract.job import (
    CHECKPOINT_JOB,
    DISCARD_JOB,
    FETCH_JOB,
    IMAGE_BUILD_JOB,
    IMAGE_JOBS,
    IMAGE_PULL_JOB,
    REQUANTIZE_JOB,
    AbsenceProof,
    ImageProof,
    Job,
    JobKind,
    ReceiptProof,
)
from spark_contract.paths import CURRENT_TOOLS, SITE, hub_token_file, job_dir
from spark_contract.status import KeepList

from spark_deploy.config.documents import digest_of
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.plan.types import (
    CheckpointPlan,
    HostPlan,
    ImagePlan,
    ManagedFile,
    ModelPlan,
    RequantizedPlan,
    SourcePlan,
)

DAEMON_JSON = "/etc/docker/daemon.json"
# Concurrent copies per host; a local network is ten times as fast as most uplinks.
_MAX_COPIES = 8
# "not needed": absent, but the job's result exists.
State = Literal["complete", "running", "missing", "not needed"]
PYTHON = {"PYTHONPATH": f"{CURRENT_TOOLS}:{SITE}"}  # host tools and the builder's packages


@dataclass(frozen=True, slots=True)
class Work:
    job: Job
    inputs: tuple[ManagedFile, ...] = ()
    hub: HubSettings | None = None  # the job sends the token of this hub
    layers: LayersPlan | None = None  # of the image that the job pulls or builds on

    def files(self) -> tuple[ManagedFile, ...]:
        job_json = ManagedFile(f"{self.job.dir}/job.json", to_json(self.job).encode())
        drop_in = f"{units.drop_in_dir(self.job.unit)}/order.conf"
        return (*self.inputs, job_json, ManagedFile(drop_in, self._dependency_drop_in().encode()))

    def _dependency_drop_in(self) -> str:
        required = [units.JOB.unit(digest12) for digest12 in self.job.after]
        if self.job.kind in IMAGE_JOBS:
            required.append("docker.service")
        names = " ".join(required)
        text = f"Requires={names}\nAfter={names}\n" if required else ""
        if isinstance(self.job.proof, ReceiptProof):
            # If that disk is not mounted at boot, the job must not fill the root filesystem.
            text += needs_mounts(self.job.proof.receipt)
        return f"[Unit]\n{text}"


def needs_mounts(*paths: str) -> str:
    return f"RequiresMountsFor={' '.join(path.replace('%', '%%') for path in paths)}\n"


_COMMANDS = {  # of the checkpoint builder, with the name of its plan in the job's directory
    FETCH_JOB: (builder_api.FETCH, "fetch.json"),
    REQUANTIZE_JOB: (builder_api.REQUANTIZE, "requantize.json"),
    CHECKPOINT_JOB: (builder_api.BUILD, "plan.json"),
}


def _builder_work(
    digest: str,
    kind: JobKind,
    title: str,
    job_plan: FetchPlan | RequantizePlan | BuildPlan,
    total_bytes: int | None,
    hub: HubSettings | None,
    *,
    after: tuple[str, ...] = (),
    unless: ReceiptProof | None = None,
    inputs: tuple[ManagedFile, ...] = (),
) -> Work:
    command, name = _COMMANDS[kind]
    path = f"{job_dir(digest)}/{name}"
    proof = ReceiptProof.for_tree(job_plan.out, job_plan.digest)
    argv = builder_api.builder_argv(command, path)
    job = Job(digest, kind, title, argv, PYTHON, proof, total_bytes, after, unless)
    return Work(job, (*inputs, ManagedFile(path, to_json(job_plan).encode())), hub=hub)


def fetch_job(source: SourcePlan, tree: CheckpointPlan | None = None) -> Work:
    """Return the job that downloads a repository at its commit and checks it against the lock.

    ``tree`` is the checkpoint built from it; if it exists and the base is not kept, the download is
    unnecessary.
    """
    identity = {"kind": FETCH_JOB, "source": source.digest, "dir": source.dir}
    unless = None
    if tree is not None and not tree.keep_base:
        unless = ReceiptProof.for_tree(tree.dir, tree.digest)
        identity["unless"] = tree.digest
    digest = digest_of(identity)
    pieces = tree is not None and tree.build.layout == "full"
    job_plan = fetch_plan(source, pieces=pieces, token_file=hub_token_file(digest))
    title = f"fetch {source.locked.repo}@{source.locked.commit[:12]}"
    size = source.size_bytes
    return _builder_work(digest, FETCH_JOB, title, job_plan, size, source.hub, unless=unless)


def fetch_plan(
    source: SourcePlan, *, pieces: bool = False, token_file: str | None = None
) -> FetchPlan:
    locked, hub, downloads = source.locked, source.hub, source.downloads
    return FetchPlan(
        digest=source.digest,
        name=locked.repo,
        commit=locked.commit,
        out=source.dir,
        files=tuple(
            FetchFile(file.path, file.size_bytes, file.sha256, file.git_sha1)
            for file in locked.files
        ),
        urls=tuple(
            f"{root.rstrip('/')}/{locked.repo}/resolve/{locked.commit}/"
            for root in (*hub.mirrors, hub.endpoint)
        ),
        pieces=pieces,
        look_in=downloads.look_in,
        token_file=token_file,
        parallel=4,
        rate_limit_bytes_per_s=downloads.rate_limit_bytes_per_s,
        tries=downloads.tries,
        outage_s=downloads.outage_s,
    )


def requantize_job(plan: RequantizedPlan, image: Job) -> Work:
    """Return the job that downloads and quantizes a 16-bit repository."""
    digest = digest_of({"kind": REQUANTIZE_JOB, "tree": plan.digest, "dir": plan.dir})
    original = replace(plan.build.original, token_file=hub_token_file(digest))
    text = ManagedFile(f"{job_dir(digest)}/calibration.jsonl", plan.calibration.encode())
    build = replace(plan.build, original=original, calibration=text.path)
    title, hub = f"quantize {plan.build.name}-int4-{plan.digest[:12]}", plan.original.hub
    after = (image.digest12,)
    return _builder_work(
        digest, REQUANTIZE_JOB, title, build, None, hub, after=after, inputs=(text,)
    )


def built_title(plan: CheckpointPlan) -> str:
    return f"build {plan.build.name}-{plan.digest[:12]}"


def checkpoint_job(plan: CheckpointPlan, base: Job) -> Work:
    """Return the job that builds a checkpoint from the base and ranges of the FP8 source."""
    digest = digest_of({"kind": CHECKPOINT_JOB, "checkpoint": plan.digest, "dir": plan.dir})
    build, donor, hub = plan.build, plan.build.donor, None
    if isinstance(donor, DonorUrl):
        build = replace(build, donor=replace(donor, token_file=hub_token_file(digest)))
        hub = (plan.base if isinstance(plan.base, SourcePlan) else plan.base.original).hub
    title, after = built_title(plan), (base.digest12,)
    return _builder_work(digest, CHECKPOINT_JOB, title, build, plan.output_bytes, hub, after=after)


def discard_jobs(plan: HostPlan) -> tuple[Work, ...]:
    trees = (service.checkpoint for service in plan.served)
    return _unique(
        _discard_job(tree, tree.base)
        for tree in trees
        if tree and not tree.keep_base and isinstance(tree.base, SourcePlan)
    )


def _discard_job(tree: CheckpointPlan, base: SourcePlan) -> Work:
    job = Job(
        digest=digest_of({"kind": DISCARD_JOB, "base": base.dir, "tree": tree.dir}),
        kind=DISCARD_JOB,
        title=f"remove {base.locked.repo}@{base.locked.commit[:12]}",
        argv=builder_api.builder_argv(builder_api.DISCARD, base.dir, builder_api.TREE, tree.dir),
        env=PYTHON,
        proof=AbsenceProof(base.dir),
        total_bytes=tree.output_bytes,
        after=(),
    )
    return Work(job)


def image_job(plan: ImagePlan, context: tuple[ManagedFile, ...]) -> Work:
    """Return the job that builds the engine image, or pulls it if the plugin is not used.

    ``context`` has paths relative to the build context.
    """
    kind: JobKind = IMAGE_BUILD_JOB if plan.plugin else IMAGE_PULL_JOB
    digest = digest_of({"kind": kind, "image": plan.digest})
    inside = f"{job_dir(digest)}/context"
    pull = (tool.HOST_TOOL, tool.IMAGE, plan.base)
    build = (
        *pull, "docker", "build", "--network", "none", "--tag", plan.tag, "--build-arg",
        f"BASE={plan.base}", "--label", f"{units.DIGEST_LABEL}={plan.digest}", inside,
    )  # fmt: skip
    job = Job(
        digest=digest,
        kind=kind,
        title=f"{'build' if plan.plugin else 'pull'} image {plan.tag}",
        argv=build if plan.plugin else pull,
        env={},
        proof=ImageProof(plan.tag, plan.digest if plan.plugin else None),
        total_bytes=plan.size_bytes,
        after=(),
        base=plan.base if plan.plugin else None,
    )
    files = (ManagedFile(f"{inside}/{file.path}", file.content, file.mode) for file in context)
    return Work(job, tuple(files) if plan.plugin else (), layers=plan.layers)


def plan_jobs(model: ModelPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    companions = {companion.source.dir for companion in model.companions}
    fetches = {
        source.dir: fetch_job(source, None if source.dir in companions else model.checkpoint)
        for source in model.fetched
    }
    image, tree = image_job(model.image, context), model.checkpoint
    requantize = model.requantized and requantize_job(model.requantized, image.job)
    base = requantize or (tree and fetches[tree.base.dir])
    built = (checkpoint_job(tree, base.job),) if tree and base else ()
    return (*fetches.values(), *((image, requantize, *built) if requantize else (*built, image)))


def served_jobs(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    return _unique(work for service in plan.served for work in plan_jobs(service, context))


def ready_jobs(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    served = {work.job.digest for work in served_jobs(plan, context)}
    jobs = _unique(work for model in plan.ready for work in plan_jobs(model, context))
    return tuple(work for work in jobs if work.job.digest not in served)


def _unique(works: Iterable[Work]) -> tuple[Work, ...]:
    return tuple({work.job.digest: work for work in works}.values())


def preparation_name(job: Job) -> str:
    return f"Have ready: {job.title}"


def keep_list(plan: HostPlan) -> KeepList:
    releases = [service.release for service in plan.served]
    releases += [scheduled.release for scheduled in plan.schedule]
    folders = {mount.source for release in releases for mount in release.engine.mounts}
    images = {plan.docker.check_image}
    for model in (*plan.served, *plan.ready):
        # The 16-bit repository is not needed once the INT4 checkpoint exists.
        folders |= {model.requantized.dir} if model.requantized else set()
        folders |= {
            model.cache_dir,
            model.served_checkpoint.dir,
            *(source.dir for source in model.fetched),
        }
        images |= {model.image.tag, model.image.base}
    return KeepList(
        releases_kept=plan.releases_kept,
        releases=tuple(sorted({release.name for release in releases})),
        folders=tuple(sorted(folders)),
        images=tuple(sorted(images)),
        models_dir=plan.paths.models_dir,
        sources_dir=plan.paths.sources_dir,
        cache_dir=plan.paths.cache_dir,
    )


# Peer download: a host downloads, other hosts copy from it.


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
        proof, name = work.job.proof, work.job.digest12
        if isinstance(proof, ReceiptProof):
            unfinished = work.job.kind == FETCH_JOB
            trees[proof.digest] = SharedTree(proof.digest, proof.tree, name, unfinished)
        elif (layers := work.layers) is not None:
            tree = SharedTree(layers.digest, layers.out, name, unfinished=True)
            trees.setdefault(layers.digest, tree)
    return tuple(trees.values())


def trees_to_share(host: str, members: Sequence[Member]) -> frozenset[str]:
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
    that are downloading it, and preceding hosts that start now, the nearest first. So hosts never
    wait for each other, and the first host uses the hub. No host sends more than 8 copies at once.
    """
    position = [member.name for member in members].index(host)
    rank = sum(member.trees.get(digest) == "missing" for member in members[:position])

    def urls_of(state: State, candidates: Sequence[Member]) -> list[str]:
        return [m.url for m in candidates if m.name != host and m.trees.get(digest) == state]

    complete = urls_of("complete", members)
    complete = complete if rank < _MAX_COPIES * len(complete) else []
    turn = position % len(complete) if complete else 0
    running = urls_of("running", members)
    preceding = urls_of("missing", members[:position])
    return (*complete[turn:], *complete[:turn], *running, *reversed(preceding[-_MAX_COPIES:]))


def with_peers(work: Work, host: str, members: Sequence[Member]) -> Work:
    """Return a job that copies from peers if they have the result."""
    proof = work.job.proof
    if work.layers is not None:
        return _share_layers(work, work.layers, host, members)
    if not isinstance(proof, ReceiptProof):
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
    """Return the job of an image with layers of the base from peers, or shared with them.

    A host without peers keeps the blobs for hosts that join later.
    """
    urls = peer_urls(host, layers.digest, members)
    if not urls and layers.digest not in trees_to_share(host, members):
        return work
    copied = replace(layers, peers=Peers(urls) if urls else None, keep=not urls)
    file = ManagedFile(f"{work.job.dir}/layers.json", to_json(copied).encode())
    argv = (*work.job.argv[:2], tool.LAYERS_OPTION, file.path, *work.job.argv[2:])
    job = replace(work.job, argv=argv, env={**work.job.env, **PYTHON})
    return replace(work, job=job, inputs=(*work.inputs, file))
