"""``spark-deploy connect`` and ``ask``: connection data and client setup; answer a question.

The output contains a command that reads the key instead of the key itself. The key therefore does
not appear in shell histories, argv or files.
"""

import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import click
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench.host import Login, is_open, open_tunnel, tunnel_argv
from spark_deploy.bench.protocols import Endpoint, measure_answer
from spark_deploy.cli.clients import (
    CLIENTS,
    EXPORT_KEY,
    ROUTERS,
    Connection,
    connection_lines,
    example,
)
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
from spark_deploy.config.catalog.model import HybridModel, PlainModel
from spark_deploy.config.errors import SparkError, one_line, printable, unreachable
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.certificates import ca_path
from spark_deploy.hosts.gateway import TailnetAddress
from spark_deploy.inventory.connections import ssh_reason
from spark_deploy.inventory.host_keys import CONNECT_TIMEOUT_S
from spark_deploy.inventory.plans import read_inventory
from spark_deploy.plan.gateway import CONTAINER_NAME, LOOPBACK, base_urls, gateway_plan, url
from spark_deploy.plan.kv_cache import context_tokens
from spark_deploy.plan.resolve import model_and_profile

_POLL_S = 0.5
_DEFAULT_SSH_PORT = 22
_PORT_FIX = "stop the program that uses this port, then run the command again"


@click.command
@click.option(
    "--for",
    "client",
    type=click.Choice([*CLIENTS, *ROUTERS]),
    help="Print the setup of this client.",
)
@service_option("Use this service instead of the main one.")
@click.option("--tunnel", is_flag=True, help="Keep SSH tunnels open until Ctrl-C.")
@shared_options()
def connect(options: Options, client: str | None, service: str | None, tunnel: bool) -> int:
    flags = {"--for": client, "--tunnel": tunnel, "--json": options.json}
    given = [name for name, value in flags.items() if value]
    if len(given) > 1:
        raise SparkError.single(" and ".join(given), "cannot be combined", f"remove {given[1]}")
    hosts = hosts_for_clients(select_hosts(options, must_serve=False), options, service)
    servers = make_connections(hosts, options, service)
    if client in ROUTERS:
        _print_router(options, client, service, hosts, servers)
    elif client:
        _print_client(options, client, service, hosts, servers)
    elif tunnel:
        _keep_tunnels_open([server for server in servers if server.tunnel])
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
        problem = f"is a worker of a cluster; only the head {head} serves clients"
        fix = f"run `{next_command(options, 'connect', head)}`"
        raise SparkError.single(hosts[0].name, problem, fix)
    return answering


def _head_name(host: Target) -> str:
    members = host.settings.cluster.hosts
    return members[0] if members else host.name


def make_connections(
    hosts: list[Target], options: Options, service: str | None = None
) -> list[Connection]:
    tailnet_addresses = _tailnet_addresses(hosts)
    names = list(read_inventory(inventory_path(options), data=list(options.data), must_serve=False))
    return [
        make_connection(host, tailnet_addresses.get(host.name), names.index(host.name), service)
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
    options: Options, name: str, service: str | None, hosts: list[Target], servers: list[Connection]
) -> None:
    if len(servers) != 1:
        problem = f"{len(servers)} hosts selected: {', '.join(server.host for server in servers)}"
        raise SparkError.single(f"--for {name}", problem, "select one host")
    server = servers[0]
    instructions, render = CLIENTS[name]
    if name in EXPORT_KEY:  # a shell would ignore a failed read and export an empty key
        make_login(hosts[0]).run(f"cat {server.key_path} > /dev/null")
    print("\n".join(render(server)))
    argv = ["connect", server.host, *(["--service", service] if service else [])]
    command = next_command(options, *argv, "--for", name)
    note(f"use      {instructions.replace('THIS', command)}")
    if server.tunnel:
        note(f"tunnel   in another terminal: {next_command(options, *argv, '--tunnel')}")


def _print_router(
    options: Options, name: str, service: str | None, hosts: list[Target], servers: list[Connection]
) -> None:
    if service is None:  # the main gateway accepts the model names of all services
        servers = [
            replace(server, names=tuple(_all_model_names(host.settings)))
            for server, host in zip(servers, hosts, strict=True)
        ]
    instructions, render = ROUTERS[name]
    print("\n".join(render(servers)))
    note(f"use      {instructions}")
    if any(server.tunnel for server in servers):
        note(f"tunnels  in another terminal: {next_command(options, 'connect', '--tunnel')}")


def _all_model_names(main: Settings) -> Iterator[str]:
    for settings in (main, *map(main.service_settings, main.services)):
        yield from settings.serve.names_of(settings.model)


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
        plan = replace(plan, address=tailnet_address)
    names = settings.serve.names_of(settings.model)
    local = host.name.startswith("@")
    login = [] if local else ssh_command(host)
    sudo = ["sudo"] if host.data["_sudo"] else []
    read_key = shlex.join([*login, *sudo, "cat", plan.settings.key_path])
    urls = base_urls(plan)
    # The last URL has the most clients, unless only this host can use it or the address is unknown.
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
    """Yield the server's endpoint, including the API key; open a tunnel if needed."""
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
    # Without it, ssh waits forever for a host that accepts connections but does not answer.
    argv = () if local else ssh_command(host, "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S:.0f}")
    return Login(host.name, tuple(argv), bool(host.data["_sudo"]))


