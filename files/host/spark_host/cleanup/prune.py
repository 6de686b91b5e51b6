"""``spark-host prune``: removes managed files and images that no kept release needs.

Folders are renamed first, so that none looks complete after an interruption.
"""

import shutil
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from spark_contract import files, receipts, units
from spark_contract.documents import parse
from spark_contract.job import Job
from spark_contract.paths import Paths
from spark_contract.records import Stopped
from spark_contract.release import parse_service
from spark_contract.status import KeepList, Prunable, Pruning
from spark_contract.tool import HostToolError

from spark_host.cleanup import resources
from spark_host.cleanup.resources import Folder, Image
from spark_host.records import boot
from spark_host.rollout.rollout import all_rollout_locks
from spark_host.system import docker, systemd
from spark_host.system.host import Host, load_release, release_names

_UP = ("active", "activating", "reloading", "deactivating")


def plan_prune(keep: KeepList, paths: Paths) -> Pruning:
    """Return the items to remove, and the reason for each release to keep."""
    if not docker.is_up():
        raise HostToolError("docker", "does not respond", "run `systemctl status docker`")
    jobs = resources.known_jobs(paths)
    kept = _kept_releases(keep, paths)
    busy = _busy_jobs(jobs, paths)
    needed = _needed_folders(keep, kept, busy, jobs, paths)
    parents = {"tree": keep.models_dir, "source": keep.sources_dir, "cache": keep.cache_dir}
    parent_paths = [(kind, paths.below(parent)) for kind, parent in parents.items()]
    managed, others = resources.managed_folders(parent_paths, jobs, paths)
    folders = [folder for folder in managed if folder.owner not in needed]
    folders += [
        Folder("cache", path, path)
        for folder in managed
        if folder.kind == "cache" and folder.owner in needed
        for path in sorted(folder.path.iterdir())
        if path.name not in kept
    ]
    folders += resources.old_tools(paths)
    removed_images, kept_images = _split_images(keep, kept, busy, jobs, paths)
    removed_folders = {folder.owner for folder in folders}
    freed = resources.freed_bytes(folder.path for folder in folders)
    sizes = {str(path): size for path, size in freed.items()}
    sizes |= resources.image_bytes(removed_images, kept_images)
    kinds_and_names = [("release", name) for name in release_names(paths) if name not in kept]
    kinds_and_names += [(folder.kind, str(folder.path)) for folder in folders]
    kinds_and_names += [("image", image.reference) for image in removed_images]
    kinds_and_names += [
        ("job", name)
        for name, job in sorted(jobs.items())
        if name not in busy and _is_stale(job, needed, removed_folders, removed_images, paths)
    ]
    items = tuple(Prunable(kind, name, sizes.get(name, 0)) for kind, name in kinds_and_names)
    freed_bytes = sum(item.bytes for item in items)
    return Pruning(items, freed_bytes, kept, unmanaged=tuple(map(str, others)), problems=())


def _kept_releases(keep: KeepList, paths: Paths) -> dict[str, str]:
    """Map each release that must be kept to the reason."""
    all_names, host = release_names(paths), Host(paths)
    templates = (units.SERVE, units.SWITCH)
    states = systemd.show([t.unit(name) for t in templates for name in all_names], ["ActiveState"])
    kept: dict[str, str] = {}
    for service in {parse_service(name) for name in all_names}:
        record = boot.read_known_good(service, host)
        # A release with a damaged document cannot be a rollback target.
        previous = [name for name in record.previous if name in all_names and host.release(name)]
        stopped = host.disk.read(Stopped, paths.stopped(service))
        reasons = [(name, "rollback target") for name in previous[: keep.releases_kept]]
        reasons += [(name, "starts at boot") for name in boot.enabled_releases(service, host)]
        reasons += [(record.release, "last known-good release")] if record.release else []
        reasons += [(stopped.release, "stopped on purpose")] if stopped and stopped.release else []
        kept.update({name: reason for name, reason in reasons if name in all_names})
    for name in all_names:
        serving, rollout = (states.get(t.unit(name), {}).get("ActiveState") for t in templates)
        if serving in _UP:
            kept[name] = "serving"
        elif rollout in _UP:
            kept[name] = "rollout in progress"
        elif name in keep.releases:
            kept.setdefault(name, "in the settings")
    return kept


def _busy_jobs(jobs: dict[str, Job], paths: Paths) -> set[str]:
    """Return jobs that run, wait or start at the next boot."""
    states = systemd.show([job.unit for job in jobs.values()], ["ActiveState", "Job"])
    busy = set()
    for name, job in jobs.items():
        state = states.get(job.unit, {})
        if state.get("ActiveState") in _UP or systemd.is_queued(state):
            busy.add(name)
    links = paths.boot_links
    for link in links.glob(units.PREPARE.unit("*")) if links.is_dir() else ():
        drop_ins = (paths.units / f"{link.name}.d").glob("*.conf")
        busy |= {drop_in.stem for drop_in in drop_ins} & set(jobs)
    return busy


