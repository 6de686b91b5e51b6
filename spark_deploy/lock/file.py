"""Read, validate and write the lock file."""

from pathlib import Path

import yaml
from spark_contract import files

from spark_deploy.config.checkout import load_schema, read_mapping
from spark_deploy.config.documents import convert, to_yaml_data
from spark_deploy.config.errors import LockError
from spark_deploy.config.schema_errors import schema_problems
from spark_deploy.lock.types import Lock

_HEAD = """\
# Written by `spark-deploy update`: the commit or digest of every name.
# Keep it in version control. To update a name: `spark-deploy update --only NAME`.
"""


def read_lock(path: Path) -> Lock:
    if not path.exists():
        return Lock.from_entries()
    data, problems = read_mapping(path, label=path.name)
    problems = problems or list(schema_problems(data, load_schema("lock"), lambda key: path.name))
    if problems:
        raise LockError(problems)
    return convert(Lock, data)


def validate_lock(lock: Lock) -> Lock:
    """Return the lock; raise LockError if a response of hub or registry broke the schema."""
    data, where = to_yaml_data(lock, include_nulls=False), "the response of the hub or registry"
    problems = list(schema_problems(data, load_schema("lock"), lambda key: where))
    if problems:
        raise LockError(problems)
    return lock


def write_lock(path: Path, lock: Lock) -> None:
    data = to_yaml_data(lock, include_nulls=False)
    text = _HEAD + yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)
    try:
        files.write_text(path, text)
    except OSError as error:
        fix = "make its directory writable, or set lock_file to another path"
        raise LockError.one(str(path), f"cannot be written: {error.strerror}", fix) from error
