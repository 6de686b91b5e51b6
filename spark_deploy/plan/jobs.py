"""What leaving a host is about: everything that its settings would make there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_contract import orders, tool, units
from spark_contract.documents import text_of
from spark_contract.fetching import FetchFile, FetchPlan, LayersPlan
from spark_contract.job import (
    CHECKPOINT_JOB,
    DISCARD_JOB,
    FETCH_JOB,
    IMAGE_BUILD_JOB,
    IMAGE_JOBS,
    IMAGE_PULL_JOB,
    REQUANTIZE_JOB,
    AbsentProof,
    ImageProof,
    Job,
    JobKind,
    ReceiptProof,
)
from spark_contract.orders import DonorUrl
from spark_contract.paths import CURRENT_TOOLS, SITE, hub_token_file, job_dir
from spark_contract.status import Footprint, Keep
from spark_contract.units import DIGEST_LABEL

from spark_deploy.config.documents.digest import digest_of
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.types import (
    NJS,
    CheckpointPlan,
    HostPlan,
    ImagePlan,
    ManagedFile,
    PairPlan,
    RequantizedPlan,
    SourcePlan,
)

# The formats are the contract with the host tools: ``job.json`` (files/host), ``fetch.json`` and
# ``plan.json`` (files/checkpoint).


@dataclass(frozen=True, slots=True)
class Work:
    """A job with the files that lie beside its ``job.json``."""

    job: Job
    inputs: tuple[ManagedFile, ...] = ()
    hub: HubSettings | None = None  # whose token the job sends
    layers: LayersPlan | None = None  # of the image that the job makes or starts from

    def files(self) -> tuple[ManagedFile, ...]:
        """Return job.json, its inputs, and the unit's ordering."""
        described = ManagedFile(f"{self.job.dir}/job.json", text_of(self.job).encode())
        order = f"{units.drop_in_dir(self.job.unit)}/order.conf"
        return (*self.inputs, described, ManagedFile(order, self._order().encode()))

    def _order(self) -> str:
        """Return the drop-in that says what has to be there before the job."""
        before = [units.JOB.of(digest12) for digest12 in self.job.after]
        if self.job.kind in IMAGE_JOBS:
            before.append("docker.service")
        text = f"Requires={' '.join(before)}\nAfter={' '.join(before)}\n" if before else ""
        if isinstance(self.job.proof, ReceiptProof):
            # Else a boot without that disk would fill the root's.
            text += needs_mounts(self.job.proof.receipt)
        return f"[Unit]\n{text}"


def needs_mounts(*paths: str) -> str:
    """Return the line of a unit that waits for the file systems of ``paths``."""
    return f"RequiresMountsFor={' '.join(path.replace('%', '%%') for path in paths)}\n"


# Where the tools' packages and the builder's own are.
PYTHON = {"PYTHONPATH": f"{CURRENT_TOOLS}:{SITE}"}


def _receipt(tree: SourcePlan | CheckpointPlan | RequantizedPlan) -> ReceiptProof:
    return ReceiptProof.of(tree.dir, tree.digest)


def fetch_job(source: SourcePlan, tree: CheckpointPlan | None = None) -> Work:
    """Fetch one repository at its commit, every file checked against the lock.

    Args:
        source: the repository.
        tree: what is built from it; when that keeps no base, nothing is fetched once it is there.
    """
    identity = {"kind": FETCH_JOB, "source": source.digest, "dir": source.dir}
    unless = None
    if tree is not None and not tree.keep_base:
        unless = _receipt(tree)
        identity["unless"] = tree.digest
    digest = digest_of(identity)
    where = job_dir(digest)
    order = fetch_order(
        source,
        pieces=tree is not None and tree.order.layout == "full",
        token_file=hub_token_file(digest),
    )
    job = Job(
        digest=digest,
        kind=FETCH_JOB,
        title=f"fetch {source.locked.repo}@{source.locked.commit[:12]}",
        argv=orders.argv(orders.FETCH, f"{where}/fetch.json"),
        env=PYTHON,
        proof=_receipt(source),
        total_bytes=source.size_bytes,
        after=(),
        unless=unless,
    )
    files = (ManagedFile(f"{where}/fetch.json", text_of(order).encode()),)
    return Work(job, files, hub=source.hub)


