"""The gateway of a service on a host, and the timers of a schedule."""

from __future__ import annotations

import re
import shlex
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract import tool
from spark_contract.gateway import EXPOSURES, tls_of
from spark_contract.paths import CURRENT_TOOLS
from spark_contract.units import (
    HOURS,
    UNITS_DIR,
    WATCH,
)

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.read_secret import read_secret
from spark_deploy.hosts.certificates import read_pair, why_renew
from spark_deploy.hosts.facts import HostFact, read_fact
from spark_deploy.hosts.files import file_states, place_files
from spark_deploy.hosts.host_errors import Commands, host_errors, refuse
from spark_deploy.hosts.status import Status
from spark_deploy.plan.gateway import gateway_file
from spark_deploy.plan.managed_files import FileState, ManagedFile
from spark_deploy.plan.types import GatewayPlan


class SymlinkTarget(HostFact[str]):
    """Where a symlink points, literally; empty when there is none."""

    default = str

    def command(self, path: str) -> str:
        return f"readlink -- {shlex.quote(path)} || true"

    def process(self, output: Iterable[str]) -> str:
        return next(iter(output), "")


_BREAK = "== key"


@dataclass(frozen=True, slots=True)
class HostCertificate:
    """The certificate and the public half of the key beside it, PEM; empty when absent."""

    certificate: bytes
    public_key: bytes


class GatewayCertificate(HostFact[HostCertificate]):
    """The certificate of a gateway (openssl, on which ca-certificates depends)."""

    @staticmethod
    def default() -> HostCertificate:
        """Return what a host without one has."""
        return HostCertificate(b"", b"")

    def command(self, certificate: str, key: str) -> str:
        return (
            f"cat {shlex.quote(certificate)} 2>/dev/null; echo '{_BREAK}'; "
            f"openssl pkey -in {shlex.quote(key)} -pubout 2>/dev/null; true"
        )

    def process(self, output: Iterable[str]) -> HostCertificate:
        certificate, _, key = "\n".join(output).partition(_BREAK)
        return HostCertificate(certificate.strip().encode(), key.strip().encode())


class WatchTools(HostFact[str]):
    """The folder of tools whose code the watch over a release runs; empty when none runs."""

    default = str

    def command(self, release: str) -> str:
        unit = shlex.quote(WATCH.of(release))
        return (
            f"pid=$(systemctl show -p MainPID --value {unit}); "
            "cat /proc/$pid/environ 2>/dev/null | tr '\\0' '\\n' | "
            "sed -n 's/^PYTHONPATH=//p' | cut -d: -f1"
        )

    def process(self, output: Iterable[str]) -> str:
        return next(iter(output), "")


class TailnetAddress(HostFact[str]):
    """The host's address in its tailnet; empty when tailscale is not up."""

    default = str

    def command(self) -> str:
        return "tailscale ip -4 2>/dev/null; true"

    def process(self, output: Iterable[str]) -> str:
        return next((line.strip() for line in output if line.strip()), "")


class Timers(HostFact[dict[str, bool]]):
    """Each timer of a schedule, with whether it runs and starts with the host."""

    default = dict

    def command(self) -> str:
        return (
            f'for path in {UNITS_DIR}/{HOURS.of("*")}; do [ -e "$path" ] || continue; '
            'name=$(basename "$path"); '
            'echo "$name $(systemctl is-active "$name") $(systemctl is-enabled "$name" 2>&1)"; done'
        )

    def process(self, output: Iterable[str]) -> dict[str, bool]:
        lines = (line.split() for line in output if line.strip())
        return {name: state == ["active", "enabled"] for name, *state in lines}


class Calendars(HostFact[str]):
    """Why the first of some calendar expressions is none; "" when all of them are."""

    default = str

    def command(self, times: Sequence[str]) -> str:
        words = " ".join(map(shlex.quote, times))
        return (
            f'for at in {words}; do systemd-analyze calendar "$at" >/dev/null 2>&1 '
            '|| { echo "$at"; break; }; done'
        )

    def process(self, output: Iterable[str]) -> str:
        found = "".join(output).strip()
        return f"{found!r} is no time that its systemd understands" if found else ""


# What changed is taken over by a reload, which finishes answers under way. Starting it is part of
# the change of release, because an engine stands behind it only then.
_USABLE_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def gateway_paths(plan: GatewayPlan) -> tuple[str, ...]:
    """Return every path at which a gateway may have a file of ours."""
    tls = tls_of(plan.settings.service)
    key = () if plan.key.kind == "generate" else (plan.settings.key_path,)
    return (gateway_file(plan).path, tls.certificate, tls.key, *key)


@operation()
@host_errors
def configure_gateway(plan: GatewayPlan) -> Commands:
    """Have the gateway's files on the host, and a running gateway use them."""
    changed = yield from place_files((gateway_file(plan), *_secrets(plan)))
    if plan.tls and plan.tls.mode == "private-ca":
        changed |= yield from _issue_certificate(plan, plan.tls.names, plan.tls.ca_dir)
    if plan.tls is None:
        changed |= yield from _remove_certificate(plan)
    service = read_fact(Status).service(plan.settings.service)
    difference = service.gateway.difference if service else None
    if service and service.gateway.active == "active" and (changed or difference):
        if difference:
            host.log(f"gateway: {difference}")
        yield from _restart_watch(plan, service.active)
        yield tool.line(tool.GATEWAY_RELOAD, plan.settings.service)
    elif not changed:
        host.noop("the gateway is as planned")


