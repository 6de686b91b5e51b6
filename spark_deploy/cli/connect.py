"""``spark-deploy connect``: how to talk to each server, from the settings alone."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from spark_deploy.cli.hosts import Listed, listed
from spark_deploy.settings_types import Settings


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything a client needs for one server."""

    host: str
    base_url: str
    model: str
    names: tuple[str, ...]
    key_path: str
    tunnel: str | None  # a command that makes base_url work from here
    read_key: str  # a command that prints the key
    example: str


def run(options: argparse.Namespace) -> int:
    """Print how to talk to the chosen hosts."""
    found = [connection_of(host) for host in listed(options)]
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        print("\n\n".join("\n".join(lines(one)) for one in found))
    return 0


def connection_of(host: Listed) -> Connection:
    """Return what a client needs for ``host``."""
    settings = host.settings.settings
    names = settings.serve.names or (settings.model,)
    port = settings.serve.port
    local = host.name.startswith("@")
    inside = settings.serve.expose != "lan"
    address = "127.0.0.1" if inside or local else host.data.get("ssh_hostname", host.name)
    base_url = f"http://{address}:{port}/v1"
    key_path = f"{settings.paths.config_dir}/api-key"
    login = [] if local else ssh_command(host)
    read_key = shlex.join([*login, *_sudo(settings), "cat", key_path])
    tunnel = [*login[:1], "-N", "-L", f"{port}:127.0.0.1:{port}", *login[1:]]
    return Connection(
        host=host.name,
        base_url=base_url,
        model=names[0],
        names=tuple(names),
        key_path=key_path,
        tunnel=shlex.join(tunnel) if inside and not local else None,
        read_key=read_key,
        example=_example(base_url, names[0], read_key),
    )


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
    yield f"  base URL  {one.base_url}"
    yield f"  model     {one.model}{also}"
    yield f"  API key   {one.key_path} on the host; print it with: {one.read_key}"
    if one.tunnel:
        yield f"  from here {one.tunnel}"
    yield f"  try       {one.example}"


def _sudo(settings: Settings) -> list[str]:
    return ["sudo"] if settings.sudo else []


def _example(base_url: str, model: str, read_key: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "What is 7823 * 4519?"}]}
    return (
        f'curl -s {base_url}/chat/completions -H "Authorization: Bearer $({read_key})" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
