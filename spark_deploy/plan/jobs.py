"""Jobs that bring checkpoints and images to a host, and what pruning and uninstall may remove."""

from __future__ import annotations

from collections.abc import Iterable
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
from spark_contract.orders import BuildPlan, DonorUrl, RequantizePlan
from spark_contract.paths import CURRENT_TOOLS, SITE, hub_token_file, job_dir
from spark_contract.status import Footprint, Keep
from spark_contract.units import DIGEST_LABEL

from spark_deploy.config.documents import digest_of
from spark_deploy.config.settings.host import BASE_PACKAGES, TOOLKIT_PACKAGES
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

DAEMON_JSON = "/etc/docker/daemon.json"
PYTHON = {"PYTHONPATH": f"{CURRENT_TOOLS}:{SITE}"}  # host tools and the builder's packages


@dataclass(frozen=True, slots=True)
class Work:
    job: Job
    inputs: tuple[ManagedFile, ...] = ()
    hub: HubSettings | None = None  # whose token the job sends
    layers: LayersPlan | None = None  # of the image that the job pulls or builds on

    def files(self) -> tuple[ManagedFile, ...]:
        job_json = ManagedFile(f"{self.job.dir}/job.json", text_of(self.job).encode())
        order = f"{units.drop_in_dir(self.job.unit)}/order.conf"
        return (*self.inputs, job_json, ManagedFile(order, self._order().encode()))

    def _order(self) -> str:
        required = [units.JOB.of(digest12) for digest12 in self.job.after]
        if self.job.kind in IMAGE_JOBS:
            required.append("docker.service")
        names = " ".join(required)
        text = f"Requires={names}\nAfter={names}\n" if required else ""
        if isinstance(self.job.proof, ReceiptProof):
            # A boot without that disk must not fill the root file system.
            text += needs_mounts(self.job.proof.receipt)
        return f"[Unit]\n{text}"


def needs_mounts(*paths: str) -> str:
    return f"RequiresMountsFor={' '.join(path.replace('%', '%%') for path in paths)}\n"


def _receipt(tree: SourcePlan | CheckpointPlan | RequantizedPlan) -> ReceiptProof:
    return ReceiptProof.of(tree.dir, tree.digest)


_COMMANDS = {  # of the checkpoint builder, with the name of the order in the job's directory
    FETCH_JOB: (orders.FETCH, "fetch.json"),
    REQUANTIZE_JOB: (orders.REQUANTIZE, "requantize.json"),
    CHECKPOINT_JOB: (orders.BUILD, "plan.json"),
}


def _builder_work(
    digest: str,
    kind: JobKind,
    title: str,
    order: FetchPlan | RequantizePlan | BuildPlan,
    total_bytes: int | None,
    hub: HubSettings | None,
    *,
    after: tuple[str, ...] = (),
    unless: ReceiptProof | None = None,
    inputs: tuple[ManagedFile, ...] = (),
) -> Work:
    command, name = _COMMANDS[kind]
    path = f"{job_dir(digest)}/{name}"
    proof = ReceiptProof.of(order.out, order.digest)
    argv = orders.argv(command, path)
    job = Job(digest, kind, title, argv, PYTHON, proof, total_bytes, after, unless)
    return Work(job, (*inputs, ManagedFile(path, text_of(order).encode())), hub=hub)


def fetch_job(source: SourcePlan, tree: CheckpointPlan | None = None) -> Work:
    """Download a repository at its commit; every file is checked against the lock.

    Args:
        source: the repository.
        tree: built from it; if it keeps no base, the download is skipped once it exists.
    """
    identity = {"kind": FETCH_JOB, "source": source.digest, "dir": source.dir}
    unless = None
    if tree is not None and not tree.keep_base:
        unless = _receipt(tree)
        identity["unless"] = tree.digest
    digest = digest_of(identity)
    pieces = tree is not None and tree.order.layout == "full"
    order = fetch_order(source, pieces=pieces, token_file=hub_token_file(digest))
    title = f"fetch {source.locked.repo}@{source.locked.commit[:12]}"
    size = source.size_bytes
    return _builder_work(digest, FETCH_JOB, title, order, size, source.hub, unless=unless)


def fetch_order(
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
        parallel=downloads.parallel,
        rate_limit_bytes_per_s=downloads.rate_limit_bytes_per_s,
        tries=downloads.tries,
        backoff_s=downloads.retry_pause_s,
        outage_s=downloads.outage_s,
    )


