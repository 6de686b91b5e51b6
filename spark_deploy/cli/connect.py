"""``spark-deploy connect``: URL, model name, API key and client setup of each server.

The output contains a command that reads the key instead of the key itself. The key therefore does
not appear in shell histories, argv or files.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import click
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench.host import Login, open_tunnel, tunnel_argv
from spark_deploy.bench.protocols import Endpoint
from spark_deploy.cli.connection import Connection, hold_tunnels
from spark_deploy.cli.console import (
    Options,
    next_command,
    note,
    print_result,
    service_option,
    shared_options,
)
from spark_deploy.cli.hosts import (
    Target,
    inventory_path,
    query_or_note,
    select_hosts,
    selected_services,
)
from spark_deploy.cli.routers import ROUTERS, model_names
from spark_deploy.config.catalog.model import HybridModel, PlainModel
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.certificates import ca_path
from spark_deploy.hosts.gateway import TailnetAddress
from spark_deploy.inventory.plans import read_inventory
from spark_deploy.plan.gateway import CONTAINER_NAME, LOOPBACK, base_urls, gateway_plan, url
from spark_deploy.plan.kv_cache import context_tokens
from spark_deploy.plan.resolve import model_and_profile

QUESTION = "What is 7823 * 4519?"
_WEBUI_IMAGE, _WEBUI_PORT = "ghcr.io/open-webui/open-webui:main", 3000
_OPENCODE_ANSWER_TOKENS = 32_000


@dataclass(frozen=True, slots=True)
class Client:
    instructions: str  # THIS stands for the connect command
    render: Callable[[Connection], Iterator[str]]


def _exports(**values: str) -> Iterator[str]:
    yield from (f"export {name}={shlex.quote(value)}" for name, value in values.items())


def _key_export(name: str, server: Connection) -> str:
    return f'export {name}="$({server.read_key})"'


def _render_env(server: Connection) -> Iterator[str]:
    yield from _exports(OPENAI_BASE_URL=server.base_url, OPENAI_MODEL=server.model)
    yield _key_export("OPENAI_API_KEY", server)
    if server.ca:
        yield from _exports(SSL_CERT_FILE=server.ca)


def _render_claude(server: Connection) -> Iterator[str]:
    yield from _exports(ANTHROPIC_BASE_URL=server.base_url.removesuffix("/v1"))
    yield _key_export("ANTHROPIC_AUTH_TOKEN", server)
    yield "unset ANTHROPIC_API_KEY"
    models = ("", "_DEFAULT_OPUS", "_DEFAULT_SONNET", "_DEFAULT_HAIKU")
    yield from _exports(
        **{f"ANTHROPIC{kind}_MODEL": server.model for kind in models},
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    if server.ca:
        yield from _exports(NODE_EXTRA_CA_CERTS=server.ca, SSL_CERT_FILE=server.ca)


def _render_python(server: Connection) -> Iterator[str]:
    yield "import os, subprocess"
    if server.ca:
        yield f"os.environ['SSL_CERT_FILE'] = {server.ca!r}"
    yield f"""from openai import OpenAI

read_key = {shlex.split(server.read_key)!r}
key = subprocess.check_output(read_key, text=True).strip()
client = OpenAI(base_url={server.base_url!r}, api_key=key)
answer = client.chat.completions.create(
    model={server.model!r},
    messages=[{{'role': 'user', 'content': {QUESTION!r}}}],
    stream=True,
)
for piece in answer:
    for choice in piece.choices:
        print(choice.delta.content or '', end='', flush=True)
