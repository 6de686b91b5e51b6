"""The gateway of a service: an nginx of its own with a key and a list of allowed paths.

nginx.py says what it is configured like, here is how it runs: started by its unit, reloaded when
something about it changed, and compared with what the settings want.
"""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Callable

from spark_contract import units
from spark_contract.errors import HostToolError
from spark_contract.gateway import EXPOSURES, Gateway
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import MAKE_USERS

from spark_host.gateway import api_key, listeners, nginx
from spark_host.system import stored, systemd

_WAIT_S = 10


def run(service: str, paths: Paths) -> int:
    """Render the configuration of a service and become its nginx."""
    settings = stored.gateway_of(service, paths)
    directory = nginx.render(settings, paths)
    # Bodies with a name of their own outlive an nginx that was killed.
    for left in nginx.bodies(settings, paths).glob("*"):
        left.unlink()
    program, config = nginx.program(paths), str(directory / "nginx.conf")
    os.execv(program, [program, "-p", str(directory), "-c", config, "-e", "stderr"])


def reload(service: str, paths: Paths) -> int:
    """Have nginx take over key, settings and addresses as they are now.

    Answers under way are finished by the old workers; this returns once no old worker accepts
    anything new.
    """
    settings = stored.gateway_of(service, paths)
    master = _master(service, paths)
    if master is None:
        raise HostToolError(
            f"gateway of {service}", "does not run", f"systemctl start {settings.unit}"
        )
    nginx.render(settings, paths)
    before = _workers(master)
    os.kill(master, signal.SIGHUP)

    def handed_over() -> bool:
        now = _workers(master)
        return bool(now) and not before & now

    _wait(handed_over, settings, lambda: "its old workers go on")
    wait_until_listening(service, paths)
    return 0


def new_key(service: str, paths: Paths) -> int:
    """Replace the API key by a new random one; the old one is refused from then on."""
    settings = stored.gateway_of(service, paths)
    api_key.replace(settings, paths)
    if _master(service, paths) is not None:
        reload(service, paths)
    return 0


def bring_up(release: Release, paths: Paths) -> None:
    """Have the gateway run before this release's engine."""
    settings = stored.gateway_of(release.service, paths)
    api_key.make(settings, paths)
    if not systemd.is_active(settings.unit) or not boots(release.service, paths):
        systemd.systemctl("reset-failed", settings.unit)
        said = systemd.systemctl("enable", "--now", settings.unit)
        if said.returncode != 0:
            raise HostToolError(
                settings.unit, said.stderr.strip(), f"journalctl -u {settings.unit}"
            )
    elif not nginx.is_current(settings, paths):
        reload(release.service, paths)


def follow(service: str, paths: Paths) -> str | None:
    """Take over an address that came or went; return what changed, if anything."""
    settings = stored.gateway_of(service, paths)
    if not EXPOSURES[settings.expose].late or _master(service, paths) is None:
        return None
    if nginx.is_current(settings, paths):
        return None
    reload(service, paths)
    return "listens on " + ", ".join(map(str, listeners.wanted(settings).listeners))


def boots(service: str, paths: Paths) -> bool:
    """Return whether the gateway starts with the host."""
    return (paths.boot_links / units.GATEWAY.of(service)).is_symlink()


def difference(service: str, paths: Paths) -> str | None:
    """Return how the running gateway differs from what its settings want; ``None`` if it does not.

    What is wrong with the key is said by :func:`key_problem`.
    """
    try:
        settings = stored.gateway_of(service, paths)
        master = _master(service, paths)
        if master is None or key_problem(service, paths) is not None:
            return None
        wanted = listeners.wanted(settings)
        if wanted.missing is not None:
            return wanted.missing
        if not nginx.is_current(settings, paths):
            return "its settings or its key changed since it took them over"
    except HostToolError as error:
        return str(error)
    return _listening_wrong(settings, master)


def key_problem(service: str, paths: Paths) -> str | None:
    """Return what is wrong with the key clients must bring; the key itself stays where it is."""
    if not paths.gateway_settings(service).exists():
        return None
    try:
        api_key.read(stored.gateway_of(service, paths), paths)
    except HostToolError as error:
        return str(error)
    return None


def problem(release: Release, paths: Paths) -> HostToolError | None:
    """Return why this release's gateway could not run here; ``None`` when it could."""
    try:
        nginx.program(paths)
        settings = stored.gateway_of(release.service, paths)
    except HostToolError as error:
        return error
    try:
        pwd.getpwnam(settings.user)
    except KeyError:
        return HostToolError(
            f"account {settings.user}",
            "does not exist on this host",
            f"{MAKE_USERS}, or run the deploy again",
        )
    return None


def wait_until_listening(service: str, paths: Paths) -> None:
    """Return once the gateway listens on exactly its addresses."""
    settings = stored.gateway_of(service, paths)

    def wrong() -> str | None:
        master = _master(service, paths)
        return "does not run" if master is None else _listening_wrong(settings, master)

    _wait(lambda: wrong() is None, settings, lambda: str(wrong()))


def _listening_wrong(settings: Gateway, master: int) -> str | None:
    shall = {one.address for one in listeners.wanted(settings).listeners}
    does = listeners.listening(master, settings.port)
    if shall == does:
        return None
    return f"listens on {_named(does)} instead of {_named(shall)}, port {settings.port}"


def _named(addresses: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(addresses)) or "nothing"


def _wait(done: Callable[[], bool], settings: Gateway, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not done():
        if time.monotonic() > deadline:
            raise HostToolError(settings.unit, why(), f"journalctl -u {settings.unit}")
        time.sleep(0.05)


def _master(service: str, paths: Paths) -> int | None:
    """Return the process id of the running nginx."""
    try:
        pid = int((paths.gateway_run(service) / "nginx.pid").read_text())
        os.kill(pid, 0)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return None
    return pid


def _workers(master: int) -> frozenset[int]:
    """Return the workers that accept connections."""
    with open(f"/proc/{master}/task/{master}/children") as source:
        children = [int(word) for word in source.read().split()]
    return frozenset(pid for pid in children if b"shutting down" not in _title(pid))


def _title(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as source:
            return source.read()
    except (FileNotFoundError, ProcessLookupError):
        return b"shutting down"
