"""Starts and reloads a gateway's nginx, opens and closes its traffic, and creates the API key.

While the traffic file of a service exists, the gateway forwards requests. The file is on a tmpfs,
so traffic is closed after a boot. Closing does not interrupt in-flight requests.
"""

import json
import os
import re
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path

from spark_contract import files, units
from spark_contract.gateway import EXPOSURES, Gateway
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import HostToolError

from spark_host.gateway import keys, listeners, nginx
from spark_host.system import folders, systemd
from spark_host.system.host import find_account, load_gateway, locked
from spark_host.system.programs import run_program

_LISTEN_TIMEOUT_S = 20
_CONFIG_TEST_TIMEOUT_S = 60.0
_APPLIED = "applied"  # a file that is missing while a reload is unfinished
_USABLE_KEY = re.compile(r"^[A-Za-z0-9._~+/=-]{16,512}\Z")


def run(service: str, paths: Paths) -> int:
    settings = load_gateway(service, paths)
    folder = _install_config(settings, paths)
    (folder / _APPLIED).touch()
    for body in nginx.body_folder(settings, paths).glob("*"):
        body.unlink()
    program, config = nginx.find_program(paths), str(folder / "nginx.conf")
    os.execv(program, [program, "-p", str(folder), "-c", config, "-e", "stderr"])


def reload(service: str, paths: Paths) -> int:
    settings = load_gateway(service, paths)
    master = _master_pid(service, paths)
    if master is None:
        fix = f"run `systemctl start {settings.unit}`"
        raise HostToolError(f"gateway of {service}", "is not running", fix)
    applied = paths.gateway_run(service) / _APPLIED
    applied.unlink(missing_ok=True)
    _install_config(settings, paths)
    old_workers = _worker_pids(master)
    os.kill(master, signal.SIGHUP)
    wait_until_listening(service, paths, old_workers)
    _update_on_demand_unit(settings, paths)
    applied.touch()
    return 0


def new_key(service: str, paths: Paths) -> int:
    settings = load_gateway(service, paths)
    _write_key(settings, paths)
    if _master_pid(service, paths) is not None:
        reload(service, paths)
    return 0


def start_or_reload(release: Release, paths: Paths) -> None:
    settings = load_gateway(release.service, paths)
    create_missing_key(settings, paths)
    if not systemd.is_active(settings.unit) or not starts_at_boot(release.service, paths):
        systemd.reset_failed(settings.unit)
        systemd.run_systemctl("enable", "--now", settings.unit)
    elif not _is_applied(settings, paths):
        reload(release.service, paths)
    _update_on_demand_unit(settings, paths)


def _update_on_demand_unit(settings: Gateway, paths: Paths) -> None:
    """Enable the unit that starts on-demand services if there are any; otherwise disable it."""
    is_enabled = (paths.boot_links / units.ON_REQUEST_UNIT).is_symlink()
    if settings.service == units.MAIN_SERVICE and is_enabled != bool(settings.on_request):
        verb = "disable" if is_enabled else "enable"
        systemd.run_systemctl(verb, "--now", units.ON_REQUEST_UNIT)


def apply_address_change(service: str, paths: Paths) -> str | None:
    """Reload the gateway and return a message if a bridge or tunnel has a new address."""
    settings = load_gateway(service, paths)
    can_change = EXPOSURES[settings.expose].has_unstable_address
    if not can_change or _master_pid(service, paths) is None or is_current(settings, paths):
        return None
    reload(service, paths)
    return "listens on " + ", ".join(map(str, listeners.planned_listeners(settings).listeners))


def starts_at_boot(service: str, paths: Paths) -> bool:
    return (paths.boot_links / units.GATEWAY.unit(service)).is_symlink()


def find_difference(service: str, paths: Paths) -> str | None:
    """Return how the running gateway differs from the settings, or None."""
    try:
        settings = load_gateway(service, paths)
        master = _master_pid(service, paths)
        if master is None or key_problem(service, paths) is not None:
            return None
        if missing := listeners.planned_listeners(settings).missing:
            return missing
        if not _is_applied(settings, paths):
            return "the settings or the key changed since the last reload"
        return _wrong_addresses(settings, master)
    except HostToolError as error:
        return str(error)
    except (FileNotFoundError, ProcessLookupError):  # the gateway has exited meanwhile
        return None


def key_problem(service: str, paths: Paths) -> str | None:
    if not paths.gateway_settings(service).exists():
        return None
    try:
        read_key(load_gateway(service, paths), paths)
    except HostToolError as error:
        return str(error)
    return None


def find_problem(release: Release, paths: Paths) -> HostToolError | None:
    try:
        nginx.find_program(paths)
        group_id(release.service, paths)
    except HostToolError as error:
        return error
    return None


def wait_until_listening(
    service: str, paths: Paths, old_workers: frozenset[int] = frozenset()
) -> None:
    """Wait until new workers listen on exactly the planned addresses and old workers do not."""
    settings = load_gateway(service, paths)
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while True:
        master = _master_pid(service, paths)
        workers = _worker_pids(master) if master else frozenset()
        if master is None:
            message: str | None = "is not running"
        elif not workers:
            message = "has no workers"
        elif old_workers & workers:
            message = "old workers still accept connections"
        else:
            message = _wrong_addresses(settings, master)
        if message is None:
            return
        if time.monotonic() > deadline:
            raise HostToolError(settings.unit, message, f"run `journalctl -u {settings.unit}`")
        time.sleep(0.05)


