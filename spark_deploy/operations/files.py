"""Put the files we manage in place, all of them in one step."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Sequence

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from spark_deploy.facts.files import FileStates
from spark_deploy.managed import ManagedFile, archive, differing, unpack_script

SHOWN = 8  # names of differing files; a first run would fill screens


def place(files: Sequence[ManagedFile]) -> Generator[StringCommand, None, bool]:
    """Yield the one command that repairs what differs; return whether anything did.

    For use inside operations (``yield from``), because an operation cannot call another.
    """
    states = host.get_fact(FileStates, paths=[file.path for file in files])
    wrong = differing(files, states)
    if not wrong:
        return False
    for file in wrong[:SHOWN]:
        host.log(f"{file.path}: {'differs' if file.path in states else 'missing'}")
    if len(wrong) > SHOWN:
        host.log(f"and {len(wrong) - SHOWN} more files")
    yield StringCommand("sh", "-c", shlex.quote(unpack_script(wrong)), _stdin=archive(wrong))
    return True


@operation()
def managed_files(
    files: Sequence[ManagedFile], absent: Sequence[str] = ()
) -> Generator[StringCommand, None, None]:
    """Have ``files`` on the host with exactly their content, mode and root as owner.

    Args:
        files: what must be there.
        absent: paths of ours that must not be there (left-overs of an earlier version).
    """
    changed = yield from place(files)
    left = [path for path in absent if path in host.get_fact(FileStates, paths=list(absent))]
    if left:
        yield StringCommand("rm", "-f", "--", *left)
    if not changed and not left:
        host.noop(f"{len(files)} files are as planned")
