"""List, prune and uninstall everything that deploys created on a host."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyinfra import host
from pyinfra.api import FactProcessError, FunctionCommand, Host, State, StringCommand
from spark_contract import paths, tool
from spark_contract.documents import DocumentError, parse, to_plain
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB, RANK_JOB, ImageProof, Job, ReceiptProof
from spark_contract.status import Footprint, KeepList, ManagedItem, Pruning, UninstallManifest
from spark_contract.tool import parse_problem
from spark_contract.units import DAILY_STAMP

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.host import BASE_PACKAGES, CUDA_PACKAGE, TOOLKIT_PACKAGES
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts import base
from spark_deploy.hosts.access import ACCOUNT_HOME
from spark_deploy.hosts.commands import CommandError, heartbeat, log_once, run
from spark_deploy.hosts.downloads import DOCKER_DROP_IN
from spark_deploy.hosts.facts import HostFact, parse_document, read_fact
from spark_deploy.hosts.gpu import SPECIFICATION
from spark_deploy.hosts.operations import Commands, HostError, fail, host_command, host_operation
from spark_deploy.hosts.payload import Payload, memory_command, pack_tools, tool_files
from spark_deploy.hosts.status import PrunePreview
from spark_deploy.plan.jobs import DAEMON_JSON, preparation_name, ready_jobs, served_jobs
from spark_deploy.plan.release import release_files, unit_and_command_files
from spark_deploy.plan.types import NJS, SUDOERS_PATH, BasePlan, HostPlan, ManagedFile

_TIMEOUT_S = 3600
_RETRY = "fix the cause above, then retry"


def gigabytes(size_bytes: int) -> str:
    unit, factor = ("GB", 1e9) if size_bytes >= 1e8 else ("MB", 1e6)
    return f"{size_bytes / factor:.2f} {unit}"


@host_operation
def prune_host(keep: KeepList) -> Commands:
    request = json.dumps(to_plain(keep), sort_keys=True)
    result = read_fact(PrunePreview, keep=request)
    if isinstance(result, Problem):
        raise HostError(result)
    for line in describe_prune(result):
        log_once(line)
    if not result.items:
        host.noop("nothing to remove")
        return
    yield FunctionCommand(_prune, [request], {})


def describe_prune(result: Pruning) -> Iterator[str]:
    jobs = [item for item in result.items if item.kind == "job"]
    for item in result.items:
        if item.kind != "job":
            yield f"remove {gigabytes(item.bytes):>9}  {item.kind} {item.name}"
    if jobs:
        yield f"remove            state files of {len(jobs)} finished jobs"
    for name, reason in sorted(result.kept.items()):
        yield f"keep              release {name}: {reason}"
    for path in result.unmanaged:
        yield f"keep              {path}: unmanaged"
    yield f"total  {gigabytes(result.bytes):>9}"


@host_command
def _prune(state: State, host: Host, request: str) -> bool:
    try:
        with heartbeat(host, "removing"):
            output = run(host, tool.command_line(tool.PRUNE, request), timeout_s=_TIMEOUT_S)
    except CommandError as error:
        fail(f"{host.name}: prune", error.output.strip() or str(error), _RETRY)
    removed = parse(Pruning, "\n".join(output))
    host.log(f"removed {len(removed.items)} items, {gigabytes(removed.bytes)}")
    return True


class ManagedResources(HostFact[UninstallManifest]):
    """Output of ``spark-host manifest``; needs ``_stdin=pack_tools()``."""

    def requires_command(self, command: str) -> str:
        return "python3"

    def command(self, command: str) -> str:
        return f"{command} 2>&1 || :"

    def process(self, output: Iterable[str]) -> UninstallManifest:
        lines = [line for line in output if line.strip()]
        try:
            return parse(UninstallManifest, lines[-1] if lines else "")
        except DocumentError as error:
            problem = parse_problem(lines[-1]) if lines else None
            tail = "\n".join(lines[-3:])
            raise FactProcessError(str(problem or f"{error}: {tail}")) from error


def uninstall_request(settings: Settings) -> str:
    """Return JSON with what deploys may have created, and whether to remove models and engine."""
    docker = settings.docker
    footprint = Footprint(
        models_dir=settings.paths.models_dir,
        sources_dir=settings.paths.sources_dir,
        cache_dir=settings.paths.cache_dir,
        files=(base.HOLD_PATH, base.COMPACTION_PATH, *(file.path for file in base.GUARANTEE_FILES)),
        # These may have existed before the first deploy.
        shared_files=(DAEMON_JSON, base.EARLYOOM_PATH, SPECIFICATION),
        daemon_json=DAEMON_JSON,
        daemon_keys=tuple(sorted({*docker.daemon, "runtimes", "insecure-registries"})),
        masked=base.SLEEP_TARGETS,
        packages=(*BASE_PACKAGES, "earlyoom", NJS),
        engine_packages=docker.packages,
        gpu_packages=(*TOOLKIT_PACKAGES, CUDA_PACKAGE),
        docker_users=docker.users,
        access_files=(SUDOERS_PATH, ACCOUNT_HOME),
        models=settings.uninstall.models,
        engine=settings.uninstall.engine,
    )
    return json.dumps(to_plain(footprint), sort_keys=True)


def read_resources(request: str) -> UninstallManifest:
    command = memory_command(tool.MANIFEST, request)
    return read_fact(ManagedResources, command=command, _stdin=pack_tools())


@host_operation
def record_initial_state(plan: BasePlan, request: str) -> Commands:
    """Record the state before the first deploy, which a later uninstall restores."""
    if paths.STATE_DIR in base.read_state(plan).directories:
        host.noop("this is not the first deploy")
        return
    yield StringCommand(memory_command(tool.NOTE, request), _stdin=pack_tools())


@host_operation
def uninstall(request: str) -> Commands:
    result = read_resources(request)
    for line in describe_uninstall(result):
        log_once(line)
    if all(item.kept_because for item in result.items):
        host.noop("nothing to remove")
        return
    yield FunctionCommand(_uninstall, [request], {})


@host_command
def _uninstall(state: State, host: Host, request: str) -> bool:
    where, command = f"{host.name}: uninstall", memory_command(tool.UNINSTALL, request)
    try:
        with heartbeat(host, "removing"):
            output = run(host, command, timeout_s=_TIMEOUT_S, stdin=pack_tools())
        removed = parse(UninstallManifest, output[-1])
    except CommandError as error:
        text = error.output.strip()
        failed = parse_document(UninstallManifest, text.rpartition("\n")[2])
        fail(where, "\n".join(failed.problems) if failed else text[-2000:], _RETRY)
    except DocumentError as error:
        fail(where, str(error), "retry")
    freed = sum(item.size_bytes for item in removed.items)
    host.log(f"removed {len(removed.items)} items, {gigabytes(freed)}")
    return True


_MAX_NAMES = 12


def describe_uninstall(result: UninstallManifest) -> Iterator[str]:
    """Describe the resources to remove and keep, grouped by kind and by the reason to keep them."""
    if result.baseline_at is None and result.items:
        yield "older resources may be kept, because the state before the first deploy is unknown"
    groups: dict[tuple[str, str], list[ManagedItem]] = {}
    for kind in dict.fromkeys(item.kind for item in result.items):
        items = [item for item in result.items if item.kind == kind]
        # Items to remove come first; their reason is empty.
        for item in sorted(items, key=lambda item: item.kept_because != ""):
            groups.setdefault((kind, item.kept_because), []).append(item)
    for (kind, reason), items in groups.items():
        names = [item.name for item in items]
        total_bytes = sum(item.size_bytes for item in items)
        size = gigabytes(total_bytes) if total_bytes else ""
        columns = f"{size:>9} {kind:<13}"
        if reason:
            yield f"keep   {columns} {', '.join(names)}: {reason}"
        else:
            hidden = len(names) - _MAX_NAMES
            more = f" and {hidden} more" if hidden > 0 else ""
            yield f"remove {columns} {', '.join(names[:_MAX_NAMES])}{more}"
    removed_bytes = sum(item.size_bytes for item in result.items if not item.kept_because)
    kept_bytes = sum(item.size_bytes for item in result.items if item.kept_because)
    yield f"remove {gigabytes(removed_bytes)} in total; keep {gigabytes(kept_bytes)}"


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that a deploy creates.

    Kinds: file, state (a file that the host writes), keys (keys of a file), link, directory,
    package, masked, user, image, tree, active, enabled.
    """

    kind: str
    name: str
    operation: str  # name of the deploy operation that repairs it
    mode: int | None = None  # None if a deploy does not repair the mode


