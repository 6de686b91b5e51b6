"""Remove what no kept release needs: releases, trees, sources, caches, images, old jobs.

Nothing is removed that we did not make. A directory is renamed before its files go, so that a
prune cut short leaves nothing that looks whole; the next one finishes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from spark_contract import files, receipts, units
from spark_contract.documents import DocumentError, parse
from spark_contract.errors import HostToolError
from spark_contract.job import Job, ReceiptProof
from spark_contract.keep import Keep, Prunable, Pruning
from spark_contract.paths import Paths
from spark_contract.records import Stopped
from spark_contract.release import service_of

from spark_host.prune import holdings
from spark_host.prune.holdings import Folder, Image
from spark_host.records import boot
from spark_host.rollout.rollout import rollout_lock
from spark_host.system import docker, systemd
from spark_host.system.host import Host, load_release, release_names
from spark_host.system.programs import print_json

_UP = ("active", "activating", "reloading", "deactivating")


def read_keep(text: str) -> Keep:
    """Read the controller's wishes; anything missing is an error, never "keep nothing"."""
    try:
        return parse(Keep, text)
    except DocumentError as error:
        what = f"cannot be read: {error}"
        raise HostToolError("prune: what to keep", what, "run deploys/prune.py", 2) from error


@dataclass(frozen=True, slots=True)
class Going:
    """Everything that can go, and why the rest stays."""

    kept: dict[str, str]  # release -> why
    releases: list[str]
    folders: list[Folder]
    images: list[Image]
    jobs: list[str]
    bytes: dict[str, int]  # by path or reference
    others: list[Path]  # beside ours, not ours

    def document(self, problems: Sequence[str] = ()) -> Pruning:
        """Return it for people and controllers."""
        folders = [(folder.kind, str(folder.path)) for folder in self.folders]
        images = [("image", image.reference) for image in self.images]
        items = (
            *(Prunable("release", name, 0) for name in self.releases),
            *(Prunable(kind, name, self.bytes[name]) for kind, name in (*folders, *images)),
            *(Prunable("job", name, 0) for name in self.jobs),
        )
        return Pruning(
            items=items,
            bytes=sum(item.bytes for item in items),
            kept=self.kept,
            not_ours=tuple(map(str, self.others)),
            problems=tuple(problems),
        )


def look(keep: Keep, paths: Paths) -> Going:
    """Find what no root needs; changes nothing."""
    if not docker.is_up():
        raise HostToolError("docker", "does not answer", "systemctl status docker")
    known = holdings.known_jobs(paths)
    kept = _kept_releases(keep, paths)
    busy = _busy_jobs(known, paths)
    needed = _needed_folders(keep, kept, busy, known, paths)
    made = [path for job in known.values() if (path := _made_folder(job, paths))]
    ours, others = [], []
    for kind, parent in (
        ("tree", keep.models_dir), ("source", keep.sources_dir), ("cache", keep.cache_dir)
    ):  # fmt: skip
        found, strange = holdings.folders(kind, paths.below(parent), made)
        ours += found
        others += strange
    folders = [folder for folder in ours if folder.of not in needed]
    folders += [
        Folder("cache", path, path)
        for folder in ours
        if folder.kind == "cache" and folder.of in needed
        for path in sorted(folder.path.iterdir())
        if path.name not in kept
    ]
    folders += holdings.old_tools(paths)
    going_images, staying = _split_images(keep, kept, busy, known, paths)
    gone = {folder.of for folder in folders}
    freed = holdings.freed_bytes(folder.path for folder in folders)
    return Going(
        kept=kept,
        releases=[name for name in release_names(paths) if name not in kept],
        folders=folders,
        images=going_images,
        jobs=sorted(
            name
            for name, job in known.items()
            if name not in busy and _is_stale(job, needed, gone, going_images, paths)
        ),
        bytes={
            **{str(path): size for path, size in freed.items()},
            **holdings.image_bytes(going_images, staying),
        },
        others=others,
    )


def _kept_releases(keep: Keep, paths: Paths) -> dict[str, str]:
    all_names, host = release_names(paths), Host(paths)
    serving = systemd.show([units.SERVE.of(name) for name in all_names], ["ActiveState"])
    changes = systemd.show([units.SWITCH.of(name) for name in all_names], ["ActiveState"])
    kept: dict[str, str] = {}
    for service in {service_of(name) for name in all_names}:
        record = boot.good(service, host)
        here = [name for name in record.previous if name in all_names]
        reasons = [(name, "a way back") for name in here[: keep.releases_kept]]
        reasons += [(name, "boots") for name in boot.enabled(service, host)]
        reasons += [(record.release, "the last good one")] if record.release else []
        stopped = host.disk.read(Stopped, paths.stopped(service))
        reasons += [(stopped.release, "stopped on purpose")] if stopped and stopped.release else []
        kept.update({name: why for name, why in reasons if name in all_names})
    for name in all_names:
        if serving.get(units.SERVE.of(name), {}).get("ActiveState") in _UP:
            kept[name] = "serves"
        elif changes.get(units.SWITCH.of(name), {}).get("ActiveState") in _UP:
            kept[name] = "is being changed to"
        elif name in keep.releases:
            kept.setdefault(name, "is what the settings say")
    return kept


