"""Read and write ``spark.lock.yml``: the file that turns names into identities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from spark_contract import files

from spark_deploy.config.documents import convert, typed
from spark_deploy.config.errors import LockError
from spark_deploy.config.schema_errors import problems_of
from spark_deploy.config.yaml_files import load_schema, read_mapping
from spark_deploy.lock.types import Lock

_HEAD = """\
# Written by `spark-deploy update`: which commit and which digest stand behind every name.
# Keep it in version control. To move a name forward: `spark-deploy update --only NAME`.
"""


def read_lock(path: Path) -> Lock:
    """Return the lock of ``path``; an empty one when there is no such file."""
    if not path.exists():
        return Lock.of()
    data, problems = read_mapping(path, shown=path.name)
    _drop_gone(data.get("names"))
    problems = problems or list(problems_of(data, load_schema("lock"), lambda key: path.name))
    if problems:
        raise LockError(problems)
    return convert(Lock, data)


def _drop_gone(names: Any) -> None:
    for held in names.values() if isinstance(names, dict) else ():
        if isinstance(held, dict):
            held.pop("base_headers", None)
            held.pop("donor_headers", None)


def checked(lock: Lock) -> Lock:
    """Return a lock made of answers of others, if it has the form that is demanded of the file.

    Raises:
        LockError: A hub or registry answered what must not reach a host.
    """
    data, where = typed(lock, nulls=False), "the answer of the hub or registry"
    problems = list(problems_of(data, load_schema("lock"), lambda key: where))
    if problems:
        raise LockError(problems)
    return lock


def write_lock(path: Path, lock: Lock) -> None:
    """Write the lock in one step: a reader sees the old file or the new one, a power cut or not."""
    data = typed(lock, nulls=False)
    text = _HEAD + yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)
    try:
        files.write_text(path, text)
    except OSError as error:
        fix = "make its folder writable, or set lock_file to another place"
        raise LockError.one(str(path), f"cannot be written: {error.strerror}", fix) from error