def list_resources(plan: HostPlan, payload: Payload) -> tuple[Resource, ...]:
    return (
        *_base_resources(plan.base),
        *_prepared_resources(plan, payload),
        *_artifact_resources(plan, payload),
        *_release_resources(plan),
    )


def _files(files: Iterable[ManagedFile], operation: str) -> Iterator[Resource]:
    return (Resource("file", file.path, operation, file.mode) for file in files)


def _base_resources(plan: BasePlan) -> Iterator[Resource]:
    settings = plan.settings
    if "hold-driver" not in settings.skip:
        yield from _files((base.HOLD_FILE,), "Base | Hold driver packages in unattended upgrades")
    for package in base.planned_packages(plan):
        yield Resource("package", package, "Base | Install packages")
    for path in base.managed_directories(plan):
        yield Resource("directory", path, "Base | Create directories")
    if "disable-sleep" not in settings.skip:
        for target in base.SLEEP_TARGETS:
            yield Resource("masked", target, "Base | Disable sleep")
    if "protect-login" not in settings.skip:
        yield from _files(base.GUARANTEE_FILES, "Base | Guarantee memory to the login")
    if settings.compaction_proactiveness is not None:
        file = base.compaction_file(settings.compaction_proactiveness)
        yield from _files((file,), "Base | Set the kernel's compaction")
    if settings.earlyoom:
        yield from _files((base.EARLYOOM_FILE,), "Base | Run earlyoom")


