"""Everything a deploy owns on a host: list it, prune it, uninstall it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract import tool
from spark_contract.documents import DocumentError, parse, plain
from spark_contract.errors import problem_in
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB, ImageProof, Job, ReceiptProof
from spark_contract.keep import Keep, Ours, Pruning, Thing
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
from spark_contract.units import (
    DAILY_STAMP,
)

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.access import ACCOUNT_HOME
from spark_deploy.hosts.base import HOLD_PATH, SLEEP_TARGETS, owned_directories, read_state
from spark_deploy.hosts.commands import CommandFailed, heartbeat, log_once, run
from spark_deploy.hosts.docker_facts import DAEMON_JSON
from spark_deploy.hosts.facts import HostFact, read_fact
from spark_deploy.hosts.gpu import SPECIFICATION
from spark_deploy.hosts.host_errors import Commands, Refused, host_errors, show
from spark_deploy.hosts.payload import (
    COMPACTION_PATH,
    EARLYOOM_PATH,
    Payload,
    compaction_file,
    earlyoom_file,
    guarantee_files,
    memory_command,
    packed_tools,
)
from spark_deploy.hosts.proxy import DOCKER_DROP_IN
from spark_deploy.hosts.status import Prunable
from spark_deploy.plan.jobs import ready_jobs_of, ready_name, served_jobs_of, wanted_of
from spark_deploy.plan.machine import SUDOERS_PATH, BasePlan
from spark_deploy.plan.managed_files import ManagedFile
from spark_deploy.plan.release import release_files_of, unit_files_of
from spark_deploy.plan.types import GatewayPlan, HostPlan


class OursOnHost(HostFact[Ours]):
    """What ``spark-host manifest`` says; the tools that answer come with the question.

    Give them as ``_stdin``: ``payload.sent``.
    """

    def requires_command(self, command: str) -> str:
        return "python3"

    def command(self, command: str) -> str:
        return f"{command} 2>&1 || :"

    def process(self, output: Iterable[str]) -> Ours:
        """Read the answer.

        Raises:
            FactProcessError: it is none; says what the host said instead.
        """
        lines = [line for line in output if line.strip()]
        try:
            return parse(Ours, lines[-1] if lines else "")
        except DocumentError as error:
            problem = problem_in(lines[-1]) if lines else None
            told = "\n".join(lines[-3:])
            said = problem or f"{error}: {told}"
            raise FactProcessError(str(said)) from error


_PRUNE_TIMEOUT_S = 3600


@operation()
@host_errors
def prune_host(keep: Keep) -> Commands:
    """Remove releases, trees, sources, images and caches of ours that nothing kept needs."""
    wanted = json.dumps(plain(keep), sort_keys=True)
    found = read_fact(Prunable, keep=wanted)
    if isinstance(found, Problem):
        raise Refused(found)
    for line in describe_prune(found):
        log_once(line)
    if not found.items:
        host.noop("nothing can go")
        return
    yield FunctionCommand(_prune, [wanted], {})


def describe_prune(found: Pruning) -> Iterator[str]:
    """Yield what a prune finds: each thing that goes with its bytes, and why releases stay."""
    for item in found.items:
        if item.kind != "job":
            yield f"goes   {gigabytes(item.bytes):>9}  {item.kind} {item.name}"
    jobs = sum(1 for item in found.items if item.kind == "job")
    if jobs:
        yield f"goes              records of {jobs} jobs that made it"
    for name, why in sorted(found.kept.items()):
        yield f"stays             release {name}: {why}"
    for path in found.not_ours:
        yield f"stays             {path}: not made by us"
    yield f"in all {gigabytes(found.bytes):>9}"


def gigabytes(size_bytes: int) -> str:
    """Write bytes for people."""
    unit, factor = ("GB", 1e9) if size_bytes >= 1e8 else ("MB", 1e6)
    return f"{size_bytes / factor:.2f} {unit}"


def _prune(state: State, host: Host, keep: str) -> bool:
    try:
        with heartbeat(host, "removing"):
            said = run(host, tool.line(tool.PRUNE, keep), timeout_s=_PRUNE_TIMEOUT_S)
    except CommandFailed as error:
        show(host, f"{error.output.strip() or error}\n  fix: see above, then run again")
        return False
    removed = parse(Pruning, "\n".join(said))
    host.log(f"removed {len(removed.items)} things, {gigabytes(removed.bytes)}")
    return True


_TIMEOUT_S = 3600


SHOWN = 12  # names of one kind


def uninstall_request(settings: Settings) -> str:
    """Return, as JSON, what the host is asked about."""
    wanted = wanted_of(
        settings,
        files=(HOLD_PATH, COMPACTION_PATH, *(file.path for file in guarantee_files())),
        shared_files=(EARLYOOM_PATH, SPECIFICATION),
        masked=SLEEP_TARGETS,
        access_files=(SUDOERS_PATH, ACCOUNT_HOME),
    )
    return json.dumps(plain(wanted), sort_keys=True)


def read_resources(asked: str) -> Ours:
    """Ask the current host what is ours on it."""
    return read_fact(
        OursOnHost, command=memory_command(tool.MANIFEST, asked), _stdin=packed_tools()
    )


@operation()
@host_errors
def note_host(plan: BasePlan, asked: str) -> Commands:
    """Have written down what the host was before us, so that an uninstall can go back to it.

    Args:
        plan: says what is read of the host.
        asked: what ``asked_of`` returned.
    """
    if STATE_DIR in read_state(plan).directories:
        host.noop("deployed to before")
        return
    yield StringCommand(memory_command(tool.NOTE, asked), _stdin=packed_tools())


@operation()
@host_errors
def uninstall(asked: str) -> Commands:
    """Have nothing of ours on the host but what is said to stay.

    Args:
        asked: what ``asked_of`` returned.
    """
    found = read_resources(asked)
    for line in describe_uninstall(found):
        log_once(line)
    if not any(not thing.stays for thing in found.things):
        host.noop("nothing of ours is left that may go")
        return
    yield FunctionCommand(_uninstall, [asked], {})


def _uninstall(state: State, host: Host, asked: str) -> bool:
    try:
        with heartbeat(host, "removing"):
            said = run(
                host,
                memory_command(tool.UNINSTALL, asked),
                timeout_s=_TIMEOUT_S,
                stdin=packed_tools(),
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


def describe_uninstall(found: Ours) -> Iterator[str]:
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


def list_resources(plan: HostPlan, payload: Payload) -> tuple[Owned, ...]:
    """List what a deploy of ``plan`` owns on its host."""
    return (
        *_base_resources(plan),
        *_tool_resources(plan, payload),
        *_artefact_resources(plan, payload),
        *_release_resources(plan),
    )


def _base_resources(plan: HostPlan) -> Iterator[Owned]:
    if plan.base.hold_driver_in_unattended_upgrades:
        yield Owned("file", HOLD_PATH, "Base | Hold driver packages in unattended upgrades", 0o644)
    for package in plan.base.packages:
        yield Owned("package", package, "Base | Install packages")
    for path in owned_directories(plan.base):
        yield Owned("directory", path, "Base | Create directories")
    if plan.base.disable_sleep:
        for target in SLEEP_TARGETS:
            yield Owned("masked", target, "Base | Disable sleep")
    if plan.base.protect_login:
        yield from _file_resources(guarantee_files(), "Base | Guarantee memory to the login")
    if plan.base.compaction_proactiveness is not None:
        file = compaction_file(plan.base.compaction_proactiveness)
        yield from _file_resources((file,), "Base | Set the kernel's compaction")
    if plan.base.earlyoom:
        yield Owned("package", "earlyoom", "Base | Install packages")
        yield from _file_resources((earlyoom_file(),), "Base | Run earlyoom")
    yield Owned("package", plan.cuda.package, "CUDA | Install the toolkit")
    for package in (*plan.docker.packages, *plan.docker.toolkit_packages):
        yield Owned("package", package, "Docker | Install engine and NVIDIA toolkit")
    yield Owned("keys", DAEMON_JSON, "Docker | Merge daemon.json")
    yield Owned("state", plan.docker.receipt_path, "Docker | Prove the GPU in a container")


def _file_resources(files: tuple[ManagedFile, ...], operation: str) -> Iterator[Owned]:
    for file in files:
        yield Owned("file", file.path, operation, file.mode)


def _tool_resources(plan: HostPlan, payload: Payload) -> Iterator[Owned]:
    install = "Tools | Install host tools"
    home = f"{TOOLS_DIR}/{plan.tools.digest[:12]}"
    yield from _file_resources(payload.tools.installed(home), install)
    yield from _file_resources(unit_files_of(payload.units), install)
    yield Owned("link", CURRENT_TOOLS, install)
    yield Owned("state", DAILY_STAMP, install)
    site = "Tools | Install the builder's Python packages"
    yield Owned("link", SITE, site)


def _artefact_resources(plan: HostPlan, payload: Payload) -> Iterator[Owned]:
    if plan.proxy.used:
        yield Owned("state", PROXY, "Sources | Have the proxy where jobs find it", 0o600)
        yield from _file_resources((DOCKER_DROP_IN,), "Docker | Pull images through the proxy")
    for job in (work.job for work in served_jobs_of(plan, payload.image_context)):
        if job.unless:
            continue  # a base not kept leaves the host
        if job.kind == FETCH_JOB:
            yield _artefact(job, f"Sources | Fetch {job.title.removeprefix('fetch ')}")
        elif job.kind == CHECKPOINT_JOB:
            yield _artefact(job, "Checkpoint | Build the checkpoint")
        else:
            yield _artefact(job, "Image | Prepare the engine image")
    for job in (work.job for work in ready_jobs_of(plan, payload.image_context)):
        yield _artefact(job, f"Ready | {ready_name(job)}")


def _artefact(job: Job, operation: str) -> Owned:
    if isinstance(job.proof, ReceiptProof):
        return Owned("tree", job.proof.tree, operation)
    assert isinstance(job.proof, ImageProof)  # nothing that is served is made by a removal
    return Owned("image", job.proof.image, operation)


def _release_resources(plan: HostPlan) -> Iterator[Owned]:
    install = "Serve | Install units and release"
    yield Owned("user", GATEWAY_USER, install)
    yield Owned("user", ENGINE_USER, install)
    for one in plan.served:
        yield from _file_resources(release_files_of(one), install)
        what = "the release" if one is plan else one.serve.service
        change = f"Serve | Serve {what} on {plan.host}"
        for unit in (one.serve.serve_unit, one.gateway.settings.unit):
            yield Owned("active", unit, change)
            yield Owned("enabled", unit, change)
        yield Owned("state", f"{PROOFS_DIR}/{one.serve.name}.json", change)
        yield from _gateway_resources(one.gateway, change)


def _gateway_resources(gateway: GatewayPlan, change: str) -> Iterator[Owned]:
    configure = "Serve | Configure the gateway"
    yield Owned("file", gateway.settings.path, configure, 0o644)
    if tls := gateway.settings.tls:
        yield Owned("state", tls.certificate, configure, 0o644)
        yield Owned("state", tls.key, configure, 0o600)
    # A key made on the host is made anew by the change of release, a given one is sent again.
    owner = change if gateway.key.kind == "generate" else configure
    yield Owned("state", gateway.settings.key_path, owner, 0o600)
