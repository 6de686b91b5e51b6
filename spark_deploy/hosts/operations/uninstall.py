"""Everything a deploy owns on a host, each with the operation that repairs it.

One list for people (`spark-deploy manifest`), for the drift tests that change each entry in turn,
and for whoever wants to take the project off a host again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract import tool
from spark_contract.documents import DocumentError, parse, plain
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB, ImageProof, Job, ReceiptProof
from spark_contract.keep import Ours, Thing
from spark_contract.paths import (
    CURRENT_TOOLS,
    ENGINE_USER,
    GATEWAY_USER,
    PROOFS_DIR,
    PROXY,
    SITE,
    STATE_DIR,
    TOOLS_DIR,
)
from spark_contract.units import DAILY_STAMP

from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.facts.docker import DAEMON_JSON
from spark_deploy.hosts.facts.fact_cache import read
from spark_deploy.hosts.facts.jobs import OursOnHost
from spark_deploy.hosts.facts.system import ACCOUNT_HOME
from spark_deploy.hosts.operations.base import HOLD_PATH, SLEEP_TARGETS, directories, state_of
from spark_deploy.hosts.operations.commands import CommandFailed, heartbeat, log_once, run
from spark_deploy.hosts.operations.gpu_access import SPECIFICATION
from spark_deploy.hosts.operations.host_errors import Commands, host_errors, show
from spark_deploy.hosts.operations.proxy import PULLS_THROUGH
from spark_deploy.hosts.operations.releases import gigabytes
from spark_deploy.hosts.payload.content import (
    COMPACTION_PATH,
    EARLYOOM_PATH,
    Payload,
    compaction_file,
    earlyoom_file,
    guarantee_files,
    sent_command,
    sent_tools,
)
from spark_deploy.plan.jobs import ready_jobs_of, ready_name, served_jobs_of, wanted_of
from spark_deploy.plan.machine import SUDOERS_PATH, BasePlan
from spark_deploy.plan.managed_files import ManagedFile
from spark_deploy.plan.release import release_files_of, unit_files_of
from spark_deploy.plan.types import GatewayPlan, HostPlan

_TIMEOUT_S = 3600
SHOWN = 12  # names of one kind


def asked_of(settings: Settings) -> str:
    """Return, as JSON, what the host is asked about."""
    wanted = wanted_of(
        settings,
        files=(HOLD_PATH, COMPACTION_PATH, *(file.path for file in guarantee_files())),
        shared_files=(EARLYOOM_PATH, SPECIFICATION),
        masked=SLEEP_TARGETS,
        access_files=(SUDOERS_PATH, ACCOUNT_HOME),
    )
    return json.dumps(plain(wanted), sort_keys=True)


def ours_on_host(asked: str) -> Ours:
    """Ask the current host what is ours on it."""
    return read(OursOnHost, command=sent_command(tool.MANIFEST, asked), _stdin=sent_tools())


@operation()
@host_errors
def noted(plan: BasePlan, asked: str) -> Commands:
    """Have written down what the host was before us, so that an uninstall can go back to it.

    Args:
        plan: says what is read of the host.
        asked: what ``asked_of`` returned.
    """
    if STATE_DIR in state_of(plan).directories:
        host.noop("deployed to before")
        return
    yield StringCommand(sent_command(tool.NOTE, asked), _stdin=sent_tools())


@operation()
@host_errors
def uninstalled(asked: str) -> Commands:
    """Have nothing of ours on the host but what is said to stay.

    Args:
        asked: what ``asked_of`` returned.
    """
    found = ours_on_host(asked)
    for line in lines(found):
        log_once(line)
    if not any(not thing.stays for thing in found.things):
        host.noop("nothing of ours is left that may go")
        return
    yield FunctionCommand(_uninstall, [asked], {})


def _uninstall(state: State, host: Host, asked: str) -> bool:
    try:
        with heartbeat(host, "removing"):
            said = run(
                host, sent_command(tool.UNINSTALL, asked), timeout_s=_TIMEOUT_S, stdin=sent_tools()
            )
        found = parse(Ours, said[-1])
    except CommandFailed as error:
        show(host, f"{_tail(error.output)}\n  fix: see above, then run again")
        return False
    except DocumentError as error:
        show(host, f"spark-host uninstall: {error}")
        return False
    freed = sum(thing.size_bytes for thing in found.things)
    host.log(f"removed {len(found.things)} things, {gigabytes(freed)}")
    return True


def _tail(output: str) -> str:
    try:
        return "\n".join(parse(Ours, output.strip().splitlines()[-1]).problems)
    except (DocumentError, IndexError):
        return output.strip()[-2000:]


def lines(found: Ours) -> Iterator[str]:
    """Say what goes and what stays, each with its bytes, small things of a kind in one line."""
    if found.noted_at is None and found.things:
        yield "nobody noted what this host was before the first deploy: what is unknown stays"
    for kind in dict.fromkeys(thing.kind for thing in found.things):
        yield from _kind(kind, [thing for thing in found.things if thing.kind == kind])
    freed = sum(thing.size_bytes for thing in found.things if not thing.stays)
    left = sum(thing.size_bytes for thing in found.things if thing.stays)
    yield f"goes  {gigabytes(freed)} in all; stays {gigabytes(left)}"


def _kind(kind: str, things: list[Thing]) -> Iterator[str]:
    going = [thing for thing in things if not thing.stays]
    if going:
        size = sum(thing.size_bytes for thing in going)
        names = [thing.name for thing in going]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"goes  {_size(size)} {kind:<13} {', '.join(names[:SHOWN])}{more}"
    for why in dict.fromkeys(thing.stays for thing in things if thing.stays):
        same = [thing for thing in things if thing.stays == why]
        size = sum(thing.size_bytes for thing in same)
        yield f"stays {_size(size)} {kind:<13} {', '.join(thing.name for thing in same)}: {why}"


def _size(size_bytes: int) -> str:
    return f"{gigabytes(size_bytes) if size_bytes else '':>9}"


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