def _wrong_addresses(settings: Gateway, master: int) -> str | None:
    planned = {listener.address for listener in listeners.planned_listeners(settings).listeners}
    actual = listeners.listening_addresses(master, settings.port)
    if planned == actual:
        return None
    actual_text = ", ".join(sorted(actual)) or "no address"
    planned_text = ", ".join(sorted(planned)) or "no address"
    return f"listens on {actual_text} instead of {planned_text} on port {settings.port}"


def _master_pid(service: str, paths: Paths) -> int | None:
    try:
        pid = int((paths.gateway_run(service) / "nginx.pid").read_text())
        os.kill(pid, 0)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return None
    return pid


def _worker_pids(master: int) -> frozenset[int]:
    pids = set()
    for pid in Path(f"/proc/{master}/task/{master}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # the worker has exited
            if b"shutting down" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.add(int(pid))
    return frozenset(pids)


def _install_config(settings: Gateway, paths: Paths) -> Path:
    folder = paths.gateway_run(settings.service)
    body_folder = paths.gateway_bodies(settings.service)
    if settings.keys:
        paths.usage(settings.service).parent.mkdir(0o700, parents=True, exist_ok=True)
    for path in (folder, body_folder.parent, body_folder):
        path.mkdir(parents=True, exist_ok=True)
        # Workers run as another account.
        os.chmod(path, 0o711)
    # A deploy and the watchdog may write at the same time.
    with locked(folder / "lock", wait=True):
        config, new = folder / "nginx.conf", folder / "nginx.conf.new"
        for path, text in _render_files(settings, paths).items():
            files.write_text(new if path == config else path, text, 0o600)
        options = ["-t", "-q", "-p", str(folder), "-c", str(new), "-e", "stderr"]
        result = run_program([nginx.find_program(paths), *options], _CONFIG_TEST_TIMEOUT_S)
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no reason given"])[0]
            message = f"nginx rejects the configuration: {reason}"
            raise HostToolError(f"gateway of {settings.service}", message, "run the deploy again")
        os.replace(new, config)
        if settings.replicas:
            addresses = json.dumps(listeners.replica_addresses(settings, paths))
            files.write_text(listeners.known_replicas(settings, paths), addresses)
    return folder


def is_current(settings: Gateway, paths: Paths) -> bool:
    rendered = _render_files(settings, paths)
    return all(path.is_file() and path.read_text() == text for path, text in rendered.items())


def _is_applied(settings: Gateway, paths: Paths) -> bool:
    applied = paths.gateway_run(settings.service) / _APPLIED
    return applied.exists() and is_current(settings, paths)


def _render_files(settings: Gateway, paths: Paths) -> dict[Path, str]:
    folder = paths.gateway_run(settings.service)
    named_keys = keys.render_config(settings, paths)
    default = keys.IS_NAMED if named_keys else "0"
    key_maps = nginx.render_key_maps(read_key(settings, paths), default)
    texts = {folder / "keys.conf": key_maps + named_keys}
    if named_keys:
        texts[folder / keys.SCRIPT] = keys.render_script(settings)
    if settings.names:
        texts[folder / nginx.SCRIPT] = nginx.render_script(settings, paths)
    return texts | {folder / "nginx.conf": nginx.render_config(settings, paths)}


def create_missing_key(settings: Gateway, paths: Paths) -> None:
    path = paths.below(settings.key_path)
    if path.exists():
        os.chmod(path, 0o600)
    else:
        _write_key(settings, paths)


def _write_key(settings: Gateway, paths: Paths) -> None:
    files.write_text(paths.below(settings.key_path), secrets.token_urlsafe(32) + "\n", 0o600)


def read_key(settings: Gateway, paths: Paths) -> str:
    path = paths.below(settings.key_path)
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except FileNotFoundError as error:
        raise HostToolError(str(path), "the API key is missing", "run the deploy again") from error
    if mode & 0o077:
        raise HostToolError(str(path), "is readable by others", f"run `chmod 600 {path}`")
    if not _USABLE_KEY.match(key):
        message = "must contain 16 to 512 letters, digits or . _ ~ + / = -"
        fix = f"remove {path} and run the deploy, which creates a new key"
        raise HostToolError(str(path), message, fix)
    return key


def is_open(service: str, paths: Paths) -> bool:
    return paths.traffic(service).exists()


def close_traffic(service: str, paths: Paths) -> None:
    if paths.service_run(service).is_dir():
        files.remove(paths.traffic(service))


def open_traffic(release: Release, paths: Paths) -> None:
    service = release.service
    make_traffic_folder(service, paths)
    # vLLM's socket can be used only by the engine's account.
    with folders.opened_socket(paths.engine_socket(service)) as socket:
        os.chown(socket, 0, group_id(service, paths))
        os.chmod(socket, 0o660)
    # The gateway reads the names, because an older release may serve other names.
    lines = "".join(f"{line}\n" for line in (release.name, *release.names))
    files.write_text(paths.traffic(service), lines)


def make_traffic_folder(service: str, paths: Paths) -> None:
    paths.run.mkdir(mode=0o755, parents=True, exist_ok=True)
    folders.create(paths.service_run(service), 0, group_id(service, paths), 0o710)


def group_id(service: str, paths: Paths) -> int:
    return find_account(load_gateway(service, paths).user).pw_gid