def fetch_order(
    source: SourcePlan, *, pieces: bool = False, token_file: str | None = None
) -> FetchPlan:
    """Return what the fetcher is told of a repository."""
    locked, hub, downloads = source.locked, source.hub, source.downloads
    return FetchPlan(
        digest=source.digest,
        name=locked.repo,
        commit=locked.commit,
        out=source.dir,
        files=tuple(
            FetchFile(one.path, one.size_bytes, one.sha256, one.git_sha1) for one in locked.files
        ),
        urls=tuple(
            f"{root.rstrip('/')}/{locked.repo}/resolve/{locked.commit}/"
            for root in (*hub.mirrors, hub.endpoint)
        ),
        pieces=pieces,
        look_in=downloads.look_in,
        token_file=token_file,
        parallel=downloads.parallel,
        rate_limit_bytes_per_s=downloads.rate_limit_bytes_per_s,
        tries=downloads.tries,
        backoff_s=downloads.retry_pause_s,
        outage_s=downloads.outage_s,
    )


def requantize_job(plan: RequantizedPlan, image: Job) -> Work:
    """Quantise a 16-bit repository in the engine's image.

    It fetches that repository itself: a host that copies the result needs nothing of it.
    """
    digest = digest_of({"kind": REQUANTIZE_JOB, "tree": plan.digest, "dir": plan.dir})
    where = job_dir(digest)
    job = Job(
        digest=digest,
        kind=REQUANTIZE_JOB,
        title=f"quantise {plan.order.name}-int4-{plan.digest[:12]}",
        argv=orders.argv(orders.REQUANTIZE, f"{where}/requantize.json"),
        env=PYTHON,
        proof=_receipt(plan),
        total_bytes=None,
        after=(image.digest12,),
    )
    original = replace(plan.order.original, token_file=hub_token_file(digest))
    text = ManagedFile(f"{where}/calibration.jsonl", plan.calibration.encode())
    order = replace(plan.order, original=original, calibration=text.path)
    files = (text, ManagedFile(f"{where}/requantize.json", text_of(order).encode()))
    return Work(job, files, hub=plan.original.hub)


def checkpoint_job(plan: CheckpointPlan, base: Job) -> Work:
    """Build the hybrid tree from the whole base and ranges of the donor."""
    digest = digest_of({"kind": CHECKPOINT_JOB, "checkpoint": plan.digest, "dir": plan.dir})
    where = job_dir(digest)
    job = Job(
        digest=digest,
        kind=CHECKPOINT_JOB,
        title=f"build {plan.order.name}-{plan.digest[:12]}",
        argv=orders.argv(orders.BUILD, f"{where}/plan.json"),
        env=PYTHON,
        proof=_receipt(plan),
        total_bytes=plan.output_bytes,
        after=(base.digest12,),
    )
    order, donor, hub = plan.order, plan.order.donor, None
    if isinstance(donor, DonorUrl):
        order = replace(order, donor=replace(donor, token_file=hub_token_file(digest)))
        hub = (plan.base if isinstance(plan.base, SourcePlan) else plan.base.original).hub
    files = (ManagedFile(f"{where}/plan.json", text_of(order).encode()),)
    return Work(job, files, hub=hub)


def discard_jobs_of(plan: HostPlan) -> tuple[Work, ...]:
    """Return the removal of bases that are not kept: the last work, after the proof."""
    found = {work.job.digest: work for one in plan.served for work in _discard_jobs(one)}
    return tuple(found.values())


def _discard_jobs(pair: PairPlan) -> tuple[Work, ...]:
    tree = pair.checkpoint
    if tree is None or tree.keep_base or not isinstance(tree.base, SourcePlan):
        return ()
    digest = digest_of({"kind": DISCARD_JOB, "base": tree.base.dir, "tree": tree.dir})
    job = Job(
        digest=digest,
        kind=DISCARD_JOB,
        title=f"remove {tree.base.locked.repo}@{tree.base.locked.commit[:12]}",
        argv=orders.argv(orders.DISCARD, tree.base.dir, orders.TREE, tree.dir),
        env=PYTHON,
        proof=AbsentProof(tree.base.dir),
        total_bytes=tree.output_bytes,
        after=(),
    )
    return (Work(job),)


