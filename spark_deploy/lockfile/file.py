"""Read and write ``spark.lock.yml``: the file that turns names into identities."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spark_deploy.documents.declare import convert
from spark_deploy.documents.files import load_schema, read_mapping
from spark_deploy.documents.schema_check import problems_of
from spark_deploy.errors import LockError
from spark_deploy.lockfile.types import Lock, LockedImage, LockedSource

_HEAD = """\
# Written by `spark-deploy lock`: which commit and which digest stand behind every name.
# Keep it in version control. To move a name forward: `spark-deploy lock --update NAME`.
"""


def read_lock(path: Path) -> Lock:
    """Return the lock of ``path``; an empty one when there is no such file."""
    if not path.exists():
        return Lock()
    data, problems = read_mapping(path, shown=path.name)
    problems = problems or list(problems_of(data, load_schema("lock"), lambda key: path.name))
    if problems:
        raise LockError(problems)
    return from_data(data)


def write_lock(path: Path, lock: Lock) -> None:
    """Write the lock in one step: a reader sees the old file or the new one."""
    text = _HEAD + yaml.safe_dump(to_data(lock), sort_keys=False, width=120, allow_unicode=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        fix = "make its folder writable, or set lock_file to another place"
        raise LockError.one(str(path), f"cannot be written: {error.strerror}", fix) from error


def with_entries(
    lock: Lock, sources: Sequence[LockedSource] = (), images: Sequence[LockedImage] = ()
) -> Lock:
    """Return the lock with entries added; a name that is there already is replaced."""
    by_repo = {source.repo: source for source in (*lock.sources, *sources)}
    by_reference = {image.reference: image for image in (*lock.images, *images)}
    return Lock(
        sources=tuple(by_repo[repo] for repo in sorted(by_repo)),
        images=tuple(by_reference[name] for name in sorted(by_reference)),
    )


def to_data(lock: Lock) -> dict[str, Any]:
    """Return the lock as plain data, sorted by name."""
    return {
        "schema_version": 1,
        "sources": {
            source.repo: {
                "revision": source.revision,
                "commit": source.commit,
                "files": [
                    {
                        key: value
                        for key, value in dataclasses.asdict(file).items()
                        if value is not None
                    }
                    for file in sorted(source.files, key=lambda file: file.path)
                ],
            }
            for source in sorted(lock.sources, key=lambda source: source.repo)
        },
        "images": {
            image.reference: {"digest": image.digest, "size_bytes": image.size_bytes}
            for image in sorted(lock.images, key=lambda image: image.reference)
        },
    }


def from_data(data: dict[str, Any]) -> Lock:
    """Return the lock of valid plain data."""
    sources = [{**entry, "repo": repo} for repo, entry in data["sources"].items()]
    images = [{**entry, "reference": name} for name, entry in data["images"].items()]
    return convert(Lock, {"sources": sources, "images": images})