def _needed_folders(
    keep: KeepList, kept: Iterable[str], busy: set[str], jobs: dict[str, Job], paths: Paths
) -> set[Path]:
    """Return folders that the plan, kept releases, busy jobs or repairs need."""
    needed = {paths.below(path) for path in keep.folders}
    for release in (load_release(name, paths) for name in kept):
        needed.add(paths.below(release.tree.path))
        needed |= {paths.below(mount.source) for mount in release.engine.mounts}
    with_earlier_jobs = busy.union(*(jobs[name].after for name in busy)) & jobs.keys()
    results = (resources.result_folder(jobs[name], paths) for name in with_earlier_jobs)
    needed |= {folder for folder in results if folder}
    for tree in list(needed):
        # To repair a checkpoint, a job reads the base.
        receipt = receipts.find_receipt(tree)
        if isinstance(receipt, receipts.CheckpointReceipt):
            needed.add(paths.below(receipt.plan.base_dir))
    return needed


def _split_images(
    keep: KeepList, kept: Iterable[str], busy: set[str], jobs: dict[str, Job], paths: Paths
) -> tuple[list[Image], list[Image]]:
    """Return the managed images as two lists: removable and needed."""
    needed = set(keep.images) | resources.image_references_in_use()
    needed |= {load_release(name, paths).image.tag for name in kept}
    needed |= {image for name in busy if (image := resources.job_image(jobs[name]))}
    needed |= {job.base for job in jobs.values() if job.base and resources.job_image(job) in needed}
    managed = resources.managed_images(jobs, paths)
    needed_images = [image for image in managed if image.reference in needed]
    return [image for image in managed if image.reference not in needed], needed_images


def _is_stale(
    job: Job, needed: set[Path], removed: set[Path], removed_images: list[Image], paths: Paths
) -> bool:
    """Return whether this prune removes a job's result, or the result is gone and not needed."""
    folder = resources.result_folder(job, paths)
    if folder is not None:
        return folder in removed or (folder not in needed and not folder.exists())
    return resources.job_image(job) in {image.reference for image in removed_images}


def remove(plan: Pruning, paths: Paths) -> Pruning:
    def names(*kinds: str) -> list[str]:
        return [item.name for item in plan.items if item.kind in kinds]

    for name in names("release"):
        _remove_release(name, paths)
    for name in names("tree", "source", "cache", "tools"):
        resources.remove_folder(Path(name))
    problems = [docker.remove_image(name) for name in reversed(names("image"))]  # most layers first
    for name in names("job"):  # after the images, which are recognized by the jobs
        _remove_with_folder(paths.job(name) / "job.json")
        shutil.rmtree(paths.units / f"{units.JOB.unit(name)}.d", ignore_errors=True)
    systemd.reload()
    return replace(plan, problems=tuple(filter(None, problems)))


def _remove_release(name: str, paths: Paths) -> None:
    service, host = parse_service(name), Host(paths)
    record = boot.read_known_good(service, host)
    if name in record.previous:
        previous = tuple(other for other in record.previous if other != name)
        # A full disk must not stop this, because readers ignore absent releases.
        with suppress(OSError):
            host.disk.write(paths.known_good(service), replace(record, previous=previous))
    records = (paths.proof, paths.answers, paths.rollout, paths.request, paths.compile_cache)
    for record_path in records:
        record_path(name).unlink(missing_ok=True)
    for template in (units.SERVE, units.WATCH, units.PREPARE):
        shutil.rmtree(paths.units / f"{template.unit(name)}.d", ignore_errors=True)
    (paths.boot_links / units.PREPARE.unit(name)).unlink(missing_ok=True)
    _remove_with_folder(paths.release(name))


def _remove_with_folder(document: Path) -> None:
    """Delete the document first, because readers ignore folders without a document."""
    files.remove(document)
    shutil.rmtree(document.parent)


def main(args: list[str], paths: Paths) -> Pruning:
    dry = "--dry" in args
    requests = [arg for arg in args if arg != "--dry"]
    if len(requests) != 1:
        raise HostToolError("prune", "expected one JSON document", "run deploys/prune.py", 2)
    keep = parse(KeepList, requests[0])
    with nullcontext() if dry else all_rollout_locks(paths):
        plan = plan_prune(keep, paths)
        return plan if dry else remove(plan, paths)
