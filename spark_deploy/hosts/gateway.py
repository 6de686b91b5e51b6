"""Install the gateway of a service, and the timers of a schedule."""

import json
import re
import shlex
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyinfra import host
from pyinfra.api import StringCommand
from spark_contract import tool
from spark_contract.documents import read, to_json
from spark_contract.gateway import EXPOSURES, Gateway, NamedKey, tls_paths
from spark_contract.paths import CURRENT_TOOLS, GATEWAY_DIR
from spark_contract.units import HOURS, UNITS_DIR, WATCH

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.load import read_secret
from spark_deploy.hosts.facts import HostFact, LineFact, read_fact
from spark_deploy.hosts.files import file_states, place_files, remove_files
from spark_deploy.hosts.operations import Commands, fail, host_operation
from spark_deploy.hosts.status import Status
from spark_deploy.plan.gateway import gateway_file
from spark_deploy.plan.types import GatewayPlan, ManagedFile

if TYPE_CHECKING:
    from spark_deploy.hosts.certificates import CertificateAndKey


class SymlinkTarget(LineFact):
    def command(self, path: str) -> str:
        return f"readlink -- {shlex.quote(path)} || true"


class WatchTools(LineFact):
    def command(self, release: str) -> str:
        unit = shlex.quote(WATCH.unit(release))
        return (
            f"pid=$(systemctl show -p MainPID --value {unit}); "
            "cat /proc/$pid/environ 2>/dev/null | tr '\\0' '\\n' | "
            "sed -n 's/^PYTHONPATH=//p' | cut -d: -f1"
        )


class TailnetAddress(LineFact):
    def command(self) -> str:
        return "tailscale ip -4 2>/dev/null; true"


class Gateways(HostFact[tuple[Gateway, ...]]):
    default = tuple

    def command(self) -> str:
        return f"cat {GATEWAY_DIR}/*.json 2>/dev/null; true"

    def process(self, output: Iterable[str]) -> tuple[Gateway, ...]:
        gateways = []
        remaining = "\n".join(output).strip()
        while remaining:
            data, end = json.JSONDecoder().raw_decode(remaining)
            gateways.append(read(Gateway, data))
            remaining = remaining[end:].lstrip()
        return tuple(gateways)


class GatewayCertificate(HostFact[tuple[bytes, bytes]]):
    """Certificate and public key as PEM; empty if missing."""

    default = staticmethod(lambda: (b"", b""))

    def command(self, certificate: str, key: str) -> str:
        return (
            f"cat {shlex.quote(certificate)} 2>/dev/null; echo '== key'; "
            f"openssl pkey -in {shlex.quote(key)} -pubout 2>/dev/null; true"
        )

    def process(self, output: Iterable[str]) -> tuple[bytes, bytes]:
        certificate, _, key = "\n".join(output).partition("== key")
        return certificate.strip().encode(), key.strip().encode()


_VALID_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def gateway_paths(plan: GatewayPlan) -> tuple[str, ...]:
    tls = tls_paths(plan.settings.service)
    key = () if plan.key.kind == "generate" else (plan.settings.key_path,)
    return (gateway_file(plan).path, tls.certificate, tls.key, *key)


@host_operation
def configure_gateway(plan: GatewayPlan) -> Commands:
    changed = yield from place_files((gateway_file(plan), *_secret_files(plan)))
    if plan.tls is None:
        tls = tls_paths(plan.settings.service)
        changed |= yield from remove_files((tls.certificate, tls.key))
    elif plan.tls.mode == "private-ca":
        changed |= yield from _renew_certificate(plan, plan.tls.names, plan.tls.ca_dir)
    service = read_fact(Status).service(plan.settings.service)
    difference = service.gateway.difference if service else None
    if service and service.gateway.active == "active" and (changed or difference):
        if difference:
            host.log(f"gateway: {difference}")
        yield from _restart_outdated_watchdog(plan, service.active)
        yield tool.command_line(tool.GATEWAY_RELOAD, plan.settings.service)
    elif not changed:
        host.noop("the gateway's configuration is up to date")


@host_operation
def replace_key(plan: GatewayPlan) -> Commands:
    """Replace the key generated on the host; the old key is rejected at once."""
    if plan.key.kind != "generate":
        source = f"{plan.key.kind} {plan.key.value[0]}"  # such as "env API_KEY"
        message = f"the key comes from the controller ({source})"
        fail(f"{host.name}: serve.api_key", message, "change the key there, then run deploy.py")
    if not read_fact(Status).service(plan.settings.service):
        message = "no key exists, because no release has been deployed on this host yet"
        fail(f"{host.name}: API key", message, "run deploy.py for this host to create the key")
    yield tool.command_line(tool.GATEWAY_NEW_KEY, plan.settings.service)


@host_operation
def set_named_keys(keys: dict[str, NamedKey] | None) -> Commands:
    files = [
        ManagedFile(gateway.path, to_json(replace(gateway, keys=keys)).encode())
        for gateway in read_fact(Gateways)
    ]
    changed = yield from place_files(files)
    report = read_fact(Status).report
    outdated = [
        name
        for name, service in (report.services if report else {}).items()
        if service.gateway.active == "active" and (changed or service.gateway.difference)
    ]
    for name in outdated:
        yield tool.command_line(tool.GATEWAY_RELOAD, name)
    if not changed and not outdated:
        host.noop("the gateways accept these keys")


