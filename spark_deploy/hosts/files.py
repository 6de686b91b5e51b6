"""Write managed files, with a single command for all files that differ."""

import base64
import io
import shlex
import tarfile
from collections.abc import Container, Generator, Iterable, Sequence
from pathlib import PurePosixPath
from weakref import WeakKeyDictionary

from pyinfra import host
from pyinfra.api import Host, StringCommand

from spark_deploy.hosts.commands import current_host, shell
from spark_deploy.hosts.facts import FileStates, expect_fact, read_fact
from spark_deploy.plan.types import FileState, ManagedFile, outdated_files

_MAX_NAMES = 2

_expected_paths: WeakKeyDictionary[Host, dict[str, None]] = WeakKeyDictionary()


def expect_files(paths: Iterable[str]) -> None:
    """Declare files whose state is prefetched, together with files declared earlier."""
    current = current_host()
    _expected_paths.setdefault(current, {}).update(dict.fromkeys(paths))
    expect_fact(FileStates, lambda: {"paths": tuple(_expected_paths[current])})


def file_states(paths: Sequence[str]) -> dict[str, FileState]:
    expect_files(paths)
    states = read_fact(FileStates, paths=tuple(_expected_paths[current_host()]))
    return {path: states[path] for path in paths if path in states}


def place_files(files: Sequence[ManagedFile]) -> Generator[StringCommand, None, bool]:
    """Yield a command that writes missing and outdated files; return whether there were any.

    Use ``yield from``, because operations cannot call each other.
    """
    states = file_states([file.path for file in files])
    outdated = outdated_files(files, states)
    if not outdated:
        return False
    host.log(describe_changes([file.path for file in outdated], states))
    yield write_command(outdated)
    return True


def remove_files(paths: Sequence[str]) -> Generator[StringCommand, None, bool]:
    """Yield a command that removes the files that exist; return whether any existed."""
    present = list(file_states(paths))
    if present:
        yield StringCommand("rm", "-f", "--", *map(shlex.quote, present))
    return bool(present)


def sync_files(
    files: Sequence[ManagedFile], *, enabled: bool
) -> Generator[StringCommand, None, bool]:
    if enabled:
        return (yield from place_files(files))
    return (yield from remove_files([file.path for file in files]))


def describe_changes(paths: Sequence[str], present: Container[str]) -> str:
    new = [path for path in paths if path not in present]
    changed = [path for path in paths if path in present]
    parts = []
    for kind, group in (("new", new), ("changed", changed)):
        if group:
            hidden = len(group) - _MAX_NAMES
            more = f" and {hidden} more" if hidden > 0 else ""
            count = "1 file" if len(group) == 1 else f"{len(group)} files"
            parts.append(f"{count} {kind}: {', '.join(group[:_MAX_NAMES])}{more}")
    return "; ".join(parts)


def write_command(files: Sequence[ManagedFile]) -> StringCommand:
    return shell(unpack_script(files), stdin=pack_files(files))


def pack_files(files: Iterable[ManagedFile]) -> str:
    """Return a base64-encoded tar archive of the contents, for standard input.

    Members are named by number, so that a crafted path cannot make ``tar`` write elsewhere.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for number, file in enumerate(files):
            info = tarfile.TarInfo(str(number))
            info.size, info.mode = len(file.content), 0o600
            tar.addfile(info, io.BytesIO(file.content))
    return base64.encodebytes(buffer.getvalue()).decode()


_DISK_FIX = "files not written; fix: check for a full or read-only disk (df, findmnt, dmesg)"


def unpack_script(files: Iterable[ManagedFile]) -> str:
    """Return the script that unpacks ``pack_files(files)`` from standard input.

    Each file is written to a temporary name, synced and renamed: readers never see a partial file.
    """
    lines = [
        f"set -e; umask 077; d=; fix() {{ echo {shlex.quote(_DISK_FIX)} >&2; }}",
        "trap '[ $? = 0 ] || fix; rm -rf \"$d\"' EXIT; d=$(mktemp -d -p /run)",
        'base64 -d | tar -xzf - -C "$d"',
        'put() { install -D -o root -g root -m "$2" "$d/$1" "$3.spark-new"'
        ' && sync "$3.spark-new" && mv -fT "$3.spark-new" "$3"; }',
        # `install -D` creates parents with the umask.
        "umask 022",
    ]
    lines += [
        f"put {number} {file.mode:o} {shlex.quote(file.path)}" for number, file in enumerate(files)
    ]
    return "\n".join(lines)


def encode_lines(content: bytes) -> str:
    """Return base64 in lines of 60 kB, for standard input."""
    step = 45_000  # bytes; base64 adds a third
    chunks = (content[start : start + step] for start in range(0, len(content), step))
    return "".join(f"{base64.b64encode(chunk).decode()}\n" for chunk in chunks)


def unzip_script(home: str, sha256: str, receipt: str) -> str:
    """Return a script that unpacks a zip into ``home``; stdin is the output of ``encode_lines``.

    It verifies the zip in a directory that only root can read, not in ``/tmp``, where pyinfra would
    upload it under a predictable name.
    """
    target, parent = shlex.quote(home), shlex.quote(str(PurePosixPath(home).parent))
    mismatch = shlex.quote(f"{home}: checksum mismatch after the transfer")
    return "\n".join(
        (
            f"set -e; cd /; umask 077; mkdir -p -m 0755 {parent}",
            f'd={shlex.quote(home + ".new")}; rm -rf "$d"; mkdir "$d"',
            "trap 'rm -rf \"$d\"' EXIT",
            'base64 -d > "$d/zip"',
            f'if ! echo "{sha256}  $d/zip" | sha256sum --check --status; then',
            f"  echo {mismatch} >&2; exit 1",
            "fi",
            'umask 022; mkdir "$d/home"; python3 -I -m zipfile -e "$d/zip" "$d/home"',
            f'printf \'%s\\n\' {shlex.quote(receipt)} > "$d/home/.receipt"; sync -f "$d/home"',
            f'rm -rf {target}; mv -T "$d/home" {target}',
        )
    )
