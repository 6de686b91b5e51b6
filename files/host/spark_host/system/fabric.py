"""Sets the addresses of the ports between hosts, and measures the TCP throughput between them.

New addresses are temporary until they are confirmed: a timer or a power cut removes the trial file,
so that no host stays unreachable. The measurement finds slow cables, wrong routes and packets that
are too large. The listener accepts only the holder of a one-time token, and then exits.
"""

import contextlib
import fcntl
import hmac
import json
import socket
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spark_contract import documents, files, status
from spark_contract.paths import RUN_DIR, STATE_DIR, Paths
from spark_contract.status import SpeedRequest, SpeedResult
from spark_contract.tool import FABRIC, HOST_TOOL, HostToolError

from spark_host.system import systemd
from spark_host.system.host import locked, read_document
from spark_host.system.programs import error_line, run_program

_APPLY_TIMEOUT_S = 30.0  # shorter than the controller's timeout for a command
_POLL_INTERVAL_S = 0.5
_SETTLE_TIME_S = 2.0  # without changes: then the network manager has finished
# netplan stops NetworkManager, which removes all addresses; leases return within seconds.
_REGAIN_TIMEOUT_S = 10.0
_TRIAL_RECORD = f"{RUN_DIR}/fabric.json"
_CONFIRMED_RECORD = f"{STATE_DIR}/fabric/record.json"
_TRANSIENT = ("systemd-run", "--quiet", "--collect")
_STREAMS = 4  # because a single stream is limited by one core
_CHUNK_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 10.0  # for both sides to connect
_TOKEN_TIMEOUT_S = 1.0  # for the whole token of a connection
_MAX_REJECTED = 64  # connections with a wrong token before the listener exits
_RETRY_INTERVAL_S = 0.1
_WELCOME = b"+"
# Close a stream without waiting for the last bytes.
_LINGER = struct.pack("ii", 1, 0)


def set_addresses(args: Sequence[str], paths: Paths) -> int:
    """Run ``try`` (plan on stdin), ``settled``, ``confirm`` or ``restore [--unconfirmed]``."""
    with locked(paths.run / "fabric.lock", wait=True):
        match list(args):
            case ["try"]:
                _start_trial(documents.parse(status.FabricPlan, sys.stdin.read()), paths)
            case ["settled"]:
                _wait_until_settled(paths)
            case ["confirm"]:
                _confirm(paths)
            case ["restore"] | ["restore", "--unconfirmed"]:
                _restore(paths, unconfirmed=len(args) == 2)
            case _:
                usage = "use `try`, `settled`, `confirm` or `restore`"
                raise HostToolError("fabric", f"invalid arguments {list(args)}", usage)
    return 0


def _start_trial(plan: status.FabricPlan, paths: Paths) -> None:
    trial = paths.below(status.NETPLAN_TRIAL)
    if paths.below(status.NETPLAN_FILE).exists():
        fix = "run `spark-deploy fabric --restore` to remove it first"
        raise HostToolError(status.NETPLAN_FILE, "already exists", fix)
    if trial.exists():  # replacing it would leave addresses behind
        raise HostToolError(status.NETPLAN_TRIAL, "another trial is running", status.RETRY_FIX)
    # The timer's service may still be loaded if a trial has just ended.
    _stop_timer("service")
    managed = {port.interface for port in plan.ports}
    record = status.FabricRecord(
        plan.ports,
        {port.interface: int(_show_link(port)["mtu"]) for port in plan.ports},
        {name: before for name, before in _addresses().items() if before and name not in managed},
        _default_routes(),
    )
    files.write_text(paths.below(_TRIAL_RECORD), documents.to_json(record), 0o600)
    files.write_text(trial, plan.netplan, 0o600)
    timer = [
        *_TRANSIENT, f"--unit={status.RESTORE_UNIT}", f"--on-active={plan.confirm_s}",
        "--timer-property=AccuracySec=1s", HOST_TOOL, FABRIC, "restore", "--unconfirmed",
    ]  # fmt: skip
    try:
        _run_checked(["netplan", "generate"], "netplan rejects the file")
        _run_checked(timer, "systemd rejected the timer that restores the network")
    except HostToolError:
        files.remove(trial)
        raise
    # In a separate unit, because the caller may lose the connection.
    apply = [*_TRANSIENT, "--no-block", f"--unit={status.APPLY_UNIT}", "netplan", "apply"]
    _run_checked(apply, "systemd rejects the unit that applies the change")


