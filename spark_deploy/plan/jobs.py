"""Plan the jobs that prepare checkpoints and images on a host, and list what pruning keeps."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spark_contract import builder_api, tool, units
from spark_contract.builder_api import BuildPlan, DonorUrl, RankPlan, RequantizePlan
from spark_contract.documents import to_json
from spark_contract.fetching import (
    FetchFile,
    FetchPlan,
    LayersPlan,
)
from spark_contract.job import (
    CHECKPOINT_JOB,
    DISCARD_JOB,
    FETCH_JOB,
    IMAGE_BUILD_JOB,
    IMAGE_JOBS,
    IMAGE_PULL_JOB,
    RANK_JOB,
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
    VocabularyPlan,
)

DAEMON_JSON = "/etc/docker/daemon.json"
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

    @property
    def shared(self) -> ReceiptProof | None:
        """The tree that other hosts may copy, if any. Each host ranks tokens itself."""
        proof, is_shared = self.job.proof, self.job.kind != RANK_JOB
        return proof if isinstance(proof, ReceiptProof) and is_shared else None

    def _dependency_drop_in(self) -> str:
        required = [units.JOB.unit(digest12) for digest12 in self.job.after]
        if self.job.kind in IMAGE_JOBS:
            required.append("docker.service")
        names = " ".join(required)
        text = f"Requires={names}\nAfter={names}\n" if required else ""
        if isinstance(self.job.proof, ReceiptProof):
            # If the receipt's disk is not mounted, the job must not fill the root filesystem.
            text += needs_mounts(self.job.proof.receipt)
        return f"[Unit]\n{text}"


def needs_mounts(*paths: str) -> str:
    return f"RequiresMountsFor={' '.join(path.replace('%', '%%') for path in paths)}\n"


_COMMANDS = {  # of the checkpoint builder, with the name of its plan in the job's directory
    FETCH_JOB: (builder_api.FETCH, "fetch.json"),
    REQUANTIZE_JOB: (builder_api.REQUANTIZE, "requantize.json"),
    CHECKPOINT_JOB: (builder_api.BUILD, "plan.json"),
    RANK_JOB: (builder_api.RANK, "rank.json"),
}


def _builder_work(
    digest: str,
    kind: JobKind,
    title: str,
    job_plan: FetchPlan | RequantizePlan | BuildPlan | RankPlan,
    total_bytes: int | None,
    hub: HubSettings | None,
    *,
    after: tuple[str, ...] = (),
    unless: ReceiptProof | None = None,
    inputs: tuple[ManagedFile, ...] = (),
) -> Work:
    command, file_name = _COMMANDS[kind]
    path = f"{job_dir(digest)}/{file_name}"
    proof = ReceiptProof.for_tree(job_plan.out, job_plan.digest)
    argv = builder_api.builder_argv(command, path)
    job = Job(digest, kind, title, argv, PYTHON, proof, total_bytes, after, unless)
    return Work(job, (*inputs, ManagedFile(path, to_json(job_plan).encode())), hub=hub)


def fetch_job(source: SourcePlan, tree: CheckpointPlan | None = None) -> Work:
    """Return the job that downloads a repository at its commit and checks it against the lock.

    ``tree`` is the checkpoint to build from the download. If that checkpoint exists and does not
    keep its base, the job downloads nothing.
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
    """Return the job that builds a checkpoint from its base and byte ranges of the FP8 source."""
    digest = digest_of({"kind": CHECKPOINT_JOB, "checkpoint": plan.digest, "dir": plan.dir})
    build, donor, hub = plan.build, plan.build.donor, None
    if isinstance(donor, DonorUrl):
        build = replace(build, donor=replace(donor, token_file=hub_token_file(digest)))
        source = plan.base if isinstance(plan.base, SourcePlan) else plan.base.original
        hub = source.hub
    title, after = built_title(plan), (base.digest12,)
    return _builder_work(digest, CHECKPOINT_JOB, title, build, plan.output_bytes, hub, after=after)


def rank_job(plan: VocabularyPlan, checkpoint: Job) -> Work:
    """Return the job that ranks tokens with the tokenizer of the checkpoint."""
    identity = {"order": plan.order.digest, "out": plan.order.out, "from": plan.order.tokenizer}
    digest = digest_of({"kind": RANK_JOB, **identity})
    text = ManagedFile(f"{job_dir(digest)}/text.txt", plan.text.encode(), 0o600)
    order, title = replace(plan.order, text=text.path), f"rank {plan.order.tokens} draft tokens"
    after = (checkpoint.digest12,)
    return _builder_work(digest, RANK_JOB, title, order, None, None, after=after, inputs=(text,))


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

    The paths in ``context`` are relative to the build context.
    """
    kind: JobKind = IMAGE_BUILD_JOB if plan.plugin else IMAGE_PULL_JOB
    digest = digest_of({"kind": kind, "image": plan.digest})
    context_dir = f"{job_dir(digest)}/context"
    pull = (tool.HOST_TOOL, tool.IMAGE, plan.base)
    build = (
        *pull, "docker", "build", "--network", "none", "--tag", plan.tag, "--build-arg",
        f"BASE={plan.base}", "--label", f"{units.DIGEST_LABEL}={plan.digest}", context_dir,
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
    files = (ManagedFile(f"{context_dir}/{file.path}", file.content, file.mode) for file in context)
    return Work(job, tuple(files) if plan.plugin else (), layers=plan.layers)


def plan_jobs(model: ModelPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    """Return the jobs that prepare the files and the image of a model."""
    companions = {companion.source.dir for companion in model.companions}
    fetches = {
        source.dir: fetch_job(source, None if source.dir in companions else model.checkpoint)
        for source in model.fetched
    }
    image, tree = image_job(model.image, context), model.checkpoint
    requantize = model.requantized and requantize_job(model.requantized, image.job)
    base = requantize or (tree and fetches[tree.base.dir])
    built = (checkpoint_job(tree, base.job),) if tree and base else ()
    served = built[0] if built else (requantize or fetches[model.served_checkpoint.dir])
    ranked = (rank_job(model.vocabulary, served.job),) if model.vocabulary else ()
    # Quantizing runs in the image, which must come first.
    others = (image, requantize, *built) if requantize else (*built, image)
    return (*fetches.values(), *others, *ranked)


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
    """Return the releases, folders and images that pruning keeps."""
    releases = [service.release for service in plan.served]
    releases += [scheduled.release for scheduled in plan.schedule]
    folders = {mount.source for release in releases for mount in release.engine.mounts}
    images = {plan.docker.check_image}
    for model in (*plan.served, *plan.ready):
        # The 16-bit repository is not needed once the INT4 checkpoint exists.
        if model.requantized:
            folders.add(model.requantized.dir)
        if model.vocabulary:
            folders.add(model.vocabulary.order.out)
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