def _busy_jobs(known: dict[str, Job], paths: Paths) -> set[str]:
    """Return jobs that run, wait, or go on at the next boot."""
    asked = systemd.show([job.unit for job in known.values()], ["ActiveState", "Job"])
    busy = {
        name
        for name, job in known.items()
        if (unit := asked.get(job.unit, {})).get("ActiveState") in _UP
        or unit.get("Job", "0") not in ("", "0")
    }
    links = paths.boot_links
    for link in links.glob(units.PREPARE.of("*")) if links.is_dir() else ():
        busy |= {conf.stem for conf in (paths.units / f"{link.name}.d").glob("*.conf")} & set(known)
    return busy


def _made_folder(job: Job, paths: Paths) -> Path | None:
    return paths.below(job.proof.tree) if isinstance(job.proof, ReceiptProof) else None


def _needed_folders(
    keep: Keep, kept: Iterable[str], busy: set[str], known: dict[str, Job], paths: Paths
) -> set[Path]:
    needed = {paths.below(path) for path in keep.folders}
    for release in (load_release(name, paths) for name in kept):
        needed.add(paths.below(release.tree.path))
        needed |= {paths.below(mount.source) for mount in release.engine.mounts}
    for name in busy:
        makes = (name, *(after for after in known[name].after if after in known))
        needed |= {path for one in makes if (path := _made_folder(known[one], paths))}
    for tree in list(needed):
        # A tree is rebuilt or repaired from its base, and shares its files.
        receipt = receipts.found(tree)
        if isinstance(receipt, receipts.CheckpointReceipt):
            needed.add(paths.below(receipt.plan.base_dir))
    return needed


def _split_images(
    keep: Keep, kept: Iterable[str], busy: set[str], known: dict[str, Job], paths: Paths
) -> tuple[list[Image], list[Image]]:
    """Return the images that can go and those that stay."""
    needed = set(keep.images) | holdings.in_containers()
    needed |= {load_release(name, paths).image.tag for name in kept}
    needed |= {image for name in busy if (image := holdings.image_of(known[name]))}
    needed |= {job.base for job in known.values() if job.base and holdings.image_of(job) in needed}
    found = holdings.images(known, paths)
    staying = [image for image in found if image.reference in needed]
    return [image for image in found if image.reference not in needed], staying


def _is_stale(
    job: Job, needed: set[Path], gone: set[Path], images: list[Image], paths: Paths
) -> bool:
    """Return whether what a job made goes, or is gone and not wanted again."""
    made = _made_folder(job, paths)
    if made is not None:
        return made in gone or (made not in needed and not made.exists())
    return holdings.image_of(job) in {image.reference for image in images}


def remove(going: Going, paths: Paths) -> list[str]:
    """Remove everything in ``going``; return what could not be removed, in words."""
    problems = []
    for name in going.releases:
        _remove_release(name, paths)
    for folder in going.folders:
        holdings.remove_folder(folder.path)
    for image in reversed(going.images):
        said = docker.client("rmi", image.reference, timeout_s=600)
        if said.returncode != 0 and "No such image" not in said.stderr:
            problems.append(f"image {image.reference}: {said.stderr.strip()}")
    for name in going.jobs:
        _remove_record(paths.job(name) / "job.json")
        shutil.rmtree(paths.units / f"{units.JOB.of(name)}.d", ignore_errors=True)
    systemd.systemctl("daemon-reload")
    return problems


def _remove_release(name: str, paths: Paths) -> None:
    service = service_of(name)
    host = Host(paths)
    record = boot.good(service, host)
    if name in record.previous:
        left = tuple(other for other in record.previous if other != name)
        # A name without a release is passed over by all who read it, and this is what frees a
        # disk that is too full to write anything.
        with suppress(OSError):
            host.disk.write(paths.good(service), replace(record, previous=left))
    of_it = (paths.proof(name), paths.answers(name), paths.rollout(name), paths.request(name))
    for path in (*of_it, paths.compile_cache(name)):
        path.unlink(missing_ok=True)
    for unit in (units.SERVE.of(name), units.WATCH.of(name), units.PREPARE.of(name)):
        shutil.rmtree(paths.units / f"{unit}.d", ignore_errors=True)
    (paths.boot_links / units.PREPARE.of(name)).unlink(missing_ok=True)
    _remove_record(paths.release(name))


def _remove_record(read_first: Path) -> None:
    """Remove a small directory; without the file that is read first it means nothing."""
    files.remove(read_first)
    shutil.rmtree(read_first.parent)


def main(words: list[str], paths: Paths) -> int:
    """Run ``prune [--dry] KEEP``, where KEEP is the JSON that :func:`read_keep` reads."""
    dry = "--dry" in words
    rest = [word for word in words if word != "--dry"]
    if len(rest) != 1:
        raise HostToolError("prune", "wants one JSON text", "run deploys/prune.py", 2)
    keep = read_keep(rest[0])
    with ExitStack() as locks:
        services = sorted({service_of(name) for name in release_names(paths)})
        for service in services if not dry else ():
            locks.enter_context(rollout_lock(service, Host(paths)))
        going = look(keep, paths)
        problems = [] if dry else remove(going, paths)
    print_json(going.document(problems))
    return 1 if problems else 0
