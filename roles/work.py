"""Run slow jobs (downloads, checkpoints, image); deploys start jobs early and wait late."""

from collections.abc import Callable, Sequence

from pyinfra.api import deploy
from spark_contract.job import (
    CHECKPOINT_JOB,
    FETCH_JOB,
    IMAGE_JOBS,
    RANK_JOB,
    REQUANTIZE_JOB,
    Job,
)
from spark_contract.paths import PROXY
from spark_contract.units import PREPARE

from spark_deploy.config.settings.sources import FleetSettings, ProxySettings
from spark_deploy.hosts.commands import host_loop
from spark_deploy.hosts.downloads import (
    configure_job_proxy,
    record_files,
    start_sharing,
    stop_sharing,
)
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.jobs import compare_donor_tensors, start_job, wait_for_jobs
from spark_deploy.hosts.payload import install_quantizer
from spark_deploy.hosts.status import JobStates
from spark_deploy.plan.jobs import Work, preparation_name

_REMOVAL_TIMEOUT_S = 3600  # the removal first verifies every byte of the checkpoint
_QUANTIZING_TIMEOUT_S = 4 * 86400  # a 122B model takes about 40 hours


def _names(jobs: Sequence[Work]) -> tuple[str, ...]:
    return tuple(work.job.digest12 for work in jobs)


def _jobs(jobs: Sequence[Work]) -> tuple[Job, ...]:
    return tuple(work.job for work in jobs)


def _start(jobs: Sequence[Work], release: str, title: Callable[[Work], str], *kinds: str) -> None:
    """Start the jobs of the given kinds, or all jobs if no kind is given."""
    for work in host_loop(work for work in jobs if not kinds or work.job.kind in kinds):
        # With the names of all jobs, a single fact reads all states.
        start_job(name=title(work), work=work, release=release, names=_names(jobs))


@deploy("Sources")
def fetch(
    *,
    jobs: Sequence[Work],
    release: str,
    proxy: ProxySettings,
    fleet: FleetSettings,
    used_ports: Sequence[int],
) -> None:
    """Start downloads from the hub or peers; jobs check the hashes against the lock."""
    arguments = {"jobs": _names(jobs), "target": PREPARE.unit(release)}
    expect_files((PROXY,))
    expect_fact(JobStates, lambda: arguments, slow=True)
    configure_job_proxy(name="Configure the proxy for jobs", proxy=proxy)
    jobs = tuple(jobs)
    record_files(name="Record which files the hosts have", jobs=jobs, release=release, fleet=fleet)
    start_sharing(name="Start peer downloads", jobs=jobs, fleet=fleet, used_ports=used_ports)
    _start(jobs, release, lambda work: f"Fetch {work.job.title.removeprefix('fetch ')}", FETCH_JOB)


@deploy("Checkpoint")
def build_checkpoint(*, jobs: Sequence[Work], release: str) -> None:
    if not _has_quantization(jobs):
        _start_build(jobs, release)


def _start_build(jobs: Sequence[Work], release: str) -> None:
    _start(jobs, release, lambda _: "Build the checkpoint", CHECKPOINT_JOB)
    _start(jobs, release, lambda work: work.job.title.capitalize(), RANK_JOB)


@deploy("Image")
def prepare_image(*, jobs: Sequence[Work], release: str) -> None:
    """Start the image build, then the quantization and checkpoint jobs that need the image."""
    _start(jobs, release, lambda _: "Prepare the engine image", *IMAGE_JOBS)
    if _has_quantization(jobs):
        # AutoRound runs in the engine's image.
        _start(jobs, release, lambda work: f"Quantize: {work.job.title}", REQUANTIZE_JOB)
        _start_build(jobs, release)


def _has_quantization(jobs: Sequence[Work]) -> bool:
    return any(work.job.kind == REQUANTIZE_JOB for work in jobs)


@deploy("Quantize")
def quantize(*, jobs: Sequence[Work], image: str, release: str) -> None:
    images = _jobs([work for work in jobs if work.job.kind in IMAGE_JOBS])
    wait_for_jobs(name="Wait for the engine image", jobs=images, release=release)
    install_quantizer(name="Install AutoRound", image=image)
    _start(jobs, release, lambda work: f"Start to {work.job.title}", REQUANTIZE_JOB)
    wait_for_jobs(
        name="Wait for the quantized checkpoint",
        jobs=_jobs(jobs),
        release=release,
        timeout_s=_QUANTIZING_TIMEOUT_S,
    )


@deploy("Ready")
def prepare_other_models(*, jobs: Sequence[Work], service: str) -> None:
    """Prepare models in ``keep_ready``, so that later rollouts need no downloads or builds."""
    # The release's target is disabled once its jobs are done, so these jobs use another target.
    target = f"{service}-ready"
    _start(jobs, target, lambda work: preparation_name(work.job))
    wait_for_jobs(name="Wait for the other models", jobs=_jobs(jobs), release=target)
    compare_donor_tensors(
        name="Compare the FP8 source tensors of the other models", jobs=tuple(jobs)
    )


@deploy("Sources")
def stop_peer_downloads() -> None:
    stop_sharing(name="Stop peer downloads")


@deploy("Sources")
def remove_base(*, jobs: Sequence[Work], release: str) -> None:
    """Remove the base checkpoint; the job first verifies the checkpoint built from it."""
    for work in host_loop(jobs):
        name = f"Remove {work.job.title.removeprefix('remove ')}"
        start_job(name=name, work=work, release=release, names=_names([work]))
        wait_for_jobs(
            name="Wait for the removal of the base",
            jobs=_jobs([work]),
            release=release,
            timeout_s=_REMOVAL_TIMEOUT_S,
        )