@operation()
@host_errors
def replace_key(plan: GatewayPlan) -> Commands:
    """Replace the API key that the host made; the old one is refused from then on."""
    if plan.key.kind != "generate":
        refuse(
            f"{host.name}: serve.api_key",
            f"comes from the controller ({plan.key.kind} {plan.key.value[0]})",
            "put the new key there and run deploy.py",
        )
    if not read_fact(Status).service(plan.settings.service):
        refuse(
            f"{host.name}: API key",
            "there is none to replace: nothing was deployed here yet",
            "run deploy.py for this host; its first change of release makes the key",
        )
    yield tool.line(tool.GATEWAY_NEW_KEY, plan.settings.service)


def _restart_watch(plan: GatewayPlan, release: str | None) -> Commands:
    """Have no watch of other code, which would render the gateway's files its own way again.

    It follows addresses that come and go, with the code that it began with; engines go on.
    """
    if release is None or not EXPOSURES[plan.settings.expose].late:
        return
    runs = host.get_fact(WatchTools, release=release)
    if runs and runs != host.get_fact(SymlinkTarget, path=CURRENT_TOOLS):
        host.log(f"the watch over {release} runs older tools and is restarted")
        yield StringCommand("systemctl", "restart", shlex.quote(WATCH.of(release)))


def _secrets(plan: GatewayPlan) -> list[ManagedFile]:
    """Read the files that the controller provides."""
    files = []
    if plan.key.kind != "generate":
        key = read_secret(plan.key, setting="serve.api_key")
        if not _USABLE_KEY.fullmatch(key):
            raise SettingsError.one(
                "serve.api_key",
                f"what the controller reads from {plan.key.kind} {plan.key.value[0]} is not usable",
                "use 16 to 512 letters, digits or . _ ~ + / = -",
            )
        files.append(ManagedFile(plan.settings.key_path, f"{key}\n".encode(), 0o600))
    if plan.tls and plan.tls.mode == "own-cert":
        # X.509 is for those alone who have certificates.

        pair = read_pair(plan.tls.certificate, plan.tls.key)
        files += _pair_files(plan, pair.certificate, pair.key)
    return files


def _pair_files(plan: GatewayPlan, certificate: bytes, key: bytes) -> list[ManagedFile]:
    tls = tls_of(plan.settings.service)
    return [ManagedFile(tls.certificate, certificate), ManagedFile(tls.key, key, 0o600)]


def _issue_certificate(
    plan: GatewayPlan, names: tuple[str, ...], ca_dir: str
) -> Generator[Any, None, bool]:
    """Have a certificate of the private CA that is good for some time; others are left alone."""
    from spark_deploy.hosts.certificates import issue

    tls = tls_of(plan.settings.service)
    paths = (tls.certificate, tls.key)
    seen = host.get_fact(GatewayCertificate, certificate=paths[0], key=paths[1])
    why = why_renew(seen.certificate, seen.public_key, names, ca_dir) or _exposed(paths)
    if not why:
        return False
    host.log(f"new certificate for {', '.join(names)}: {why}")
    if host.state.is_executing:
        pair = issue(names, ca_dir)
        yield from place_files(_pair_files(plan, pair.certificate, pair.key))
    else:
        # A prediction makes no CA.
        yield StringCommand("true")
    return True


def _exposed(paths: tuple[str, str]) -> str:
    states = file_states(paths)
    for path, mode in zip(paths, (0o644, 0o600), strict=True):
        state = states.get(path)
        if state is None or state != FileState(mode, "root:root", state.sha256):
            return f"{path} has not the mode {mode:o} or not the owner root"
    return ""


def _remove_certificate(plan: GatewayPlan) -> Generator[Any, None, bool]:
    """Remove what an earlier exposure left."""
    tls = tls_of(plan.settings.service)
    paths = (tls.certificate, tls.key)
    left = list(file_states(paths))
    if left:
        yield StringCommand("rm", "-f", "--", *left)
    return bool(left)


@operation()
@host_errors
def set_timers(times: Sequence[str], timers: Sequence[ManagedFile]) -> Commands:
    """Have exactly these timers: theirs run, those of earlier schedules are gone."""
    problem = host.get_fact(Calendars, times=tuple(times)) if times else ""
    if problem:
        refuse(
            f"{host.name}: schedule", problem, "`man systemd.time`; `systemd-analyze calendar TEXT`"
        )
    running = read_fact(Timers)
    wanted = {file.path.rpartition("/")[2] for file in timers}
    gone = [name for name in running if name not in wanted]
    if gone:
        names = " ".join(map(shlex.quote, gone))
        paths = " ".join(shlex.quote(f"{UNITS_DIR}/{name}") for name in gone)
        yield f"systemctl disable --now {names}; rm -f {paths}; systemctl daemon-reload"
    changed = (yield from place_files(timers)) if timers else False
    idle = [name for name in sorted(wanted) if not running.get(name)]
    if changed or idle:
        names = " ".join(map(shlex.quote, sorted(wanted)))
        yield f"systemctl daemon-reload && systemctl enable {names} && systemctl restart {names}"
    if not (gone or changed or idle):
        host.noop(f"{len(wanted)} timers run ({HOURS.of('*')})" if wanted else "no schedule")