print()"""


def _render_opencode(server: Connection) -> Iterator[str]:
    # By default opencode requests 32,000-token answers, which exceed small contexts.
    context = server.context_tokens or 0
    limit = {"context": context, "output": min(_OPENCODE_ANSWER_TOKENS, context // 4)}
    limits = {"limit": limit} if context else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": server.host,
        "options": {"baseURL": server.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {name: {"name": name, **limits} for name in server.names},
    }
    schema, name = "https://opencode.ai/config.json", server.host.lstrip("@")
    config = {"$schema": schema, "model": f"{name}/{server.model}", "provider": {name: provider}}
    yield json.dumps(config, indent=2)


def _render_openwebui(server: Connection) -> Iterator[str]:
    yield _key_export("OPENAI_API_KEY", server)
    argv = ["docker", "run", "-d", "--name", "open-webui", "--network", "host"]
    # Listen only on loopback, because the first visitor becomes administrator and can use the key.
    argv += ["-e", "HOST=127.0.0.1", "-e", f"PORT={_WEBUI_PORT}"]
    argv += ["-e", f"OPENAI_API_BASE_URL={server.base_url}"]
    # Without a value, docker reads the key from the environment, which keeps it out of argv.
    argv += ["-e", "OPENAI_API_KEY", "-v", "open-webui:/app/backend/data"]
    if server.ca:
        inside = "/etc/ssl/spark-ca.pem"
        argv += ["-v", f"{server.ca}:{inside}:ro", "-e", f"SSL_CERT_FILE={inside}"]
    yield shlex.join([*argv, _WEBUI_IMAGE])


CLIENTS: dict[str, Client] = {
    "openwebui": Client(
        f"run these lines on Linux, then open http://127.0.0.1:{_WEBUI_PORT}", _render_openwebui
    ),
    "opencode": Client(
        "save as opencode.json; export the key with `--for env` before starting opencode",
        _render_opencode,
    ),
    "claude": Client('eval "$(THIS)"; claude', _render_claude),
    "python": Client("pip install openai; python FILE", _render_python),
    "curl": Client("run this line", lambda server: iter([server.example])),
    "env": Client('eval "$(THIS)"', _render_env),
}


@click.command
@click.option(
    "--for", "client", type=click.Choice([*CLIENTS, *ROUTERS]), help="Set up this client."
)
@service_option("Use this service instead of the main one.")
@click.option("--tunnel", is_flag=True, help="Keep SSH tunnels open until Ctrl-C.")
@shared_options()
def connect(options: Options, client: str | None, service: str | None, tunnel: bool) -> int:
    flags = {"--for": client, "--tunnel": tunnel, "--json": options.json}
    if len(given := [name for name, value in flags.items() if value]) > 1:
        raise SparkError.one(" and ".join(given), "cannot be combined", f"remove {given[1]}")
    hosts = hosts_for_clients(select_hosts(options, must_serve=False), options, service)
    servers = make_connections(hosts, options, service)
    if client in ROUTERS:
        _print_router(options, client, service, hosts, servers)
    elif client:
        _print_client(options, client, service, servers)
    elif tunnel:
        hold_tunnels(
            [(server.host, server.base_url, server.tunnel) for server in servers if server.tunnel]
        )
    else:
        print_result(options, servers, map(connection_lines, servers))
    return 0


def hosts_for_clients(hosts: list[Target], options: Options, service: str | None) -> list[Target]:
    """Return the hosts that answer clients; in a cluster, only the head does."""
    if service not in (None, MAIN_SERVICE):
        return hosts
    answering = [host for host in hosts if _head_name(host) == host.name]
    if not answering:
        head = _head_name(hosts[0])
        problem = f"is a cluster worker; its head {head} answers clients"
        fix = f"run `{next_command(options, 'connect', head)}`"
        raise SparkError.one(hosts[0].name, problem, fix)
    return answering


def _head_name(host: Target) -> str:
    members = host.settings.cluster.hosts
    return members[0] if members else host.name


def make_connections(
    hosts: list[Target], options: Options, service: str | None = None
) -> list[Connection]:
    tailnet = _tailnet_addresses(hosts)
    names = list(read_inventory(inventory_path(options), data=list(options.data), must_serve=False))
    return [
        make_connection(host, tailnet.get(host.name), names.index(host.name), service)
        for host in hosts
    ]


def _tailnet_addresses(hosts: list[Target]) -> dict[str, str]:
    unknown = [
        host
        for host in hosts
        if (serve := host.settings.serve).expose == "tailscale" and not serve.address
    ]
    if not unknown:
        return {}
    answers = query_or_note(unknown, lambda host, _: host.get_fact(TailnetAddress) or None)
    return {host.name: address for host, address in answers}


def _print_client(
    options: Options, name: str, service: str | None, servers: list[Connection]
) -> None:
    if len(servers) != 1:
        problem = f"{len(servers)} hosts selected: {', '.join(server.host for server in servers)}"
        raise SparkError.one(f"--for {name}", problem, "select one host")
    [server], client = servers, CLIENTS[name]
    print("\n".join(client.render(server)))
    argv = ["connect", server.host, *(["--service", service] if service else [])]
    command = next_command(options, *argv, "--for", name)
    note(f"use      {client.instructions.replace('THIS', command)}")
    if server.tunnel:
        note(f"tunnel   in another terminal: {next_command(options, *argv, '--tunnel')}")


def _print_router(
    options: Options,
    name: str,
    service: str | None,
    hosts: list[Target],
    servers: list[Connection],
) -> None:
    if service is None:  # the main gateway serves the models of all services
        servers = [
            dataclasses.replace(server, names=model_names(host))
            for host, server in zip(hosts, servers, strict=True)
        ]
    print("\n".join(ROUTERS[name].render(servers)))
    note(f"use      {ROUTERS[name].instructions}")
    if any(server.tunnel for server in servers):
        note(f"tunnels  in another terminal: {next_command(options, 'connect', '--tunnel')}")


def make_connection(
    host: Target,
    tailnet_address: str | None = None,
    host_index: int = 0,
    service: str | None = None,
) -> Connection:
    """Return the data that a client needs to connect; raise SparkError for an unknown service.

    ``host_index``, the host's position in the inventory, gives each tunnel a separate port.
    """
    service = selected_services(host, service or MAIN_SERVICE)[0]
    settings = host.settings
    if service != MAIN_SERVICE:
        settings = settings.service_settings(service)
    plan = gateway_plan(settings, host.name, service)
    if tailnet_address:
        plan = dataclasses.replace(plan, address=tailnet_address)
    names = settings.serve.names_of(settings.model)
    local = host.name.startswith("@")
    login = [] if local else ssh_command(host)
    sudo = ["sudo"] if host.data["_sudo"] else []
    read_key = shlex.join([*login, *sudo, "cat", plan.settings.key_path])
    urls = base_urls(plan)
    # The last URL has the most clients, unless only this host can use it or its address is unknown.
    is_local = plan.settings.expose == "docker" or (len(urls) > 1 and not plan.address)
    base_url, users = urls[0] if is_local else urls[-1]
    tunnel, port = None, plan.settings.port
    if base_url == url(plan, LOOPBACK) and not local:
        tunnel = shlex.join(tunnel_argv(login, port + host_index, port))
        base_url = base_url.replace(f":{port}/", f":{port + host_index}/")
        users = "on this machine, through the tunnel below"
    ca = str(ca_path(plan.tls.ca_dir)) if plan.tls and plan.tls.mode == "private-ca" else None
    model, profile = model_and_profile(settings, host.catalog)
    task = model.task if isinstance(model, PlainModel) else "chat"
    return Connection(
        host=host.name,
        base_url=base_url,
        port=port,
        users=users,
        model=names[0],
        names=tuple(names),
        key_path=plan.settings.key_path,
        read_key=read_key,
        tunnel=tunnel,
        ca=ca,
        container=url(plan, CONTAINER_NAME) if plan.settings.expose == "docker" else None,
        task=task,
        example=example(base_url, names[0], read_key, ca, task),
        context_tokens=(
            context_tokens(model, profile)
            if isinstance(model, HybridModel)
            else profile.limits.max_context_tokens
        ),
    )


@contextmanager
def open_endpoint(target: Target, service: str | None) -> Iterator[Endpoint]:
    """Yield the server's endpoint with the key, through a tunnel if needed."""
    service = selected_services(target, service or MAIN_SERVICE)[0]
    server, login = make_connection(target, service=service), make_login(target)
    key = login.run(f"cat {server.key_path}").strip()
    with ExitStack() as stack:
        base_url = server.base_url
        if server.tunnel:
            base_url = f"http://127.0.0.1:{stack.enter_context(open_tunnel(login, server.port))}/v1"
        yield Endpoint(base_url, server.model, key, server.ca)