def _confirm(paths: Paths) -> None:
    trial, kept = paths.below(status.NETPLAN_TRIAL), paths.below(status.NETPLAN_FILE)
    if not trial.exists() and kept.exists():
        return
    record = _wait_until_settled(paths)
    files.write_text(paths.below(_CONFIRMED_RECORD), documents.to_json(record), 0o600)
    files.write_text(kept, trial.read_text(), 0o600)
    files.remove(trial)
    _stop_timer()


def _restore(paths: Paths, *, unconfirmed: bool) -> None:
    """Restore the network; with ``unconfirmed``, only after an unconfirmed trial."""
    trial, kept = paths.below(status.NETPLAN_TRIAL), paths.below(status.NETPLAN_FILE)
    if unconfirmed and kept.exists():  # the confirmation was killed before its end
        files.remove(trial)
    if not trial.exists() and (unconfirmed or not kept.exists()):
        return
    record_path = paths.below(_TRIAL_RECORD if trial.exists() else _CONFIRMED_RECORD)
    record = read_document(status.FabricRecord, record_path)
    if kept.exists() and not unconfirmed:
        files.write_text(paths.below(status.REMOVED_NETPLAN), kept.read_text(), 0o600)
        files.remove(kept)
    files.remove(trial)
    try:
        _run_checked(["netplan", "apply"], "netplan rejects the previous network")
    finally:  # restore the routes to this host even if netplan fails
        if record:
            _reset_ports(record)
        if record and unconfirmed:
            _restore_others(record)
    files.remove(record_path)
    if not unconfirmed:
        _stop_timer()


def _reset_ports(record: status.FabricRecord) -> None:
    """Restore the MTU, and remove addresses that networkd leaves behind."""
    for port in record.ports:
        _ip("address", "delete", port.address, "dev", port.interface)
        mtu = record.mtu_before.get(port.interface, 1500)
        _ip("link", "set", port.interface, "mtu", str(mtu))


def _restore_others(record: status.FabricRecord) -> None:
    """Restore addresses and routes that netplan removed from other interfaces."""
    deadline = time.monotonic() + _REGAIN_TIMEOUT_S
    time.sleep(_POLL_INTERVAL_S)  # the network manager continues after `netplan apply`
    while _lost_addresses(record, now := _addresses()) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    managed = {port.address for port in record.ports}
    for name in record.addresses_before:
        for address in managed.intersection(now.get(name, ())):
            _ip("address", "delete", address, "dev", name)
    for name, address in _lost_addresses(record, now):
        print(f"restoring {address}, which {name} has lost", flush=True)
        _ip("address", "replace", address, "dev", name)
    routed_versions = {_ip_option(route) for route in _default_routes()}
    for route in record.routes_before:
        if _ip_option(route) not in routed_versions:
            _ip(_ip_option(route), "route", "replace", *route.split())


