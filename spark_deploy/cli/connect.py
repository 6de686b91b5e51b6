"""``spark-deploy connect``: how to talk to each server, from the settings.

Only a tailnet's address is asked of the host, when the settings do not say it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import click
from pyinfra.api.host import Host
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench.host import Login
from spark_deploy.cli.clients import CLIENTS, QUESTION, Connection
from spark_deploy.cli.hosts import Target, all_host_names, chosen_services, select_hosts
from spark_deploy.cli.options import Options, service_option, shared_options
from spark_deploy.cli.query_hosts import query
from spark_deploy.cli.terminal import next_command, note, print_result
from spark_deploy.config.catalog.model import HybridModel, Model
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.certificates import ca_path
from spark_deploy.hosts.gateway import TailnetAddress
from spark_deploy.plan.gateway import CONTAINER_NAME, LOOPBACK, base_urls, gateway_plan, url
from spark_deploy.plan.kv_cache import context_tokens
from spark_deploy.plan.resolve import pair_of
from spark_deploy.plan.types import GatewayPlan

_LOOK_EVERY_S = 0.5


def hold_tunnels(tunnels: Sequence[tuple[str, str, str]]) -> None:
    """Keep tunnels open until one ends or somebody presses Ctrl-C.

    Args:
        tunnels: host, the URL that its tunnel makes work here, and the command of the tunnel.

    Raises:
        SparkError: there is none to hold, or one ended by itself.
    """
    if not tunnels:
        raise SparkError.one("--tunnel", "these hosts need none", "see `spark-deploy connect`")
    # Ctrl-C is noted, so that it comes between no tunnel and the note that it has to be ended.
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    with ExitStack() as held:
        running: list[tuple[str, subprocess.Popen[bytes]]] = []
        for host, base_url, command in tunnels:
            process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL)
            held.callback(_end, process)
            running.append((host, process))
            note(f"{host}: {base_url}")
        note("open until Ctrl-C")
        while True:
            time.sleep(_LOOK_EVERY_S)
            if pressed:  # which ended the tunnels as well
                note("")
                return
            for host, process in running:
                if process.poll() is not None:
                    what = f"its tunnel ended with exit code {process.returncode}"
                    raise SparkError.one(host, what, "read what ssh says above, and try again")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(timeout=20)


@click.command
@click.option("--for", "client", type=click.Choice(list(CLIENTS)), help="Set up one client.")
@service_option("This service instead of the main one.")
@click.option("--tunnel", is_flag=True, help="Hold SSH tunnels open until interrupted.")
@shared_options()
def connect(options: Options, client: str | None, service: str | None, tunnel: bool) -> int:
    """Print connections, or one client's setup, or hold tunnels.

    Raises:
        SparkError: several hosts for one client, or a tunnel ended.
    """
    asked = {"for": client, "tunnel": tunnel, "json": options.json}
    if len(two := [name for name, given in asked.items() if given]) > 1:
        what, fix = "are two answers, and one can be given", f"leave --{two[1]} out"
        raise SparkError.one(f"--{two[0]} and --{two[1]}", what, fix)
    hosts = _answering(select_hosts(options, judged=False), options, service)
    tailnet = _tailnet_addresses(hosts)
    places = {name: place for place, name in enumerate(all_host_names(options))}
    found = [
        connection_of(host, tailnet.get(host.name), places[host.name], service) for host in hosts
    ]
    if client:
        _for_client(options, client, service, found)
    elif tunnel:
        hold_tunnels([(one.host, one.base_url, one.tunnel) for one in found if one.tunnel])
    else:
        print_result(options, found, map(lines, found))
    return 0


def _answering(hosts: list[Target], options: Options, service: str | None) -> list[Target]:
    """Return the hosts that clients can talk to: of a cluster only the head.

    Raises:
        SparkError: none of those chosen is.
    """
    if service not in (None, MAIN_SERVICE):
        return hosts
    heads = {one.name: (*one.settings.settings.cluster.hosts, one.name)[0] for one in hosts}
    found = [one for one in hosts if heads[one.name] == one.name]
    if not found:
        [(name, head), *_] = heads.items()
        what = f"computes for {head}, which answers for both"
        raise SparkError.one(name, what, next_command(options, "connect", head))
    return found


def _for_client(options: Options, name: str, service: str | None, found: list[Connection]) -> None:
    if len(found) != 1:
        what = f"{len(found)} hosts: {', '.join(one.host for one in found)}"
        raise SparkError.one(f"--for {name}", what, "name the one that the client shall ask")
    [one], client = found, CLIENTS[name]
    print("\n".join(client.text(one)))
    words = ["connect", one.host, *(["--service", service] if service else [])]
    note(f"use      {client.use.replace('THIS', next_command(options, *words, '--for', name))}")
    if one.tunnel:
        note(f"tunnel   in another terminal: {next_command(options, *words, '--tunnel')}")


def _tailnet_addresses(hosts: list[Target]) -> dict[str, str]:
    """Ask the hosts whose settings do not say what their tailnet calls them."""
    unknown = [
        host
        for host in hosts
        if (serve := host.settings.settings.serve).expose == "tailscale" and not serve.address
    ]
    if not unknown:
        return {}

    def ask(host: Host, _listed: Target) -> str | None:
        return host.get_fact(TailnetAddress) or None

    answers = query(unknown, ask)
    for one in answers:
        if one.value is None:
            note(f"{one.host.name}: its tailnet address is not known: {one.problem}")
    return {one.host.name: one.value for one in answers if one.value}


def connection_of(
    host: Target,
    tailnet_address: str | None = None,
    place: int = 0,
    service: str | None = None,
) -> Connection:
    """Return what a client needs for ``host``.

    Args:
        host: the host.
        tailnet_address: what its tailnet calls it, if that had to be asked.
        place: of the host in its inventory, from 0. Each has a port of its own here, so that
            tunnels to all hosts can be open at once.
        service: one of those beside the main one; its ports are others, also here.

    Raises:
        SparkError: the host has no such service.
    """
    name = chosen_services(host, service or MAIN_SERVICE)[0]
    settings = host.settings.settings
    if name != MAIN_SERVICE:
        settings = settings.of_service(name)
    plan = gateway_plan(settings, host.name, name)
    if tailnet_address:
        plan = dataclasses.replace(plan, address=tailnet_address)
    names = settings.serve.names or (settings.model,)
    local = host.name.startswith("@")
    login = [] if local else ssh_command(host)
    read_key = shlex.join([*login, *_sudo(host), "cat", plan.settings.key_path])
    base_url, users = _best(plan)
    inside = base_url == url(plan, LOOPBACK) and not local
    # Where the port is taken ssh would go on without it (or with its IPv6 half), and the key would
    # go to whoever has it: so it is to end, and the address is said in full.
    port = plan.settings.port + place if inside else plan.settings.port
    forward = ["-N", "-o", "ExitOnForwardFailure=yes"]
    forward += ["-L", f"{LOOPBACK}:{port}:{LOOPBACK}:{plan.settings.port}"]
    tunnel = [*login[:1], *forward, *login[1:]]
    if inside:
        base_url = base_url.replace(f":{plan.settings.port}/", f":{port}/")
        users = "here, through the tunnel below"
    private = plan.tls is not None and plan.tls.mode == "private-ca"
    ca = str(ca_path(plan.tls.ca_dir)) if plan.tls and private else None
    return Connection(
        host=host.name,
        base_url=base_url,
        users=users,
        model=names[0],
        names=tuple(names),
        key_path=plan.settings.key_path,
        read_key=read_key,
        tunnel=shlex.join(tunnel) if inside else None,
        ca=ca,
        container=url(plan, CONTAINER_NAME) if plan.settings.expose == "docker" else None,
        example=example(base_url, names[0], read_key, ca),
        context_tokens=_context_tokens(*pair_of(settings, host.catalog)),
    )


def _context_tokens(model: Model, profile: Profile) -> int | None:
    """Return the longest request; of a repository served as published only the lock knows it."""
    if isinstance(model, HybridModel):
        return context_tokens(model, profile)
    return profile.limits.max_context_tokens


def _best(plan: GatewayPlan) -> tuple[str, str]:
    """Return the URL for most clients: the network's when there is one, else the host's own."""
    urls = base_urls(plan)
    return (
        urls[0]
        if plan.settings.expose == "docker" or (len(urls) > 1 and not plan.address)
        else urls[-1]
    )


def login_of(host: Target) -> Login:
    """Return how commands of ours run on a host: here, or over ssh."""
    local = host.name.startswith("@")
    return Login(host.name, () if local else tuple(ssh_command(host)), bool(host.data["_sudo"]))


def ssh_command(host: Target) -> list[str]:
    """Return the words of an ssh command that reaches ``host`` as pyinfra does."""
    data = host.data
    words = ["ssh"]
    for flag, key in (("-F", "ssh_config_file"), ("-i", "ssh_key"), ("-p", "ssh_port")):
        if data.get(key) not in (None, 22):
            words += [flag, str(data[key])]
    if data.get("ssh_known_hosts_file"):
        words += ["-o", f"UserKnownHostsFile={data['ssh_known_hosts_file']}"]
    user = f"{data['ssh_user']}@" if data.get("ssh_user") else ""
    return [*words, f"{user}{data.get('ssh_hostname', host.name)}"]


def lines(one: Connection) -> Iterator[str]:
    """Yield the connection as lines for people."""
    yield f"{one.host}:"
    also = f" (also {', '.join(one.names[1:])})" if one.names[1:] else ""
    yield f"  base URL   {one.base_url} ({one.users})"
    if one.container:
        yield f"  containers {one.container}, on this host, with"
        yield f"             docker run --add-host {CONTAINER_NAME}:host-gateway ..."
    yield f"  model      {one.model}{also}"
    yield f"  API key    {one.key_path} on the host"
    yield f"  read it    {one.read_key}"
    if one.ca:
        yield f"  CA         {one.ca} on this machine, made by the first deploy; clients need it:"
        yield f"             curl --cacert {one.ca}; Python: SSL_CERT_FILE={one.ca}"
    if one.tunnel:
        yield f"  from here  {one.tunnel}"
    yield f"  try        {one.example}"


def _sudo(host: Target) -> list[str]:
    return ["sudo"] if host.data["_sudo"] else []


def example(base_url: str, model: str, read_key: str, ca: str | None) -> str:
    """Return a line for a shell that asks one question."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    trust = f"--cacert {shlex.quote(ca)} " if ca else ""
    # The header goes over standard input: in argv every user of this machine could read the key.
    return (
        f"{read_key} | sed 's/^/Authorization: Bearer /' | "
        f"curl -s {trust}{base_url}/chat/completions -H @- "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