def make_login(host: Target) -> Login:
    local = host.name.startswith("@")
    return Login(host.name, () if local else tuple(ssh_command(host)), bool(host.data["_sudo"]))


def ssh_command(host: Target) -> list[str]:
    data = host.data
    argv = ["ssh"]
    for flag, key in (("-F", "ssh_config_file"), ("-i", "ssh_key"), ("-p", "ssh_port")):
        if data.get(key) not in (None, 22):
            argv += [flag, str(data[key])]
    if data.get("ssh_known_hosts_file"):
        argv += ["-o", f"UserKnownHostsFile={data['ssh_known_hosts_file']}"]
    user = f"{data['ssh_user']}@" if data.get("ssh_user") else ""
    return [*argv, f"{user}{data.get('ssh_hostname', host.name)}"]


def connection_lines(server: Connection) -> Iterator[str]:
    yield f"{server.host}:"
    aliases = f" (also {', '.join(server.names[1:])})" if server.names[1:] else ""
    yield f"  base URL   {server.base_url} ({server.users})"
    if server.container:
        yield f"  containers {server.container}, on this host, with"
        yield f"             docker run --add-host {CONTAINER_NAME}:host-gateway ..."
    yield f"  model      {server.model}{aliases}"
    yield f"  API key    {server.key_path} on the host"
    yield f"  read key   {server.read_key}"
    if server.ca:
        yield f"  CA         {server.ca} on this machine, created by the first deploy; for clients:"
        yield f"             curl --cacert {server.ca}; Python: SSL_CERT_FILE={server.ca}"
    if server.tunnel:
        yield f"  tunnel     {server.tunnel}"
    yield f"  try        {server.example}"


# Path and body of an example request for each model task.
_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    "completion": ("completions", {"prompt": "The capital of France is", "max_tokens": 9}),
    "embedding": ("embeddings", {"input": QUESTION}),
    "reranking": ("rerank", {"query": QUESTION, "documents": ["a number", "a city"]}),
    "classification": ("classify", {"input": QUESTION}),
}


def example(base_url: str, model: str, read_key: str, ca: str | None, task: str = "chat") -> str:
    path, content = _REQUESTS[task]
    body = {"model": model, **content}
    trust = f"--cacert {shlex.quote(ca)} " if ca else ""
    # curl reads the header from stdin, because every user on this machine can read argv.
    return (
        f"{read_key} | sed 's/^/Authorization: Bearer /' | "
        f"curl -s {trust}{base_url}/{path} -H @- "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
