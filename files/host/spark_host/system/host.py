"""Access to a host's documents, releases, events, accounts, systemd and clock.

Tests simulate :class:`Host`.
"""

import fcntl
import json
import os
import pwd
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from spark_contract import documents, files
from spark_contract.documents import DocumentError
from spark_contract.gateway import Gateway
from spark_contract.paths import Paths
from spark_contract.records import Event
from spark_contract.release import Release, parse_service
from spark_contract.tool import MAKE_USERS, HostToolError
from spark_contract.units import RELEASE_NAME

from spark_host.system import systemd
from spark_host.system.systemd import UnitState

_T = TypeVar("_T")
_MAX_EVENTS = 1000
_event_lock = threading.Lock()


def default_paths() -> Paths:
    return Paths(Path(os.environ.get("SPARK_ROOT", "/")))


def read_document(kind: type[_T], path: Path) -> _T | None:
    """Return a document, or ``None`` if it is absent or malformed."""
    try:
        return documents.parse(kind, path.read_text())
    except (FileNotFoundError, NotADirectoryError, DocumentError, UnicodeDecodeError):
        return None


def write_document(path: Path, document: Any) -> None:
    files.write_text(path, documents.to_json(document))


def load_gateway(service: str, paths: Paths) -> Gateway:
    return files.load(Gateway, paths.gateway_settings(service), "the gateway has no settings")


def load_release(name: str, paths: Paths) -> Release:
    """Return a release; raise HostToolError if it is absent, malformed or has another name."""
    parse_service(name)
    path = paths.release(name)
    release = files.load(Release, path, "no such release")
    if release.name != name:
        message = f"contains the release {release.name!r}"
        raise HostToolError(str(path), message, "run the deploy again", 2)
    return release


def release_names(paths: Paths) -> list[str]:
    if not paths.releases.is_dir():
        return []
    names = (entry.name for entry in paths.releases.iterdir())
    return sorted(n for n in names if RELEASE_NAME.match(n) and paths.release(n).is_file())


def list_folder(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else []


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock ``path``; if it is already locked, wait or raise BlockingIOError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Child processes do not inherit the lock. Anyone who can read the file could lock it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def find_account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError as error:
        fix = f"{MAKE_USERS}, or run the deploy again"
        raise HostToolError(f"account {user}", "does not exist on this host", fix) from error


def record_event(release: Release, kind: str, text: str, paths: Paths) -> None:
    """Append an event to the service's file, and print it to the journal."""
    path = paths.events(release.service)
    event = documents.to_plain(Event(files.now(), release.name, kind, text))
    print(f"{kind}: {text}", flush=True)
    try:
        with _event_lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = _read_event_lines(path)[-_MAX_EVENTS + 1 :]
            files.write_text(path, "\n".join([*lines, json.dumps(event)]) + "\n")
    except OSError as error:  # a full disk must not stop the watchdog
        print(f"cannot write the event: {error}", flush=True)


def read_events(service: str, paths: Paths) -> tuple[Event, ...]:
    events = []
    for line in _read_event_lines(paths.events(service))[-10:]:
        with suppress(DocumentError):  # a damaged line must not hide the others
            events.append(documents.parse(Event, line))
    return tuple(events)


def _read_event_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


class Disk:
    read = staticmethod(read_document)
    write = staticmethod(write_document)
    remove = staticmethod(files.remove)
    exists = staticmethod(Path.exists)
    list_folder = staticmethod(list_folder)
    locked = staticmethod(locked)
    load_release = staticmethod(load_release)
    release_names = staticmethod(release_names)


class Clock:
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    now = staticmethod(files.now)


class Units(Protocol):
    def show(self, units: Iterable[str], properties: Iterable[str]) -> dict[str, UnitState]: ...
    def state(self, unit: str, *properties: str) -> UnitState: ...
    def is_active(self, unit: str) -> bool: ...
    def read_invocation_id(self, unit: str) -> str | None: ...
    def list_units(self, pattern: str) -> list[str]: ...
    def journal(self, invocation_id: str, unit: str, lines: int | None = None) -> list[str]: ...
    def is_stopping(self) -> bool: ...
    def reload(self) -> None: ...
    def reset_failed(self, unit: str) -> None: ...
    def start_in_background(self, unit: str) -> None: ...
    def start(self, unit: str, limit_s: float) -> None: ...
    def stop(self, unit: str, limit_s: float) -> None: ...
    def enable(self, unit: str) -> None: ...
    def disable(self, unit: str) -> None: ...


_DISK, _CLOCK = Disk(), Clock()


@dataclass(frozen=True)
class Host:
    paths: Paths
    disk: Disk = _DISK
    units: Units = systemd
    clock: Clock = _CLOCK
    boot_id: str = ""
    invocation_id: str | None = None  # of the unit that runs this process
    exit_status: str | None = None  # of that unit's main process, if it has exited

    def release(self, name: str | None) -> Release | None:
        try:
            return self.disk.load_release(name, self.paths) if name else None
        except HostToolError:
            return None

    def releases(self, service: str) -> list[str]:
        names = self.disk.release_names(self.paths)
        return [name for name in names if parse_service(name) == service]
