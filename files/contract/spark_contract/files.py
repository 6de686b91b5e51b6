"""Write files durably: under a temporary name, then synced and renamed."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

from spark_contract import documents
from spark_contract.tool import HostToolError

_T = TypeVar("_T")


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    write_chunks(path, [text.encode()], mode)


def write_chunks(path: Path, chunks: Iterable[bytes], mode: int = 0o644) -> None:
    """Write a file atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_files(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = _create_file(temporary, mode)
    except OSError as error:  # name the target, not the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        os.fchmod(descriptor, mode)
        for chunk in chunks:
            write_all(descriptor, chunk)
        sync(descriptor)
    except OSError as error:
        temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    sync_directory(path.parent)


def _remove_stale_files(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote ``path``."""
    prefix = f".{path.name}."
    with os.scandir(path.parent) as entries:
        matching = [entry for entry in entries if entry.name.startswith(prefix)]
    for entry in matching:
        process_id = entry.name.removeprefix(prefix)
        if process_id.isdecimal() and not _is_running(int(process_id)):
            Path(entry).unlink(missing_ok=True)


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _create_file(path: Path, mode: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(path, flags, mode)
    except FileExistsError:  # left by a killed process with the same id, or planted
        path.unlink()
        return os.open(path, flags, mode)


@contextmanager
def name_file_in_errors(descriptor: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.readlink(f"/proc/self/fd/{descriptor}")
        raise


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all bytes; ``os.write`` may write only some of them on a nearly full disk."""
    remaining = memoryview(data)
    with name_file_in_errors(descriptor):
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]


def sync(descriptor: int) -> None:
    """Make file content or directory entries survive a power cut."""
    with name_file_in_errors(descriptor):
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_directory(path.parent)
    return True


def load(kind: type[_T], path: Path, problem_if_missing: str) -> _T:
    """Return a deployed document; raise ``HostToolError`` if it is missing or malformed."""
    fix = "run the deploy for this host again"
    try:
        return documents.parse(kind, path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise HostToolError(str(path), problem_if_missing, fix, 2) from error
    except ValueError as error:
        raise HostToolError(str(path), f"malformed: {error}", fix, 2) from error


def now(plus_s: float = 0) -> str:
    """Return the UTC time ``plus_s`` seconds from now, as ISO 8601."""
    time = datetime.now(timezone.utc) + timedelta(seconds=plus_s)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
