"""What of ours lies on this host, and how many bytes its removal gives back."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from spark_contract import files, receipts
from spark_contract.errors import HostToolError
from spark_contract.job import IMAGE_PULL_JOB, ImageProof, Job, JobRun
from spark_contract.paths import Paths
from spark_contract.units import CACHE_NAME, DIGEST12, DIGEST_LABEL, IMAGE_NAME, TREE_NAME

from spark_host.jobs import jobs
from spark_host.system import docker
from spark_host.system.folders import remove_tree
from spark_host.system.host import read_document

# How a tree is called while it grows, after it was found damaged, and while it is removed.
_UNFINISHED = re.compile(r"^(?:\.(?P<hidden>.+)\.(?:partial|pruned)|(?P<plain>.+)\.damaged)$")
PRUNED = ".pruned"
_OLD_TOOLS = re.compile(
    rf"^(site-|quantiser-)?{DIGEST12}(\.new)?$|^\.(site-|quantiser-)?{DIGEST12}\{PRUNED}$"
    r"|^\.new-\w+$"
)


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory of ours; ``of`` is the place it grows into or was moved from."""

    kind: str  # "tree" | "source" | "cache"
    path: Path
    of: Path


@dataclass(frozen=True, slots=True)
class Image:
    """An image that our jobs built or pulled; ``layers`` from the lowest."""

    reference: str
    size_bytes: int
    layers: tuple[str, ...]


def known_jobs(paths: Paths) -> dict[str, Job]:
    """Return every job of this host that can be read, by its twelve digits."""
    found = {}
    for digest12 in jobs.all_digests(paths):
        try:
            found[digest12] = jobs.load(digest12, paths)
        except HostToolError:
            continue  # says nothing of what it made, so nothing is ours by its word
    return found


def folders(kind: str, parent: Path, made: Iterable[Path]) -> tuple[list[Folder], list[Path]]:
    """List our directories in ``parent`` and, beside them, what is not ours.

    Ours is what carries our receipt under a name that ends in an identity, what one of our jobs
    was to make, and the compile caches that our releases mount. A symlink is never ours.
    """
    ours, others = [], []
    jobs_make = set(made)
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        unfinished = _UNFINISHED.match(path.name)
        of = path
        if unfinished:
            of = parent / (unfinished["hidden"] or unfinished["plain"])
        if kind == "cache":
            mine = bool(CACHE_NAME.match(of.name))
        else:
            mine = bool(TREE_NAME.match(of.name)) and (
                bool(unfinished) or of in jobs_make or receipts.found(path) is not None
            )
        if mine and path.is_dir() and not path.is_symlink():
            ours.append(Folder(kind, path, of))
        else:
            others.append(path)
    return ours, others


def old_tools(paths: Paths) -> list[Folder]:
    """List folders of earlier host tools and packages that nothing leads to and nobody runs."""
    if not paths.tools.is_dir():
        return []
    current = {(paths.tools / link).resolve() for link in ("current", "site", "quantiser")}
    found = (path for path in sorted(paths.tools.iterdir()) if _OLD_TOOLS.match(path.name))
    return [
        Folder("tools", path, path)
        for path in found
        if path.is_dir() and not path.is_symlink() and path.resolve() not in current
        and not _is_run(path)
    ]  # fmt: skip


def _is_run(folder: Path) -> bool:
    """Return whether a process was started with programs or packages of a folder."""
    name = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        for told in ("cmdline", "environ"):
            with suppress(OSError):  # it ended meanwhile
                if name in (process / told).read_bytes():
                    return True
    return False


def freed_bytes(directories: Iterable[Path]) -> dict[Path, int]:
    """Return what removing all of ``directories`` gives back, each file counted once.

    A file that is linked from elsewhere too (overlay trees link their base, a source may link
    the user's own cache) gives back nothing.
    """
    freed = dict.fromkeys(directories, 0)
    links: dict[tuple[int, int], int] = {}
    for directory in freed:
        for info in _files_below(directory):
            identity = (info.st_dev, info.st_ino)
            links[identity] = links.get(identity, 0) + 1
            if links[identity] == info.st_nlink:
                freed[directory] += info.st_blocks * 512
    return freed


def _files_below(directory: Path) -> Iterable[os.stat_result]:
    todo = [os.fspath(directory)]
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as entries:  # too deep to be named, or gone
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False)


def images(known: dict[str, Job], paths: Paths) -> list[Image]:
    """List the images our jobs made, those with few layers first.

    Built ones carry our label. Of the pulled ones only those count that a job of ours really
    pulled by digest and nobody has given a name since.
    """
    pulled = {
        image
        for digest12, job in known.items()
        if job.kind == IMAGE_PULL_JOB and _ran(digest12, paths) and (image := image_of(job))
    } | {job.base for job in known.values() if job.base}
    found = {}
    for entry in docker.query("/images/json") or []:
        tags = [tag for tag in entry.get("RepoTags") or () if tag != "<none>:<none>"]
        labels = entry.get("Labels") or {}
        if labels.get(DIGEST_LABEL):
            mine = [tag for tag in tags if tag.startswith(f"{IMAGE_NAME}:")]
        else:
            mine = [] if tags else [ref for ref in entry.get("RepoDigests") or () if ref in pulled]
        for reference in mine:
            known_image = docker.image(reference)
            if known_image is not None:
                layers = tuple((known_image.get("RootFS") or {}).get("Layers") or ())
                found[reference] = Image(reference, int(known_image.get("Size") or 0), layers)
    return sorted(found.values(), key=lambda image: (len(image.layers), image.reference))


def in_containers() -> set[str]:
    """Return the images that some container, running or not, was made from."""
    found = docker.query("/containers/json?all=1") or []
    ids = {str(item.get("ImageID")) for item in found}
    names = {str(item.get("Image")) for item in found}
    for image_id in ids:
        known_image = docker.query(f"/images/{quote(image_id, safe=':')}/json") or {}
        names |= {*(known_image.get("RepoTags") or ()), *(known_image.get("RepoDigests") or ())}
    return names


def image_bytes(going: list[Image], staying: list[Image]) -> dict[str, int]:
    """Return what each image gives back: its layers that no other image of ours has.

    Those that go are listed with few layers first.
    """
    counted = list(staying)
    freed = {}
    for image in going:
        shared = [
            other.size_bytes
            for other in counted
            if other.layers == image.layers[: len(other.layers)]
        ]
        above = any(image.layers == other.layers[: len(image.layers)] for other in staying)
        freed[image.reference] = 0 if above else image.size_bytes - max(shared, default=0)
        counted.append(image)
    return freed


def image_of(job: Job) -> str | None:
    """Return the image that a job makes."""
    return job.proof.image if isinstance(job.proof, ImageProof) else None


def _ran(digest12: str, paths: Paths) -> bool:
    """Tell a job that did the work from one that found it done."""
    last = read_document(JobRun, paths.job(digest12) / jobs.STATUS)
    return last is not None and last.started_at is not None


def remove_folder(path: Path) -> None:
    """Remove a directory; it is renamed first, so that what is cut short looks whole to nobody."""
    aside = path
    if not path.name.endswith(PRUNED):
        aside = path.with_name(f".{path.name.lstrip('.')}{PRUNED}")
        remove_tree(aside)
        path.rename(aside)
        files.sync_directory(path.parent)
    if not remove_tree(aside):
        what = "cannot be removed"
        raise HostToolError(str(aside), what, f"rm -rf {aside} shows why; then run again")
