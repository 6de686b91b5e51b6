"""Put managed files in place, all of them in one command."""

from __future__ import annotations

import base64
import io
import shlex
import tarfile
from collections.abc import Container, Generator, Iterable, Sequence
from pathlib import PurePosixPath
from weakref import WeakKeyDictionary

from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.context import host, state

from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.facts import FileStates, expect_fact, read_fact
from spark_deploy.plan.managed_files import FileState, ManagedFile, differing

SHOWN = 2  # names of differing files; a first run would fill screens


_expected_paths: WeakKeyDictionary[Host, dict[str, None]] = WeakKeyDictionary()


def expect_files(paths: Iterable[str]) -> None:
    """Note what operations of this run will look at: one question then asks for all of it."""
    this = state.inventory.get_host(host.name)
    _expected_paths.setdefault(this, {}).update(dict.fromkeys(paths))
    expect_fact(FileStates, lambda: {"paths": tuple(_expected_paths[this])})


def file_states(paths: Sequence[str]) -> dict[str, FileState]:
    """Return what the host has at ``paths``; what is not there is left out."""
    expect_files(paths)
    found = read_fact(FileStates, paths=tuple(_expected_paths[state.inventory.get_host(host.name)]))
    return {path: found[path] for path in paths if path in found}


def place_files(files: Sequence[ManagedFile]) -> Generator[StringCommand, None, bool]:
    """Yield the one command that repairs what differs; return whether anything did.

    For use inside operations (``yield from``), because an operation cannot call another.
    """
    states = file_states([file.path for file in files])
    wrong = differing(files, states)
    if not wrong:
        return False
    host.log(describe_changes([file.path for file in wrong], states))
    yield put_files(wrong)
    return True


def describe_changes(paths: Sequence[str], there: Container[str]) -> str:
    """Say in one line which files are new, and which are there and differ."""
    parts = []
    for word, found in (
        ("new", [path for path in paths if path not in there]),
        ("changed", [path for path in paths if path in there]),
    ):
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            files = "file" if len(found) == 1 else "files"
            parts.append(f"{len(found)} {files} {word}: {', '.join(found[:SHOWN])}{more}")
    return "; ".join(parts)


def put_files(files: Sequence[ManagedFile]) -> StringCommand:
    """Return the command that puts files in place, whatever is there."""
    return shell(unpack_script(files), stdin=pack_files(files))


def pack_files(files: Iterable[ManagedFile]) -> str:
    """Pack file contents as base64 of a tar whose members are named by position.

    Text, because it travels on a command's standard input; positions, because no path of ours
    may steer what ``tar`` writes.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for number, file in enumerate(files):
            info = tarfile.TarInfo(str(number))
            info.size, info.mode = len(file.content), 0o600
            tar.addfile(info, io.BytesIO(file.content))
    return base64.encodebytes(buffer.getvalue()).decode()


def unpack_script(files: Iterable[ManagedFile]) -> str:
    """Return the shell script that puts ``archive(files)`` from standard input in place.

    Each file is written beside its target, flushed, and renamed over it, so that a reader
    sees the old or the new content and never half of either.
    """
    lines = [
        "set -e; umask 077; d=$(mktemp -d); trap 'rm -rf \"$d\"' EXIT",
        'base64 -d | tar -xzf - -C "$d"',
        'put() { install -D -o root -g root -m "$2" "$d/$1" "$3.spark-new"'
        ' && sync "$3.spark-new" && mv -fT "$3.spark-new" "$3"; }',
        # `install -D` creates parents with the umask; ours are for everyone to look into.
        "umask 022",
    ]
    lines += [
        f"put {number} {file.mode:o} {shlex.quote(file.path)}" for number, file in enumerate(files)
    ]
    return "\n".join(lines)


def encode_lines(content: bytes) -> str:
    """Return bytes as text for a command's standard input, in lines of 60 kB."""
    lines = (content[at : at + 45_000] for at in range(0, len(content), 45_000))
    return "\n".join(base64.b64encode(line).decode() for line in lines) + "\n"


def unzip_script(home: str, sha256: str, receipt: str) -> str:
    """Return the shell script that unpacks a zip of ``in_lines`` from standard input as ``home``.

    It is received beside its place, in a folder of root alone, and opened only when the host finds
    the hash that was sent for. pyinfra's own upload goes through a name in ``/tmp`` that any user
    of the host can foresee.
    """
    target, parent = shlex.quote(home), shlex.quote(str(PurePosixPath(home).parent))
    other = shlex.quote(f"{home}: the bytes that arrived are not those sent")
    return "\n".join(
        (
            f"set -e; cd /; umask 077; mkdir -p -m 0755 {parent}",
            f"d=$(mktemp -d {parent}/.new-XXXXXX)",
            "trap 'rm -rf \"$d\"' EXIT",
            'base64 -d > "$d/zip"',
            f'if ! echo "{sha256}  $d/zip" | sha256sum --check --status; then',
            f"  echo {other} >&2; exit 1",
            "fi",
            'umask 022; mkdir "$d/home"; python3 -I -m zipfile -e "$d/zip" "$d/home"',
            f'printf \'%s\\n\' {shlex.quote(receipt)} > "$d/home/.receipt"; sync -f "$d/home"',
            f'rm -rf {target}; mv -T "$d/home" {target}',
        )
    )
