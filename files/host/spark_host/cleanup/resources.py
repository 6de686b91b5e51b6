"""Finds checkpoints, caches, tools and images that we created, and measures their sizes."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from spark_contract import files, receipts
from spark_contract.job import IMAGE_PULL_JOB, ImageProof, Job, JobRun, ReceiptProof
from spark_contract.paths import Paths
from spark_contract.tool import HostToolError
from spark_contract.units import CACHE_NAME, DIGEST12, DIGEST_LABEL, IMAGE_NAME, TREE_NAME

from spark_host import jobs
from spark_host.system import docker
from spark_host.system.folders import remove_tree
from spark_host.system.host import read_document

# Names of incomplete, damaged and partly removed folders.
_UNFINISHED = re.compile(
    r"^(?:\.(?P<hidden>.+?)(?:\.(?:partial|damaged|pruned))+|(?P<plain>.+)\.damaged)$"
)
_PRUNED = ".pruned"
OLD_TOOLS = re.compile(
    rf"^(site-|quantizer-)?{DIGEST12}(\.new)?$"
    rf"|^\.((site-|quantizer-)?{DIGEST12}(\.new)?|new-\w+)\{_PRUNED}$|^\.new-\w+$"
)
LINKED_TOOLS = ("current", "site", "quantizer")


@dataclass(frozen=True, slots=True)
class Folder:
    """A managed folder; ``owner`` is the path when complete, without a suffix."""

    kind: str  # "tree" | "source" | "cache" | "tools"
    path: Path
    owner: Path


@dataclass(frozen=True, slots=True)
class Image:
    reference: str
    size_bytes: int
    layers: tuple[str, ...]


def known_jobs(paths: Paths) -> dict[str, Job]:
    loaded = {}
    for digest12 in jobs.all_digests(paths):
        with suppress(HostToolError):
            loaded[digest12] = jobs.load_job(digest12, paths)
    return loaded


def result_folder(job: Job, paths: Paths) -> Path | None:
    return paths.below(job.proof.tree) if isinstance(job.proof, ReceiptProof) else None


def managed_folders(
    parents: Iterable[tuple[str, Path]], jobs_by_digest: dict[str, Job], paths: Paths
) -> tuple[list[Folder], list[Path]]:
    """Return the managed folders and all other entries of ``parents``, which lists (kind, path).

    Managed folders have a digest in the name, and a receipt or a job; compile caches need only the
    name. Symlinks are never managed, because they may lead anywhere.
    """
    managed, others = [], []
    results = {result_folder(job, paths) for job in jobs_by_digest.values()}
    existing = [(kind, parent) for kind, parent in parents if parent.is_dir()]
    entries = [(kind, path) for kind, parent in existing for path in sorted(parent.iterdir())]
    for kind, path in entries:
        unfinished = _UNFINISHED.match(path.name)
        owner = path.with_name(unfinished["hidden"] or unfinished["plain"]) if unfinished else path
        pattern = CACHE_NAME if kind == "cache" else TREE_NAME
        is_managed = pattern.match(owner.name) and (
            kind == "cache" or unfinished or owner in results or receipts.find_receipt(path)
        )
        if is_managed and path.is_dir() and not path.is_symlink():
            managed.append(Folder(kind, path, owner))
        else:
            others.append(path)
    return managed, others


def old_tools(paths: Paths) -> list[Folder]:
    """Return the old versions of the host tools that no link points to and no process uses."""
    if not paths.tools.is_dir():
        return []
    current = {(paths.tools / link).resolve() for link in LINKED_TOOLS}
    return [
        Folder("tools", path, path)
        for path in sorted(paths.tools.iterdir())
        if OLD_TOOLS.match(path.name)
        and path.is_dir()
        and not path.is_symlink()
        and path.resolve() not in current
        and not _is_used(path)
    ]


def _is_used(folder: Path) -> bool:
    name = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        for file in ("cmdline", "environ"):
            with suppress(OSError):  # the process has exited
                if name in (process / file).read_bytes():
                    return True
    return False


def freed_bytes(directories: Iterable[Path]) -> dict[Path, int]:
    """Return the bytes that each removal frees; files with other hard links free no space."""
    freed = dict.fromkeys(directories, 0)
    links_seen: dict[tuple[int, int], int] = {}
    for directory in freed:
        for info in _files_below(directory):
            identity = (info.st_dev, info.st_ino)
            links_seen[identity] = links_seen.get(identity, 0) + 1
            if links_seen[identity] == info.st_nlink:
                freed[directory] += info.st_blocks * 512
    return freed


def _files_below(directory: Path) -> Iterator[os.stat_result]:
    pending = [os.fspath(directory)]
    while pending:
        # A path may be too long, or may have been removed.
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False)


def managed_images(jobs_by_digest: dict[str, Job], paths: Paths) -> list[Image]:
    """Return the images that we created, with the fewest layers first.

    These are images with our label, and untagged images that one of our jobs pulled.
    """
    pulled = {job.base for job in jobs_by_digest.values() if job.base}
    for digest12, job in jobs_by_digest.items():
        image = job_image(job)
        if image and job.kind == IMAGE_PULL_JOB and _has_run(digest12, paths):
            pulled.add(image)
    managed: dict[str, Image] = {}
    for entry in docker.query("/images/json") or []:
        tags = [tag for tag in entry.get("RepoTags") or () if tag != "<none>:<none>"]
        if (entry.get("Labels") or {}).get(DIGEST_LABEL):
            references = [tag for tag in tags if tag.startswith(f"{IMAGE_NAME}:")]
        else:
            digests = entry.get("RepoDigests") or ()
            references = [] if tags else [ref for ref in digests if ref in pulled]
        managed |= {ref: inspected for ref in references if (inspected := inspect_image(ref))}
    return sorted(managed.values(), key=lambda image: (len(image.layers), image.reference))


def inspect_image(reference: str) -> Image | None:
    image = docker.inspect_image(reference)
    if image is None:
        return None
    layers = tuple((image.get("RootFS") or {}).get("Layers") or ())
    return Image(reference, int(image.get("Size") or 0), layers)


def image_references_in_use() -> set[str]:
    containers = docker.query("/containers/json?all=1") or []
    references = {str(item.get("Image")) for item in containers}
    for image_id in {str(item.get("ImageID")) for item in containers}:
        image = docker.query(f"/images/{quote(image_id, safe=':')}/json") or {}
        references |= {*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ())}
    return references


def image_bytes(removed: list[Image], kept: list[Image]) -> dict[str, int]:
    """Return the bytes that each removal frees: layers that no kept or earlier image has."""
    others = list(kept)
    freed = {}
    for image in removed:
        shared = [
            other.size_bytes
            for other in others
            if other.layers == image.layers[: len(other.layers)]
        ]
        is_base = any(image.layers == other.layers[: len(image.layers)] for other in kept)
        freed[image.reference] = 0 if is_base else image.size_bytes - max(shared, default=0)
        others.append(image)
    return freed


def job_image(job: Job) -> str | None:
    return job.proof.image if isinstance(job.proof, ImageProof) else None


def _has_run(digest12: str, paths: Paths) -> bool:
    last = read_document(JobRun, paths.job(digest12) / jobs.STATUS)
    return last is not None and last.started_at is not None


def remove_folder(path: Path) -> None:
    """Rename a folder before removing it, so that an interrupted removal is visible."""
    aside = path
    if not path.name.endswith(_PRUNED):
        aside = path.with_name(f".{path.name.lstrip('.')}{_PRUNED}")
        remove_tree(aside)
        path.rename(aside)
        files.sync_directory(path.parent)
    if not remove_tree(aside):
        fix = f"run `rm -rf {aside}` to see the error, then run the command again"
        raise HostToolError(str(aside), "cannot be removed", fix)