def _prepared_resources(plan: HostPlan, payload: Payload) -> Iterator[Resource]:
    yield Resource("package", plan.cuda.package, "CUDA | Install the toolkit")
    for package in (*plan.docker.packages, *plan.docker.toolkit_packages):
        yield Resource("package", package, "Docker | Install engine and NVIDIA toolkit")
    yield Resource("keys", DAEMON_JSON, "Docker | Merge daemon.json")
    yield Resource("state", paths.GPU_RECEIPT, "Docker | Check the GPU in a container")
    install = "Tools | Install host tools"
    yield from _files(tool_files(plan.payload, payload.tools), install)
    yield from _files(unit_and_command_files(payload.units), install)
    yield Resource("link", paths.CURRENT_TOOLS, install)
    yield Resource("state", DAILY_STAMP, install)
    yield Resource("link", paths.SITE, "Tools | Install the builder's Python packages")
    if plan.proxy.url is not None:
        yield Resource("state", paths.PROXY, "Sources | Configure the proxy for jobs", 0o600)
        yield from _files((DOCKER_DROP_IN,), "Docker | Pull images through the proxy")


def _artifact_resources(plan: HostPlan, payload: Payload) -> Iterator[Resource]:
    for job in (work.job for work in served_jobs(plan, payload.image_context)):
        if job.unless:
            continue  # the same deploy removes this artifact again
        if job.kind == CHECKPOINT_JOB:
            operation = "Checkpoint | Build the checkpoint"
        elif job.kind == RANK_JOB:
            operation = f"Checkpoint | {job.title.capitalize()}"
        elif job.kind == FETCH_JOB:
            operation = f"Sources | Fetch {job.title.removeprefix('fetch ')}"
        else:
            operation = "Image | Prepare the engine image"
        yield _artifact(job, operation)
    for job in (work.job for work in ready_jobs(plan, payload.image_context)):
        yield _artifact(job, f"Ready | {preparation_name(job)}")


def _artifact(job: Job, operation: str) -> Resource:
    if isinstance(job.proof, ReceiptProof):
        return Resource("tree", job.proof.tree, operation)
    assert isinstance(job.proof, ImageProof)  # only removals have an AbsenceProof
    return Resource("image", job.proof.image, operation)


def _release_resources(plan: HostPlan) -> Iterator[Resource]:
    install, configure = "Serve | Install units and release", "Serve | Configure the gateway"
    yield Resource("user", paths.GATEWAY_USER, install)
    yield Resource("user", paths.ENGINE_USER, install)
    for served in plan.served:
        yield from _files(release_files(served), install)
        subject = "the release" if served is plan else served.release.service
        change = f"Serve | Serve {subject} on {plan.host}"
        gateway = served.gateway.settings
        for unit in (served.release.serve_unit, gateway.unit):
            yield Resource("active", unit, change)
            yield Resource("enabled", unit, change)
        yield Resource("state", f"{paths.PROOFS_DIR}/{served.release.name}.json", change)
        yield Resource("file", gateway.path, configure, 0o644)
        if gateway.tls:
            yield Resource("state", gateway.tls.certificate, configure, 0o644)
            yield Resource("state", gateway.tls.key, configure, 0o600)
        # A rollout generates a missing key; a deploy sends a configured key again.
        operation = change if served.gateway.key.kind == "generate" else configure
        yield Resource("state", gateway.key_path, operation, 0o600)
