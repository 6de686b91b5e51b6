"""``spark-deploy connect``: how to talk to each server, from the settings.

Only a tailnet's address is asked of the host, when the settings do not say it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from pyinfra.api.host import Host

from spark_deploy.bench.host import Login
from spark_deploy.cli.commands import Options
from spark_deploy.cli.hosts import Listed, answer, listed, say
from spark_deploy.cli.looking import look
from spark_deploy.facts.service.gateway import TailnetAddress
from spark_deploy.payload.certificates import ca_path
from spark_deploy.planning.serving.gateway import (
    CONTAINER_NAME,
    LOOPBACK,
    base_urls,
    gateway_plan,
    url,
)
from spark_deploy.planning.types import GatewayPlan


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything a client needs for one server."""

    host: str
    base_url: str
    users: str  # who reaches base_url
    model: str
    names: tuple[str, ...]
    key_path: str
    read_key: str  # a command that prints the key
    tunnel: str | None  # a command that makes the host's own URL work from here
    ca: str | None  # a file that clients must trust
    container: str | None  # base URL inside containers of the host
    example: str


def run(options: Options) -> int:
    """Print how to talk to the chosen hosts."""
    hosts = listed(options)
    tailnet = _tailnet_addresses(hosts)
    found = [connection_of(host, tailnet.get(host.name)) for host in hosts]
    answer(options, found, map(lines, found))
    return 0


def _tailnet_addresses(hosts: list[Listed]) -> dict[str, str]:
    """Ask the hosts whose settings do not say what their tailnet calls them."""
    unknown = [
        host
        for host in hosts
        if (serve := host.settings.settings.serve).expose == "tailscale" and not serve.address
    ]
    if not unknown:
        return {}

    def ask(host: Host, _listed: Listed) -> str | None:
        return host.get_fact(TailnetAddress) or None

    answers = look(unknown, ask)
    for one in answers:
        if one.value is None:
            say(f"{one.host.name}: its tailnet address is not known: {one.problem}")
    return {one.host.name: one.value for one in answers if one.value}


def connection_of(host: Listed, tailnet_address: str | None = None) -> Connection:
    """Return what a client needs for ``host``."""
    settings = host.settings.settings
    plan = gateway_plan(settings, host.name)
    if tailnet_address:
        plan = dataclasses.replace(plan, address=tailnet_address)
    names = settings.serve.names or (settings.model,)
    local = host.name.startswith("@")
    login = [] if local else ssh_command(host)
    read_key = shlex.join([*login, *_sudo(host), "cat", plan.settings.key_path])
    base_url, users = _best(plan)
    inside = base_url == url(plan, LOOPBACK)
    # Where the port is taken ssh would go on without it (or with its IPv6 half), and the key would
    # go to whoever has it: so it is to end, and the address is said in full.
    here = f"{LOOPBACK}:{plan.settings.port}"
    forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{here}:{here}"]
    tunnel = [*login[:1], *forward, *login[1:]]
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
        tunnel=None if local or not inside else shlex.join(tunnel),
        ca=ca,
        container=url(plan, CONTAINER_NAME) if plan.settings.expose == "docker" else None,
        example=_example(base_url, names[0], read_key, ca),
    )


def _best(plan: GatewayPlan) -> tuple[str, str]:
    """Return the URL for most clients: the network's when there is one, else the host's own."""
    urls = base_urls(plan)
    return (
        urls[0]
        if plan.settings.expose == "docker" or (len(urls) > 1 and not plan.address)
        else urls[-1]
    )


def login_of(host: Listed) -> Login:
    """Return how commands of ours run on a host: here, or over ssh."""
    local = host.name.startswith("@")
    return Login(host.name, () if local else tuple(ssh_command(host)), bool(host.data["_sudo"]))


def ssh_command(host: Listed) -> list[str]:
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
    yield f"  API key    {one.key_path} on the host; print it with: {one.read_key}"
    if one.ca:
        yield f"  CA         {one.ca} on this machine, made by the first deploy; clients need it:"
        yield f"             curl --cacert {one.ca}; Python: SSL_CERT_FILE={one.ca}"
    if one.tunnel:
        yield f"  from here  {one.tunnel}"
    yield f"  try        {one.example}"


def _sudo(host: Listed) -> list[str]:
    return ["sudo"] if host.data["_sudo"] else []


def _example(base_url: str, model: str, read_key: str, ca: str | None) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "What is 7823 * 4519?"}]}
    trust = f"--cacert {shlex.quote(ca)} " if ca else ""
    # The header goes over standard input: in argv every user of this machine could read the key.
    return (
        f"{read_key} | sed 's/^/Authorization: Bearer /' | "
        f"curl -s {trust}{base_url}/chat/completions -H @- "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
