"""The times at which a host changes between releases by itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Generator, Sequence
from typing import Any

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract import tool
from spark_contract.gateway import EXPOSURES, tls_of
from spark_contract.paths import CURRENT_TOOLS
from spark_contract.units import HOURS, UNITS_DIR, WATCH

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.read_secret import read_secret
from spark_deploy.hosts.facts.fact_cache import read
from spark_deploy.hosts.facts.jobs import (
    Calendars,
    GatewayCertificate,
    SymlinkTarget,
    Timers,
    WatchTools,
)
from spark_deploy.hosts.facts.releases import Status
from spark_deploy.hosts.operations.files import place, states_of
from spark_deploy.hosts.operations.host_errors import Commands, host_errors, refuse
from spark_deploy.plan.gateway import gateway_file
from spark_deploy.plan.managed_files import FileState, ManagedFile
from spark_deploy.plan.types import GatewayPlan

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
def configured(plan: GatewayPlan) -> Commands:
    """Have the gateway's files on the host, and a running gateway use them."""
    changed = yield from place((gateway_file(plan), *_secrets(plan)))
    if plan.tls and plan.tls.mode == "private-ca":
        changed |= yield from _certified(plan, plan.tls.names, plan.tls.ca_dir)
    if plan.tls is None:
        changed |= yield from _without_certificate(plan)
    service = read(Status).service(plan.settings.service)
    difference = service.gateway.difference if service else None
    if service and service.gateway.active == "active" and (changed or difference):
        if difference:
            host.log(f"gateway: {difference}")
        yield from _watch_renewed(plan, service.active)
        yield tool.line(tool.GATEWAY_RELOAD, plan.settings.service)
    elif not changed:
        host.noop("the gateway is as planned")


@operation()
@host_errors
def new_key(plan: GatewayPlan) -> Commands:
    """Replace the API key that the host made; the old one is refused from then on."""
    if plan.key.kind != "generate":
        refuse(
            f"{host.name}: serve.api_key",
            f"comes from the controller ({plan.key.kind} {plan.key.value[0]})",
            "put the new key there and run deploy.py",
        )
    if not read(Status).service(plan.settings.service):
        refuse(
            f"{host.name}: API key",
            "there is none to replace: nothing was deployed here yet",
            "run deploy.py for this host; its first change of release makes the key",
        )
    yield tool.line(tool.GATEWAY_NEW_KEY, plan.settings.service)


def _watch_renewed(plan: GatewayPlan, release: str | None) -> Commands:
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
        from spark_deploy.hosts.payload.certificates import given_pair

        pair = given_pair(plan.tls.certificate, plan.tls.key)
        files += _pair_files(plan, pair.certificate, pair.key)
    return files


def _pair_files(plan: GatewayPlan, certificate: bytes, key: bytes) -> list[ManagedFile]:
    tls = tls_of(plan.settings.service)
    return [ManagedFile(tls.certificate, certificate), ManagedFile(tls.key, key, 0o600)]


def _certified(
    plan: GatewayPlan, names: tuple[str, ...], ca_dir: str
) -> Generator[Any, None, bool]:
    """Have a certificate of the private CA that is good for some time; others are left alone."""
    from spark_deploy.hosts.payload.certificates import issue, why_not

    tls = tls_of(plan.settings.service)
    paths = (tls.certificate, tls.key)
    seen = host.get_fact(GatewayCertificate, certificate=paths[0], key=paths[1])
    why = why_not(seen.certificate, seen.public_key, names, ca_dir) or _exposed(paths)
    if not why:
        return False
    host.log(f"new certificate for {', '.join(names)}: {why}")
    if host.state.is_executing:
        pair = issue(names, ca_dir)
        yield from place(_pair_files(plan, pair.certificate, pair.key))
    else:
        # A prediction makes no CA.
        yield StringCommand("true")
    return True


def _exposed(paths: tuple[str, str]) -> str:
    states = states_of(paths)
    for path, mode in zip(paths, (0o644, 0o600), strict=True):
        state = states.get(path)
        if state is None or state != FileState(mode, "root:root", state.sha256):
            return f"{path} has not the mode {mode:o} or not the owner root"
    return ""


def _without_certificate(plan: GatewayPlan) -> Generator[Any, None, bool]:
    """Remove what an earlier exposure left."""
    tls = tls_of(plan.settings.service)
    paths = (tls.certificate, tls.key)
    left = list(states_of(paths))
    if left:
        yield StringCommand("rm", "-f", "--", *left)
    return bool(left)


@operation()
@host_errors
def scheduled(times: Sequence[str], timers: Sequence[ManagedFile]) -> Commands:
    """Have exactly these timers: theirs run, those of earlier schedules are gone."""
    problem = host.get_fact(Calendars, times=tuple(times)) if times else ""
    if problem:
        refuse(
            f"{host.name}: schedule", problem, "`man systemd.time`; `systemd-analyze calendar TEXT`"
        )
    running = read(Timers)
    wanted = {file.path.rpartition("/")[2] for file in timers}
    gone = [name for name in running if name not in wanted]
    if gone:
        names = " ".join(map(shlex.quote, gone))
        paths = " ".join(shlex.quote(f"{UNITS_DIR}/{name}") for name in gone)
        yield f"systemctl disable --now {names}; rm -f {paths}; systemctl daemon-reload"
    changed = (yield from place(timers)) if timers else False
    idle = [name for name in sorted(wanted) if not running.get(name)]
    if changed or idle:
        names = " ".join(map(shlex.quote, sorted(wanted)))
        yield f"systemctl daemon-reload && systemctl enable {names} && systemctl restart {names}"
    if not (gone or changed or idle):
        host.noop(f"{len(wanted)} timers run ({HOURS.of('*')})" if wanted else "no schedule")