def requantize_job(plan: RequantizedPlan, image: Job) -> Work:
    """Quantise a 16-bit repository in the engine's image.

    The job downloads the repository itself: a host that copies the result does not need it.
    """
    digest = digest_of({"kind": REQUANTIZE_JOB, "tree": plan.digest, "dir": plan.dir})
    original = replace(plan.order.original, token_file=hub_token_file(digest))
    text = ManagedFile(f"{job_dir(digest)}/calibration.jsonl", plan.calibration.encode())
    order = replace(plan.order, original=original, calibration=text.path)
    title, hub = f"quantise {plan.order.name}-int4-{plan.digest[:12]}", plan.original.hub
    after = (image.digest12,)
    return _builder_work(
        digest, REQUANTIZE_JOB, title, order, None, hub, after=after, inputs=(text,)
    )


def checkpoint_job(plan: CheckpointPlan, base: Job) -> Work:
    """Build the hybrid checkpoint from the complete base and ranges of the donor."""
    digest = digest_of({"kind": CHECKPOINT_JOB, "checkpoint": plan.digest, "dir": plan.dir})
    order, donor, hub = plan.order, plan.order.donor, None
    if isinstance(donor, DonorUrl):
        order = replace(order, donor=replace(donor, token_file=hub_token_file(digest)))
        hub = (plan.base if isinstance(plan.base, SourcePlan) else plan.base.original).hub
    title, after = f"build {plan.order.name}-{plan.digest[:12]}", (base.digest12,)
    return _builder_work(digest, CHECKPOINT_JOB, title, order, plan.output_bytes, hub, after=after)


def discard_jobs_of(plan: HostPlan) -> tuple[Work, ...]:
    """Return the removal of bases that are not kept: the last work, after the proof."""
    return _unique(work for service in plan.served for work in _discard_jobs(service))


def _discard_jobs(pair: PairPlan) -> tuple[Work, ...]:
    tree = pair.checkpoint
    if tree is None or tree.keep_base or not isinstance(tree.base, SourcePlan):
        return ()
    job = Job(
        digest=digest_of({"kind": DISCARD_JOB, "base": tree.base.dir, "tree": tree.dir}),
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
    """Build the engine image, or pull it if it needs no plugin.

    Args:
        plan: the image.
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
    files = (ManagedFile(f"{inside}/{file.path}", file.content, file.mode) for file in context)
    return Work(job, tuple(files) if plan.plugin else (), layers=plan.layers)


def jobs_of(pair: PairPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    """Return every job of a pair, in an order that respects ``after``."""
    companions = {companion.source.dir for companion in pair.beside}
    fetches = {
        source.dir: fetch_job(source, None if source.dir in companions else pair.checkpoint)
        for source in pair.fetched
    }
    image, tree = image_job(pair.image, context), pair.checkpoint
    if pair.requantized is not None:
        made = requantize_job(pair.requantized, image.job)
        built = (checkpoint_job(tree, made.job),) if tree else ()
        return (*fetches.values(), image, made, *built)
    built = (checkpoint_job(tree, fetches[tree.base.dir].job),) if tree else ()
    return (*fetches.values(), *built, image)


def served_jobs_of(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    return _unique(work for service in plan.served for work in jobs_of(service, context))


def ready_jobs_of(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Work, ...]:
    served = {work.job.digest for work in served_jobs_of(plan, context)}
    jobs = _unique(work for pair in plan.ready for work in jobs_of(pair, context))
    return tuple(work for work in jobs if work.job.digest not in served)


def _unique(works: Iterable[Work]) -> tuple[Work, ...]:
    return tuple({work.job.digest: work for work in works}.values())


def ready_name(job: Job) -> str:
    """Return the name of the operation that prepares a pair."""
    return f"Have ready: {job.title}"


def keep_of(plan: HostPlan) -> Keep:
    releases = [service.serve for service in plan.served]
    releases += [scheduled.release for scheduled in plan.schedule]
    folders = {mount.source for release in releases for mount in release.engine.mounts}
    images = {plan.docker.check_image}
    for pair in (*plan.served, *plan.ready):
        # The 16-bit repository is not needed once its INT4 checkpoint exists.
        folders |= {pair.requantized.dir} if pair.requantized else set()
        folders |= {pair.cache_dir, pair.tree.dir, *(source.dir for source in pair.fetched)}
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


def footprint_of(
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
        files: managed files of the base role.
        shared_files: files that a deploy may change and that may have existed before.
        masked: units that a deploy masks.
        access_files: SSH access of the controller.
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
        packages=(*BASE_PACKAGES, "earlyoom", NJS),
        engine_packages=settings.docker.packages,
        gpu_packages=(*TOOLKIT_PACKAGES, settings.cuda.package),
        docker_users=docker.users,
        access_files=access_files,
        models=settings.uninstall.models,
        engine=settings.uninstall.engine,
    )