def ssh_command(host: Target, *options: str) -> list[str]:
    data = host.data
    argv = ["ssh", *options]
    for flag, key in (("-F", "ssh_config_file"), ("-i", "ssh_key"), ("-p", "ssh_port")):
        if data.get(key) not in (None, _DEFAULT_SSH_PORT):
            argv += [flag, str(data[key])]
    if data.get("ssh_known_hosts_file"):
        argv += ["-o", f"UserKnownHostsFile={data['ssh_known_hosts_file']}"]
    user = f"{data['ssh_user']}@" if data.get("ssh_user") else ""
    return [*argv, f"{user}{data.get('ssh_hostname', host.name)}"]


def _keep_tunnels_open(servers: Sequence[Connection]) -> None:
    """Keep the tunnels open until Ctrl-C or a failure; print the URL of each open tunnel."""
    if not servers:
        fix = "run `spark-deploy connect` without --tunnel"
        raise SparkError.single("--tunnel", "these hosts need no tunnel", fix)
    # Without this handler, Ctrl-C could interrupt between the start and registration of a tunnel.
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    with ExitStack() as stack:
        running: dict[Connection, subprocess.Popen[str]] = {}
        for server in servers:
            port = _local_port(server)
            if is_open(port):
                problem = f"port {port} is in use on this machine"
                raise SparkError.single(server.host, problem, _PORT_FIX)
            process = running[server] = subprocess.Popen(
                shlex.split(server.tunnel or ""),
                stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(process.wait, timeout=20)
            stack.callback(process.terminate)
        note("tunnels stay open until Ctrl-C")
        opening = list(servers)
        while True:
            time.sleep(_POLL_S)
            if interrupts:  # the tunnels have also received the signal
                note("")
                return
            for server, process in running.items():
                if process.poll() is not None:
                    raise _tunnel_error(server.host, process)
                if server in opening and is_open(_local_port(server)):
                    opening.remove(server)
                    note(f"{server.host}: {server.base_url}")


def _local_port(server: Connection) -> int:
    return urlsplit(server.base_url).port or server.port


def _tunnel_error(name: str, process: subprocess.Popen[str]) -> SparkError:
    output = process.stderr.read() if process.stderr else ""
    if reason := ssh_reason(output):
        return SparkError([unreachable(name, *reason)])
    problem = f"tunnel ended with exit code {process.returncode}: {one_line(output)}"
    return SparkError.single(name, problem, _PORT_FIX)


@click.command
@click.argument("question")
@service_option("Use this service instead of the main one.")
@click.option(
    "--tokens",
    default=2048,
    type=click.IntRange(min=1),
    help="Maximum number of tokens to generate.",
)
@shared_options()
def ask(options: Options, question: str, service: str | None, tokens: int) -> int:
    hosts = hosts_for_clients(select_hosts(options, must_serve=False), options, service)
    results = []
    for target in hosts:
        task = make_connection(target, service=service).task
        if task != "chat":
            command = next_command(options, "connect", target.name)
            fix = f"run `{command}` and send the request that it prints"
            problem = f"the model is a {task} model, not a chat model"
            raise SparkError.single(target.name, problem, fix)
        if len(hosts) > 1 and not options.json:
            print(f"{target.name}:")
        results.append(ask_host(target, question, service, tokens, print_answer=not options.json))
    if options.json:
        print_result(options, results, ())
    return 0


def ask_host(
    target: Target, question: str, service: str | None, tokens: int, *, print_answer: bool
) -> dict[str, Any]:
    """Ask a host through its gateway; with ``print_answer``, print the answer as it arrives.

    Raises SparkError if the connection fails or the answer is incomplete.
    """
    pieces: list[str] = []
    reasoning_seen = False

    def show(piece: str, is_reasoning: bool) -> None:
        nonlocal reasoning_seen
        if is_reasoning:
            if print_answer and not reasoning_seen:
                note("the model is thinking before it answers ...")
            reasoning_seen = True
            return
        if not pieces:  # models put empty lines between reasoning and answer
            piece = piece.lstrip()
        if not piece:
            return
        pieces.append(piece)
        if print_answer:
            print(printable(piece), end="", flush=True)

    with open_endpoint(target, service) as endpoint:
        answer = measure_answer(endpoint, question, tokens, temperature=None, show=show)
    text = "".join(pieces)
    if print_answer:
        print()
        if not text:
            note(f"reasoning reached the limit of {tokens} tokens; add `--tokens {tokens * 4}`")
        note(
            f"{answer.completion_tokens} tokens, {answer.tokens_per_s:.1f} tok/s, "
            f"first token after {answer.first_token_s:.2f} s"
        )
    return {
        "host": target.name, "model": endpoint.model, "answer": text,
        "completion_tokens": answer.completion_tokens, "first_token_s": answer.first_token_s,
        "tokens_per_s": round(answer.tokens_per_s, 1),
    }  # fmt: skip
