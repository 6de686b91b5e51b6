"""The slow work: trees of weights and the engine's image, begun early and waited for late.

Each job is started unless its proof is there, and goes on beside the other steps of the deploy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyinfra.api.deploy import deploy
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB, IMAGE_JOBS, REQUANTIZE_JOB
from spark_contract.paths import PROXY
from spark_contract.units import PREPARE

from spark_deploy.config.settings.sources import FleetSettings, ProxySettings
from spark_deploy.hosts.commands import each
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.jobs import start_job, wait_for_jobs
from spark_deploy.hosts.peer_download import note_files, start_sharing, stop_sharing
from spark_deploy.hosts.proxy import configure_job_proxy
from spark_deploy.hosts.status import JobStates
from spark_deploy.hosts.tools import install_quantiser
from spark_deploy.plan.jobs import Work, ready_name

_REMOVAL_TIMEOUT_S = 3600  # every byte of the tree is read once before
_QUANTISING_TIMEOUT_S = 4 * 86400  # 40 hours are foreseen for 122B


def _start(jobs: Sequence[Work], release: str, named: Callable[[Work], str], *kinds: str) -> None:
    # All of them in each question, so that one answer serves every operation.
    names = tuple(work.job.digest12 for work in jobs)
    for work in each(work for work in jobs if not kinds or work.job.kind in kinds):
        start_job(name=named(work), work=work, release=release, names=names)


@deploy("Sources")
def fetch(
    *,
    jobs: Sequence[Work],
    release: str,
    proxy: ProxySettings,
    fleet: FleetSettings,
) -> None:
    """Fetch the model's repositories, each file checked against the lock; hosts lend them."""
    expect_files((PROXY,))
    names = tuple(work.job.digest12 for work in jobs)
    expect_fact(JobStates, lambda: {"jobs": names, "target": PREPARE.of(release)}, slow=True)
    configure_job_proxy(name="Have the proxy where jobs find it", proxy=proxy)
    note_files(
        name="See which files the hosts have", jobs=tuple(jobs), release=release, fleet=fleet
    )
    start_sharing(name="Lend the other hosts what they lack", jobs=tuple(jobs), fleet=fleet)
    _start(jobs, release, lambda one: f"Fetch {one.job.title.removeprefix('fetch ')}", FETCH_JOB)


@deploy("Checkpoint")
def build(*, jobs: Sequence[Work], release: str) -> None:
    """Build the checkpoint once its base is fetched; its receipt is the proof."""
    if not _quantised(jobs):
        _start(jobs, release, lambda _: "Build the checkpoint", CHECKPOINT_JOB)


@deploy("Image")
def image(*, jobs: Sequence[Work], release: str) -> None:
    """Have the pinned base with our plugin, which checks itself in the build."""
    _start(jobs, release, lambda _: "Prepare the engine image", *IMAGE_JOBS)
    if _quantised(jobs):
        # In the engine's image, which systemd has begin before it.
        _start(jobs, release, lambda one: f"Have an INT4 tree: {one.job.title}", REQUANTIZE_JOB)
        _start(jobs, release, lambda _: "Build the checkpoint", CHECKPOINT_JOB)


def _quantised(jobs: Sequence[Work]) -> bool:
    return any(work.job.kind == REQUANTIZE_JOB for work in jobs)


@deploy("Quantise")
def quantise(*, jobs: Sequence[Work], image: str, release: str) -> None:
    """Have AutoRound make the INT4 tree; its receipt is the proof."""
    wanted = tuple(work for work in jobs if work.job.kind in IMAGE_JOBS)
    wait_for_jobs(
        name="Wait until the engine image is there",
        jobs=tuple(work.job for work in wanted),
        release=release,
    )
    install_quantiser(name="Have AutoRound beside the engine image", image=image)
    _start(jobs, release, lambda one: f"Begin to {one.job.title}", REQUANTIZE_JOB)
    wait_for_jobs(
        name="Wait until the tree is quantised",
        jobs=tuple(work.job for work in jobs),
        release=release,
        timeout_s=_QUANTISING_TIMEOUT_S,
    )


@deploy("Ready")
def ready(*, jobs: Sequence[Work], service: str) -> None:
    """Do the slow work of pairs that are not served, so that a rollout to one need not wait."""
    # A prepare target of their own: the release's is retired as soon as the release is whole.
    target = f"{service}-ready"
    _start(jobs, target, lambda one: ready_name(one.job))
    wait_for_jobs(
        name="Wait until the other pairs are ready",
        jobs=tuple(work.job for work in jobs),
        release=target,
    )


@deploy("Sources")
def close() -> None:
    """Lend the other hosts nothing any more."""
    stop_sharing(name="Lend nothing any more")


@deploy("Sources")
def discard(*, jobs: Sequence[Work], release: str) -> None:
    """Remove a base that is not kept, once the tree made from it is proven byte by byte."""
    for work in each(jobs):
        start_job(
            name=f"Remove {work.job.title.removeprefix('remove ')}",
            work=work,
            release=release,
            names=(work.job.digest12,),
        )
        wait_for_jobs(
            name="Wait until the base is removed",
            jobs=(work.job,),
            release=release,
            timeout_s=_REMOVAL_TIMEOUT_S,
        )