def _restart_outdated_watchdog(plan: GatewayPlan, release: str | None) -> Commands:
    """Restart a watchdog that runs older tools and would write outdated gateway files.

    The watchdog updates the gateway when addresses change. The engine is not interrupted.
    """
    if release is None or not EXPOSURES[plan.settings.expose].has_unstable_address:
        return
    running = host.get_fact(WatchTools, release=release)
    if running and running != host.get_fact(SymlinkTarget, path=CURRENT_TOOLS):
        message = f"restarting the watchdog of {release}"
        host.log(f"{message}, which still runs an older version of the tools")
        yield StringCommand("systemctl", "restart", shlex.quote(WATCH.unit(release)))


def _secret_files(plan: GatewayPlan) -> list[ManagedFile]:
    """Return the API key and certificate that the controller sends."""
    files = []
    if plan.key.kind != "generate":
        key = read_secret(plan.key, setting="serve.api_key")
        if not _VALID_KEY.fullmatch(key):
            source = f"{plan.key.kind} {plan.key.value[0]}"  # such as "env API_KEY"
            message = f"invalid key in {source}"
            fix = "use 16 to 512 letters, digits or . _ ~ + / = -"
            raise SettingsError.single("serve.api_key", message, fix)
        files.append(ManagedFile(plan.settings.key_path, f"{key}\n".encode(), 0o600))
    if plan.tls and plan.tls.mode == "own-cert":
        # Imported here, because X.509 takes time to import and few services need it.
        from spark_deploy.hosts.certificates import read_certificate_and_key

        files += _tls_files(plan, read_certificate_and_key(plan.tls.certificate, plan.tls.key))
    return files


def _tls_files(plan: GatewayPlan, content: "CertificateAndKey") -> list[ManagedFile]:
    tls = tls_paths(plan.settings.service)
    certificate = ManagedFile(tls.certificate, content.certificate)
    return [certificate, ManagedFile(tls.key, content.key, 0o600)]


def _renew_certificate(
    plan: GatewayPlan, names: tuple[str, ...], ca_dir: str
) -> Generator[Any, None, bool]:
    """Replace a missing or invalid certificate; return whether this was necessary."""
    from spark_deploy.hosts.certificates import issue_certificate, renewal_reason

    tls = tls_paths(plan.settings.service)
    certificate, key = host.get_fact(GatewayCertificate, certificate=tls.certificate, key=tls.key)
    reason = renewal_reason(certificate, key, names, ca_dir)
    if not reason:
        states = file_states([tls.certificate, tls.key])
        for path, mode in ((tls.certificate, 0o644), (tls.key, 0o600)):
            state = states.get(path)
            if state is None or (state.mode, state.owner) != (mode, "root:root"):
                reason = f"{path} must be owned by root and have mode {mode:o}"
    if not reason:
        return False
    host.log(f"new certificate for {', '.join(names)}: {reason}")
    if host.state.is_executing:
        yield from place_files(_tls_files(plan, issue_certificate(names, ca_dir)))
    else:
        yield StringCommand("true")  # a dry run must not create a CA
    return True


class Timers(HostFact[dict[str, bool]]):
    default = dict

    def command(self) -> str:
        return (
            f'for path in {UNITS_DIR}/{HOURS.unit("*")}; do [ -e "$path" ] || continue; '
            'name=$(basename "$path"); '
            'echo "$name $(systemctl is-active "$name") $(systemctl is-enabled "$name" 2>&1)"; done'
        )

    def process(self, output: Iterable[str]) -> dict[str, bool]:
        lines = (line.split() for line in output if line.strip())
        return {name: state == ["active", "enabled"] for name, *state in lines}


class RejectedCalendar(LineFact):
    """The first calendar expression that systemd rejects; "" if it accepts all."""

    def command(self, times: Sequence[str]) -> str:
        expressions = " ".join(map(shlex.quote, times))
        return (
            f'for at in {expressions}; do systemd-analyze calendar "$at" >/dev/null 2>&1 '
            '|| { echo "$at"; break; }; done'
        )


@host_operation
def set_timers(times: Sequence[str], timers: Sequence[ManagedFile]) -> Commands:
    if times and (rejected := host.get_fact(RejectedCalendar, times=tuple(times))):
        fix = "see `man systemd.time`, and test the time with `systemd-analyze calendar TIME`"
        fail(f"{host.name}: schedule", f"systemd rejects the time {rejected!r}", fix)
    running = read_fact(Timers)
    planned = sorted(file.path.rpartition("/")[2] for file in timers)
    obsolete = [name for name in running if name not in planned]
    if obsolete:
        names = " ".join(map(shlex.quote, obsolete))
        paths = " ".join(shlex.quote(f"{UNITS_DIR}/{name}") for name in obsolete)
        yield f"systemctl disable --now {names}; rm -f {paths}; systemctl daemon-reload"
    changed = (yield from place_files(timers)) if timers else False
    if changed or not all(running.get(name) for name in planned):
        names = " ".join(map(shlex.quote, planned))
        yield f"systemctl daemon-reload && systemctl enable {names} && systemctl restart {names}"
    elif not obsolete:
        message = f"{len(planned)} timers are running ({HOURS.unit('*')})"
        host.noop(message if planned else "no schedule")