def _lost_addresses(
    record: status.FabricRecord, now: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """Return (interface, address) pairs for interfaces that lost all addresses of an IP version."""
    managed = {port.address for port in record.ports}
    lost = []
    for name, before in record.addresses_before.items():
        versions = {_ip_option(address) for address in now.get(name, ()) if address not in managed}
        lost += [(name, address) for address in before if _ip_option(address) not in versions]
    return lost


def _ip_option(text: str) -> str:
    return "-6" if ":" in text else "-4"


def _wait_until_settled(paths: Paths) -> status.FabricRecord:
    """Wait until netplan has finished and all ports have their address and MTU.

    Return the record of the trial; raise HostToolError if it is over or a port is not ready.
    """
    if not paths.below(status.NETPLAN_TRIAL).exists():
        message = "no login confirmed the new network in time, so the host restores the old one"
        fix = "check the new network, then run the command again"
        raise HostToolError("fabric", message, fix)
    record = files.load(status.FabricRecord, paths.below(_TRIAL_RECORD), "no record of the trial")
    began = time.monotonic()
    last, unchanged_since = None, 0.0
    missing, applying = list(record.ports), True
    while time.monotonic() < began + _APPLY_TIMEOUT_S:
        missing = [port for port in record.ports if not _is_configured(port)]
        state = systemd.state(f"{status.APPLY_UNIT}.service", "ActiveState").get("ActiveState")
        applying = state not in ("inactive", "failed", None)
        addresses = _addresses()
        now = (missing, applying, addresses, _default_routes())
        if now != last:
            last, unchanged_since = now, time.monotonic()
        must_wait = bool(missing) or applying
        if time.monotonic() < began + _REGAIN_TIMEOUT_S:
            must_wait = must_wait or bool(_lost_addresses(record, addresses))
        if not must_wait and time.monotonic() - unchanged_since >= _SETTLE_TIME_S:
            return record
        time.sleep(_POLL_INTERVAL_S)
    message = f"addresses are still changing after {_APPLY_TIMEOUT_S:.0f} s"
    if missing:
        port = missing[0]
        message = f"{port.interface} did not get {port.address} with MTU {port.mtu}"
    elif applying:  # a login now would test only the old network
        message = f"netplan did not finish within {_APPLY_TIMEOUT_S:.0f} s"
    fix = f"see `journalctl -u {status.APPLY_UNIT} -u systemd-networkd -u NetworkManager`"
    raise HostToolError("fabric", message, fix)


def _addresses() -> dict[str, tuple[str, ...]]:
    output = _ip("-j", "address", "show", "scope", "global")
    return {
        link["ifname"]: tuple(
            f"{entry['local']}/{entry['prefixlen']}"
            for entry in link["addr_info"]
            if entry and not entry.get("temporary")
        )
        for link in json.loads(output or "[]")
        if link  # `ip` prints an empty object for each filtered interface and address
    }


def _default_routes() -> tuple[str, ...]:
    outputs = [_ip(version, "route", "show", "default") for version in ("-4", "-6")]
    lines = (line.strip() for text in outputs for line in text.splitlines())
    return tuple(line for line in lines if line and " proto ra " not in f"{line} ")


def _is_configured(port: status.FabricPort) -> bool:
    link = _show_link(port)
    addresses = {f"{entry['local']}/{entry['prefixlen']}" for entry in link["addr_info"]}
    return port.address in addresses and link["mtu"] == port.mtu


def _show_link(port: status.FabricPort) -> Any:
    links = json.loads(_ip("-j", "address", "show", "dev", port.interface) or "[]")
    if not links:
        fix = "list the interfaces (`ip link`), then set fabric.interfaces"
        raise HostToolError(port.interface, "no such interface", fix)
    return links[0]


def _ip(*args: str) -> str:
    return run_program(["ip", *args], 10).stdout


def _stop_timer(*kinds: str) -> None:
    names = [f"{status.RESTORE_UNIT}.{kind}" for kind in ("timer", *kinds)]
    run_program(["systemctl", "stop", *names], _APPLY_TIMEOUT_S)


def _run_checked(argv: list[str], message: str) -> None:
    result = run_program(argv, _APPLY_TIMEOUT_S)
    if result.returncode != 0:
        fix = f"run `{' '.join(argv[:2])}` on the host to see why"
        raise HostToolError("fabric", f"{message}: {error_line(result)}", fix)


def measure_speed(args: Sequence[str], paths: Paths) -> int | SpeedResult:
    """Run ``listen`` or ``send`` with a ``SpeedRequest`` from standard input."""
    if list(args) not in (["listen"], ["send"]):
        fix = "run `spark-host fabric-speed listen` or `fabric-speed send`"
        raise HostToolError("fabric-speed", f"invalid arguments {list(args)}", fix)
    request = documents.parse(SpeedRequest, sys.stdin.read())
    if args[0] == "send":
        return send(request)
    listen(request)
    return 0


def listen(request: SpeedRequest) -> None:
    """Receive and discard the sender's data; raise HostToolError if no sender connects."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    streams: list[socket.socket] = []
    where = f"{request.address}:{request.port}"
    address = (request.address, request.port)
    try:
        server = socket.create_server(address, backlog=_STREAMS + _MAX_REJECTED)
    except OSError as error:
        raise HostToolError(where, f"cannot listen ({error})", "run the command again") from error
    with server:
        for _ in range(_STREAMS + _MAX_REJECTED):
            if len(streams) == _STREAMS or (remaining_s := deadline - time.monotonic()) <= 0:
                break
            server.settimeout(remaining_s)
            with contextlib.suppress(TimeoutError):
                stream = server.accept()[0]
                if _receives_token(stream, request.token):
                    streams.append(stream)
                else:
                    stream.close()
    if len(streams) < _STREAMS:
        message = f"the sender opened only {len(streams)} of {_STREAMS} connections "
        message += f"within {_CONNECT_TIMEOUT_S:.0f} s"
        raise HostToolError(where, message, "see the sender's error")
    # Send the welcome only now, so that all streams start at the same time.
    deadline = time.monotonic() + request.max_s + _CONNECT_TIMEOUT_S
    for stream in streams:
        stream.sendall(_WELCOME)
    with ThreadPoolExecutor(_STREAMS) as pool:
        for stream in streams:
            pool.submit(_discard, stream, request.max_bytes, deadline)


def _receives_token(stream: socket.socket, token: str) -> bool:
    deadline = time.monotonic() + _TOKEN_TIMEOUT_S
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < len(token) and (remaining_s := deadline - time.monotonic()) > 0:
            stream.settimeout(remaining_s)
            if not (more := stream.recv(len(token) - len(received))):
                break
            received += more
    return hmac.compare_digest(received, token.encode())


def _discard(stream: socket.socket, max_bytes: int, deadline: float) -> None:
    buffer, remaining_bytes = bytearray(_CHUNK_BYTES), max_bytes
    with contextlib.suppress(OSError):
        while remaining_bytes > 0 and (remaining_s := deadline - time.monotonic()) > 0:
            stream.settimeout(remaining_s)
            count = stream.recv_into(buffer, _CHUNK_BYTES, socket.MSG_TRUNC)
            if count == 0:
                return
            remaining_bytes -= count


def send(request: SpeedRequest) -> SpeedResult:
    """Send zeros up to the limits of the request; raise HostToolError if no listener responds."""
    streams = [_connect(request) for _ in range(_STREAMS)]
    for stream in streams:
        try:
            received = stream.recv(1)
        except OSError as error:
            raise _connection_error(request, str(error)) from error
        if received != _WELCOME:
            raise _connection_error(request, "the listener closed the connection")
    began = time.monotonic()

    def push(stream: socket.socket) -> tuple[int, float]:
        arrived = _send_zeros(stream, request.max_bytes // _STREAMS, began + request.max_s)
        return arrived, time.monotonic()

    with ThreadPoolExecutor(_STREAMS) as pool:
        results = list(pool.map(push, streams))
    arrived_bytes = sum(arrived for arrived, _ in results)
    return SpeedResult(arrived_bytes, max(ended for _, ended in results) - began)


def _connect(request: SpeedRequest) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, request.interface.encode())
            stream.settimeout(max(_RETRY_INTERVAL_S, deadline - time.monotonic()))
            stream.connect((request.address, request.port))
            stream.sendall(request.token.encode())
        except OSError as error:
            stream.close()
            if time.monotonic() + _RETRY_INTERVAL_S > deadline:
                raise _connection_error(request, str(error)) from error
            time.sleep(_RETRY_INTERVAL_S)
        else:
            return stream


def _connection_error(request: SpeedRequest, reason: str) -> HostToolError:
    where = f"{request.interface} to {request.address}:{request.port}"
    fix = "check that the other port is up (`ip address`) and that no firewall blocks it"
    return HostToolError(where, f"no connection ({reason})", fix)


def _send_zeros(stream: socket.socket, max_bytes: int, deadline: float) -> int:
    """Send zeros until a limit is reached; return the acknowledged bytes."""
    chunk, sent_bytes = memoryview(bytes(_CHUNK_BYTES)), 0
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    with stream, contextlib.suppress(OSError):
        while sent_bytes < max_bytes and (remaining_s := deadline - time.monotonic()) > 0:
            stream.settimeout(remaining_s)
            with contextlib.suppress(TimeoutError):
                sent_bytes += stream.send(chunk[: max_bytes - sent_bytes])
        while True:
            queue_size = fcntl.ioctl(stream, termios.TIOCOUTQ, bytes(4))
            unacknowledged_bytes = int.from_bytes(queue_size, sys.byteorder)
            if not unacknowledged_bytes or time.monotonic() >= deadline:
                return sent_bytes - unacknowledged_bytes
            time.sleep(0.0005)
    return 0
