"""Check, set up and measure the network between cluster members."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence

import gevent
from pyinfra import host, state
from pyinfra.api import FunctionCommand, Host, State, StringCommand
from spark_contract import documents, status
from spark_contract.tool import FABRIC, FABRIC_SPEED, HOST_TOOL, command_line, parse_problem

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts import operations
from spark_deploy.hosts.capacity import Findings
from spark_deploy.hosts.commands import ScriptResult, log, log_once, run_reconnecting, run_script
from spark_deploy.hosts.facts import read_fact
from spark_deploy.hosts.network import Fabric, Netplan, NetplanFiles, Reachability
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.cluster import existing_addresses, fabric_plan
from spark_deploy.plan.types import FabricLink

_FULL_MBIT_PER_S = 200_000  # of a cable, reported by each of the two interfaces of the cage
_LARGE_MTU = 9000


def read_reachability(links: Sequence[FabricLink]) -> dict[str, str]:
    targets = tuple((link.interface, link.address, link.mtu) for link in links)
    return read_fact(Reachability, _sudo=False, links=targets)


def check_links(
    host: str, links: Sequence[FabricLink], reachability: Mapping[str, str]
) -> Findings:
    problems, warnings = [], []
    for link in links:
        where = f"{host}: {link.interface}"
        reachable = reachability.get(link.address, "unknown")
        if reachable == "no":
            message = f"{link.host} ({link.address}) does not reply to {link.mtu}-byte packets"
            fix = "check cable, address, MTU and firewall on both hosts"
            problems.append(Problem(where, message, fix))
        if reachable == "unknown":
            message = (
                f"the link to {link.host} ({link.address}) was not tested, because ping is missing"
            )
            warnings.append(Problem(where, message, "run `apt-get install iputils-ping`"))
        if link.mtu != link.other_mtu:
            message = f"the MTU is {link.mtu} here, but {link.other_mtu} on {link.host}"
            problems.append(Problem(where, message, "set the same MTU on both hosts (netplan)"))
    return Findings(tuple(problems), (*warnings, *_slow_links(host, links)))


def _slow_links(host: str, links: Sequence[FabricLink]) -> Iterator[Problem]:
    rdma_links = {link.interface: link for link in links if link.device}
    for link in rdma_links.values():
        where = f"{host}: {link.interface}"
        if link.speed_mbit_per_s is not None and link.speed_mbit_per_s < _FULL_MBIT_PER_S:
            message = f"the link runs at {link.speed_mbit_per_s // 1000} Gb/s instead of 200 Gb/s"
            fix = "use a 200 Gb/s cable; behind a switch, set the speed of the switch port"
            yield Problem(where, message, fix)
        if link.mtu < _LARGE_MTU:
            message = (
                f"with MTU {link.mtu}, RDMA uses small packets, which reportedly slows prefill"
            )
            yield Problem(where, message, f"set MTU {_LARGE_MTU} on both hosts (netplan)")
    if len(rdma_links) == 1:
        message = "only one of the cable's two interfaces has an address, which halves the speed"
        fix = "give the other interface an address in a separate network (netplan)"
        yield Problem(f"{host}: {next(iter(rdma_links))}", message, fix)


def find_cluster_problems(
    members: Sequence[str], surveys: Mapping[str, Survey]
) -> Iterator[Problem]:
    """Report members on different driver branches, and kernels on which NCCL fails."""
    survey_by_name = {name: surveys[name] for name in members if name in surveys}
    branches = {
        name: survey.gpu.driver_version.partition(".")[0] for name, survey in survey_by_name.items()
    }
    if len(set(branches.values())) > 1:
        versions = ", ".join(f"{name} {branch or 'none'}" for name, branch in branches.items())
        fix = "update all members to the same branch with the vendor's tools"
        yield Problem("driver", f"different branches: {versions}", fix)
    for name, survey in survey_by_name.items():
        if survey.memory.cma_free_bytes > survey.memory.cma_total_bytes:
            message = (
                f"{survey.identity.kernel} reserves memory for a kexec handover "
                "(CmaFree exceeds CmaTotal); NCCL reportedly runs out of memory at startup"
            )
            yield Problem(f"{name}: kernel", message, "boot with kho=off, or with a 6.17 kernel")


@operations.host_operation
def set_up_ports(settings: Settings, check: FunctionCommand | None) -> operations.Commands:
    """Give each cabled port an address, unless all of them already have one.

    ``check`` logs in again with the new addresses; if that fails, the host restores the old
    addresses.
    """
    netplan, ports = read_fact(NetplanFiles), read_fact(Fabric, _sudo=False)
    if netplan.in_trial:
        message = "another trial is running"
        operations.fail(f"{host.name}: {status.NETPLAN_TRIAL}", message, status.RETRY_FIX)
    present = existing_addresses(host.name, settings, ports)
    if present and not netplan.managed_file:
        host.noop(f"keeping the existing network: {present}")
        return
    plan = fabric_plan(host.name, settings, ports)
    if netplan.managed_file == plan.netplan and present:
        host.noop(f"{status.NETPLAN_FILE} is in effect: {present}")
        return
    _check_ports_free(plan, netplan)
    log_once(f"trying this {status.NETPLAN_FILE} for {plan.confirm_s} s:\n{plan.netplan}")
    yield StringCommand(HOST_TOOL, FABRIC, "try", _stdin=documents.to_json(plan))
    fix = f"wait {plan.confirm_s} s, until the host has restored the previous network settings"
    yield FunctionCommand(_run_step, ["settled", fix], {})
    if check is not None:
        yield check
    yield FunctionCommand(_run_step, ["confirm", fix], {})


@operations.host_operation
def restore_network() -> operations.Commands:
    if not read_fact(NetplanFiles).managed_file:
        host.noop("no deploy has changed this host's network")
        return
    yield FunctionCommand(
        _run_step, ["restore", "run `netplan apply` on the host and correct the errors"], {}
    )


def _check_ports_free(plan: status.FabricPlan, netplan: Netplan) -> None:
    if not netplan.installed:
        fix = "configure the addresses by hand; only netplan is supported"
        operations.fail(host.name, "netplan is not installed", fix)
    if netplan.managed_file and netplan.managed_file != plan.netplan:
        fix = "run `spark-deploy fabric --restore` while no cluster is serving, then retry"
        operations.fail(f"{host.name}: {status.NETPLAN_FILE}", "has different addresses", fix)
    problems = []
    for port in plan.ports:
        where = f"{host.name}: {port.interface}"
        if master := netplan.masters.get(port.interface):
            fix = "select another port with fabric.interfaces"
            problems.append(Problem(where, f"is part of {master}", fix))
        if file := netplan.other_files.get(port.interface):
            fix = "set the address in that file, or remove the port from it"
            problems.append(Problem(where, f"{file} configures this port", fix))
    if problems:
        raise operations.HostError(*problems)


@operations.host_command
def _run_step(state: State, host: Host, step: str, fix: str) -> bool:
    result = run_reconnecting(host, command_line(FABRIC, step))
    if not result.ok:
        raise operations.HostError(_last_problem(host.name, result.text, fix))
    return True


def _last_problem(name: str, output: str, fix: str) -> Problem:
    lines = output.strip().splitlines() or ["no output"]
    problems = filter(None, map(parse_problem, reversed(lines)))
    return next(problems, Problem(name, lines[-1], fix))


# Each link is measured in both directions: at most 2 GB and 5 s in total.
MAX_BYTES = 10**9
MAX_DURATION_S = 2.5
_COMMAND_TIMEOUT_S = 40
_PORTS = range(20000, 29000)  # below the kernel's ephemeral ports
_UNIT_PROPERTIES = {
    "DynamicUser": "yes", "CapabilityBoundingSet": "", "NoNewPrivileges": "yes",
    "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateDevices": "yes",
    "RestrictAddressFamilies": "AF_INET", "MemoryMax": "256M",
    "RuntimeMaxSec": str(_COMMAND_TIMEOUT_S),
}  # fmt: skip


def _unit_command(command: str, **overrides: str) -> str:
    """Return a command that systemd runs under a temporary account and stops after a time limit."""
    properties = {**_UNIT_PROPERTIES, **overrides}
    arguments = " ".join(f"'--property={name}={value}'" for name, value in properties.items())
    return f"systemd-run --quiet --collect --wait --pipe {arguments} {command}"


@operations.host_operation
def measure_links(links: Sequence[FabricLink]) -> None:
    """Measure each link with full-size packets; change nothing."""
    if not state.is_executing:
        for link in links:
            limits = f"will send at most {MAX_BYTES // 10**6} MB, for at most {MAX_DURATION_S} s"
            log_once(f"{link.interface} to {link.host} ({link.address}): {limits}")
        host.noop("the links will be measured when the deploy runs")
        return
    _warn_or_fail(check_links(host.name, links, read_reachability(links)))
    for link in links:
        speed = _measure_tcp(link)
        log(describe_speed(link, speed))
        # The TCP test has identified the other host by a token, which ib_write_bw cannot do.
        rdma_gbit_per_s = _measure_rdma(link) if link.device and speed.arrived_bytes else None
        if rdma_gbit_per_s is not None:
            log(f"{link.interface} to {link.host}: {rdma_gbit_per_s:.1f} Gb/s RDMA (ib_write_bw)")
        _warn_or_fail(check_speed(host.name, link, speed, rdma_gbit_per_s))
    host.noop("measured")


def _warn_or_fail(findings: Findings) -> None:
    operations.warn(host, *findings.warnings)
    if findings.problems:
        raise operations.HostError(*findings.problems)


def _measure_tcp(link: FabricLink) -> status.SpeedResult:
    request = status.SpeedRequest(
        interface=link.interface,
        address=link.address,
        port=secrets.choice(_PORTS),
        token=secrets.token_hex(16),
        max_bytes=MAX_BYTES,
        max_s=MAX_DURATION_S,
    )
    listen = _unit_command(command_line(FABRIC_SPEED, "listen"))
    send = command_line(FABRIC_SPEED, "send")
    sender, listener = _run_sender_and_listener(link, listen, send, documents.to_json(request))
    problems = [
        _last_problem(name, result.text, "check `journalctl -xe` on that host, then retry")
        for name, result in ((host.name, sender), (link.host, listener))
        if not result.ok
    ]
    if problems:
        raise operations.HostError(*problems)
    return documents.parse(status.SpeedResult, sender.stdout)


def _measure_rdma(link: FabricLink) -> float | None:
    hosts = (host, state.inventory.get_host(link.host))
    if not all(run_script(target, "command -v ib_write_bw").ok for target in hosts):
        log(f"{link.interface}: RDMA not measured; to measure it, install perftest on both hosts")
        return None
    test = f"ib_write_bw -R -F -D 2 --report_gbits -p {secrets.choice(_PORTS)}"
    listen = _unit_command(
        f"timeout 30 {test} --bind_source_ip {link.address}",
        PrivateDevices="no",  # /dev/infiniband
        RestrictAddressFamilies="AF_INET AF_NETLINK",
        LimitMEMLOCK="infinity",
    )
    send = f"for i in 1 2 3; do sleep 1; timeout 8 {test} {link.address} && exit; done; exit 1"
    sender, _ = _run_sender_and_listener(link, listen, send, "")
    result_row = r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$"
    average = re.search(result_row, sender.stdout, re.MULTILINE)
    if not sender.ok or average is None:
        log(f"{link.interface}: ib_write_bw failed: {sender.text[-200:]}")
        return None
    return float(average[1])


def _run_sender_and_listener(
    link: FabricLink, listen: str, send: str, stdin: str
) -> tuple[ScriptResult, ScriptResult]:
    """Run the sender here and the listener on the other host; return both results."""
    other = state.inventory.get_host(link.host)
    listener = gevent.spawn(run_script, other, listen, _COMMAND_TIMEOUT_S, stdin)
    try:
        sent = run_script(host, send, _COMMAND_TIMEOUT_S, stdin)
        return sent, listener.get(timeout=_COMMAND_TIMEOUT_S)
    finally:
        listener.kill()


# A link below both minimums is faulty. A link above the doubtful speed is not reported, because the
# maximum TCP speed of a Spark is unknown.
_MIN_FRACTION = 0.25
_MIN_GBIT_PER_S = 10.0
_DOUBTFUL_GBIT_PER_S = 25.0  # of 200: a degraded ConnectX-7 port is reported to carry 13


def describe_speed(link: FabricLink, speed: status.SpeedResult) -> str:
    nominal = (
        f"{link.speed_mbit_per_s / 1000:g} Gb/s" if link.speed_mbit_per_s else "of unknown speed"
    )
    return (
        f"{link.interface} to {link.host} ({link.address}): {_gbit_per_s(speed):.1f} Gb/s over TCP "
        f"({speed.arrived_bytes / 1e6:.0f} MB in {speed.took_s:.2f} s; link {nominal})"
    )


def check_speed(
    host: str, link: FabricLink, speed: status.SpeedResult, rdma_gbit_per_s: float | None = None
) -> Findings:
    """Judge a link by the measured speed over TCP, and over RDMA if that was measured."""
    where, tcp_gbit_per_s = f"{host}: {link.interface}", _gbit_per_s(speed)
    link_gbit_per_s = (link.speed_mbit_per_s or 0) / 1000
    if not speed.arrived_bytes:
        message = f"the connection opens, but full-size packets do not reach {link.host}"
        fix = f"set MTU {link.mtu} on both hosts and on the switch between them"
        return Findings((Problem(where, message, fix),))
    if tcp_gbit_per_s < min(_MIN_FRACTION * link_gbit_per_s, _MIN_GBIT_PER_S):
        message = f"only {tcp_gbit_per_s:.1f} of {link_gbit_per_s:g} Gb/s arrive at {link.host}"
        fix = "try another cable; check `ethtool -S` for errors and `ip route get` for the route"
        return Findings((Problem(where, message, fix),))
    measured = tcp_gbit_per_s if rdma_gbit_per_s is None else rdma_gbit_per_s
    if measured < _DOUBTFUL_GBIT_PER_S and link_gbit_per_s * 1000 >= _FULL_MBIT_PER_S:
        message = (
            f"only {measured:.1f} Gb/s arrive at {link.host}; "
            "a degraded port reportedly reaches only 13 Gb/s"
        )
        usual_speed = "about 92 Gb/s is usual for each of the two interfaces"
        fix = f"measure RDMA with ib_write_bw; {usual_speed}"
        if rdma_gbit_per_s is not None:
            fix = f"power-cycle both hosts; {usual_speed}"
        return Findings((), (Problem(where, message, fix),))
    return Findings(())


def _gbit_per_s(speed: status.SpeedResult) -> float:
    return speed.arrived_bytes * 8 / 1e9 / max(speed.took_s, 1e-6)
