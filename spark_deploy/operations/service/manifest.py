"""Everything a deploy owns on a host, each with the operation that repairs it.

One list for people (`spark-deploy manifest`), for the drift tests that change each entry in turn,
and for whoever wants to take the project off a host again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_contract.host.paths import (
    CURRENT_TOOLS,
    ENGINE_USER,
    GATEWAY_USER,
    PROOFS_DIR,
    PROXY,
    SITE,
    TOOLS_DIR,
)
from spark_contract.host.units import DAILY_STAMP
from spark_contract.work.job import CHECKPOINT_JOB, FETCH_JOB, ImageProof, Job, ReceiptProof

from spark_deploy.facts.machine.docker import DAEMON_JSON
from spark_deploy.managed import ManagedFile
from spark_deploy.operations.machine.base import HOLD_PATH, SLEEP_TARGETS, directories
from spark_deploy.operations.work.proxy import PULLS_THROUGH
from spark_deploy.payload.content import Payload
from spark_deploy.payload.host_protection import compaction_file, earlyoom_file, guarantee_files
from spark_deploy.planning.serving.release import release_files_of, unit_files_of
from spark_deploy.planning.types import GatewayPlan, HostPlan
from spark_deploy.planning.work.jobs import ready_jobs_of, ready_name, served_jobs_of


@dataclass(frozen=True, slots=True)
class Owned:
    """One thing on a host: ``kind`` says what ``name`` is."""

    # file | state | keys | link | directory | package | masked | user | image | tree | active |
    # enabled; the host itself writes a `state`, and in `keys` only some keys of a file are ours.
    kind: str
    name: str
    operation: str  # the operation of a deploy that repairs it
    mode: int | None = None  # where it is held


def manifest_of(plan: HostPlan, payload: Payload) -> tuple[Owned, ...]:
    """List what a deploy of ``plan`` owns on its host."""
    return (
        *_base(plan),
        *_tools(plan, payload),
        *_artefacts(plan, payload),
        *_release(plan),
    )


def _base(plan: HostPlan) -> Iterator[Owned]:
    if plan.base.hold_driver_in_unattended_upgrades:
        yield Owned("file", HOLD_PATH, "Base | Hold driver packages in unattended upgrades", 0o644)
    for package in plan.base.packages:
        yield Owned("package", package, "Base | Install packages")
    for path in directories(plan.base):
        yield Owned("directory", path, "Base | Create directories")
    if plan.base.disable_sleep:
        for target in SLEEP_TARGETS:
            yield Owned("masked", target, "Base | Disable sleep")
    if plan.base.protect_login:
        yield from _files(guarantee_files(), "Base | Guarantee memory to the login")
    if plan.base.compaction_proactiveness is not None:
        file = compaction_file(plan.base.compaction_proactiveness)
        yield from _files((file,), "Base | Set the kernel's compaction")
    if plan.base.earlyoom:
        yield Owned("package", "earlyoom", "Base | Install packages")
        yield from _files((earlyoom_file(),), "Base | Run earlyoom")
    yield Owned("package", plan.cuda.package, "CUDA | Install the toolkit")
    for package in (*plan.docker.packages, *plan.docker.toolkit_packages):
        yield Owned("package", package, "Docker | Install engine and NVIDIA toolkit")
    yield Owned("keys", DAEMON_JSON, "Docker | Merge daemon.json")
    yield Owned("state", plan.docker.receipt_path, "Docker | Prove the GPU in a container")


def _files(files: tuple[ManagedFile, ...], operation: str) -> Iterator[Owned]:
    for file in files:
        yield Owned("file", file.path, operation, file.mode)


def _tools(plan: HostPlan, payload: Payload) -> Iterator[Owned]:
    install = "Tools | Install host tools"
    home = f"{TOOLS_DIR}/{plan.tools.digest[:12]}"
    yield from _files(payload.tools.installed(home), install)
    yield from _files(unit_files_of(payload.units), install)
    yield Owned("link", CURRENT_TOOLS, install)
    yield Owned("state", DAILY_STAMP, install)
    site = "Tools | Install the builder's Python packages"
    yield Owned("link", SITE, site)


def _artefacts(plan: HostPlan, payload: Payload) -> Iterator[Owned]:
    if plan.proxy.used:
        yield Owned("state", PROXY, "Sources | Have the proxy where jobs find it", 0o600)
        yield from _files((PULLS_THROUGH,), "Docker | Pull images through the proxy")
    for job in (work.job for work in served_jobs_of(plan, payload.image_context)):
        if job.unless:
            continue  # a base not kept leaves the host
        if job.kind == FETCH_JOB:
            yield _made(job, f"Sources | Fetch {job.title.removeprefix('fetch ')}")
        elif job.kind == CHECKPOINT_JOB:
            yield _made(job, "Checkpoint | Build the checkpoint")
        else:
            yield _made(job, "Image | Prepare the engine image")
    for job in (work.job for work in ready_jobs_of(plan, payload.image_context)):
        yield _made(job, f"Ready | {ready_name(job)}")


def _made(job: Job, operation: str) -> Owned:
    if isinstance(job.proof, ReceiptProof):
        return Owned("tree", job.proof.tree, operation)
    assert isinstance(job.proof, ImageProof)  # nothing that is served is made by a removal
    return Owned("image", job.proof.image, operation)


def _release(plan: HostPlan) -> Iterator[Owned]:
    install = "Serve | Install units and release"
    yield Owned("user", GATEWAY_USER, install)
    yield Owned("user", ENGINE_USER, install)
    for one in plan.served:
        yield from _files(release_files_of(one), install)
        what = "the release" if one is plan else one.serve.service
        change = f"Serve | Serve {what} on {plan.host}"
        for unit in (one.serve.serve_unit, one.gateway.settings.unit):
            yield Owned("active", unit, change)
            yield Owned("enabled", unit, change)
        yield Owned("state", f"{PROOFS_DIR}/{one.serve.name}.json", change)
        yield from _gateway(one.gateway, change)


def _gateway(gateway: GatewayPlan, change: str) -> Iterator[Owned]:
    configure = "Serve | Configure the gateway"
    yield Owned("file", gateway.settings.path, configure, 0o644)
    if tls := gateway.settings.tls:
        yield Owned("state", tls.certificate, configure, 0o644)
        yield Owned("state", tls.key, configure, 0o600)
    # A key made on the host is made anew by the change of release, a given one is sent again.
    owner = change if gateway.key.kind == "generate" else configure
    yield Owned("state", gateway.settings.key_path, owner, 0o600)