def image_job(plan: ImagePlan, context: tuple[ManagedFile, ...]) -> Work:
    """Build the engine image, or pull it where no plugin is wanted.

    Args:
        plan: the image slice.
        context: the build context, with paths relative to its root.
    """
    kind: JobKind = IMAGE_BUILD_JOB if plan.plugin else IMAGE_PULL_JOB
    digest = digest_of({"kind": kind, "image": plan.digest})
    inside = f"{job_dir(digest)}/context"
    pull = (tool.HOST_TOOL, tool.IMAGE, plan.base)
    build = (
        *pull, "docker", "build", "--network", "none", "--tag", plan.tag,
        "--build-arg", f"BASE={plan.base}", "--label", f"{DIGEST_LABEL}={plan.digest}", inside,
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
    if not plan.plugin:
        return Work(job, layers=plan.layers)
    files = (ManagedFile(f"{inside}/{file.path}", file.content, file.mode) for file in context)
    return Work(job, tuple(files), layers=plan.layers)


def jobs_of(pair: PairPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    """Return every job of one model and profile, in an order that respects ``after``."""
    beside = {one.source.dir for one in pair.beside}
    fetches = {
        source.dir: fetch_job(source, None if source.dir in beside else pair.checkpoint)
        for source in pair.fetched
    }
    image, made = image_job(pair.image, context), pair.requantized
    if made is not None:
        tree = requantize_job(made, image.job)
        built = (checkpoint_job(pair.checkpoint, tree.job),) if pair.checkpoint else ()
        return (*fetches.values(), image, tree, *built)
    jobs = list(fetches.values())
    if pair.checkpoint is not None:
        jobs.append(checkpoint_job(pair.checkpoint, fetches[pair.checkpoint.base.dir].job))
    return (*jobs, image)


def served_jobs_of(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    """Return the jobs of all services of a host, each once."""
    found = {work.job.digest: work for one in plan.served for work in jobs_of(one, context)}
    return tuple(found.values())


def ready_jobs_of(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    """Return the jobs that only the pairs to have ready need."""
    served = {work.job.digest for work in served_jobs_of(plan, context)}
    more = {
        work.job.digest: work
        for pair in plan.ready
        for work in jobs_of(pair, context)
        if work.job.digest not in served
    }
    return tuple(more.values())


def ready_name(job: Job) -> str:
    """Return what the operation for a job of a pair to have ready is called."""
    return f"Have ready: {job.title}"


def keep_of(plan: HostPlan) -> Keep:
    """Return what ``spark-host prune`` reads."""
    releases = [one.serve for one in plan.served] + [one.release for one in plan.schedule]
    folders = {mount.source for release in releases for mount in release.engine.mounts}
    images = {plan.docker.check_image}
    for pair in (*plan.served, *plan.ready):
        # Of a 16-bit repository nothing is needed once its INT4 tree is there.
        made = {pair.requantized.dir} if pair.requantized else set()
        folders |= {pair.cache_dir, pair.tree.dir, *(one.dir for one in pair.fetched)} | made
        images |= {pair.image.tag, pair.image.base}
    return Keep(
        releases_kept=plan.releases_kept,
        releases=frozenset(release.name for release in releases),
        folders=frozenset(folders),
        images=frozenset(images),
        models_dir=plan.paths.models_dir,
        sources_dir=plan.paths.sources_dir,
        cache_dir=plan.paths.cache_dir,
    )


DAEMON_JSON = "/etc/docker/daemon.json"


def wanted_of(
    settings: Settings,
    *,
    files: tuple[str, ...],
    shared_files: tuple[str, ...],
    masked: tuple[str, ...],
    access_files: tuple[str, ...],
) -> Footprint:
    """Return what ``spark-host manifest`` and ``uninstall`` read.

    Args:
        settings: of the host.
        files: files of host care, ours alone.
        shared_files: files that a deploy may change and somebody else may have made.
        masked: units that a deploy masks.
        access_files: how this project logs in.
    """
    docker = settings.docker
    return Footprint(
        models_dir=settings.paths.models_dir,
        sources_dir=settings.paths.sources_dir,
        cache_dir=settings.paths.cache_dir,
        files=files,
        shared_files=(DAEMON_JSON, *shared_files),
        daemon_json=DAEMON_JSON,
        daemon_keys=tuple(sorted({*docker.daemon, "runtimes", "insecure-registries"})),
        masked=masked,
        packages=(*settings.base.packages, "earlyoom", NJS),
        engine_packages=docker.packages,
        gpu_packages=(*docker.toolkit_packages, settings.cuda.package),
        docker_users=docker.users,
        access_files=access_files,
        models=settings.uninstall.models,
        engine=settings.uninstall.engine,
    )
