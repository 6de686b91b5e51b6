"""``spark-deploy key``: named API keys with limits."""

import functools
import secrets
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import click
from spark_contract.documents import to_plain

from spark_deploy.cli.changes import confirm, deploy, print_command, pyinfra_command
from spark_deploy.cli.console import Options, note, print_result, shared_options
from spark_deploy.cli.hosts import Answer, query, read_status, select_hosts
from spark_deploy.cli.settings import print_edits, remove_entry, write_values
from spark_deploy.cli.status import usage_text
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.status import HostStatus

_ACTIONS = ("add", "revoke", "list")
_KEYS = "serve.keys"
_limit_option = functools.partial(click.option, type=click.IntRange(min=1), metavar="N")


@click.command
@click.argument("action", type=click.Choice(_ACTIONS), metavar="|".join(_ACTIONS))
@click.argument("name", metavar="[NAME]", required=False, default="")
@_limit_option("--concurrent", "max_concurrent", help="Maximum concurrent requests.")
@_limit_option("--per-minute", "max_requests_per_min", help="Average requests per minute.")
@_limit_option("--body-mib", "max_body_mib", help="Maximum size of a request body in MiB.")
@_limit_option("--output-tokens", "max_output_tokens", help="Maximum output tokens per request.")
@shared_options(changes=True)
def key(options: Options, action: str, name: str, **limits: int | None) -> int:
    if action == "list":
        if name:  # the argument after `list` is a host name
            options = replace(options, limit=[*options.limit, name])
        return _print_keys(options)
    if not name:
        fix = f"add a name, for example `key {action} anna`"
        raise SparkError.single(f"key {action}", "no name given", fix)
    if action == "add":
        given_limits = {field: value for field, value in limits.items() if value is not None}
        return _add(options, name, given_limits)
    return _revoke(options, name)


def _add(options: Options, name: str, limits: dict[str, int]) -> int:
    selected = select_hosts(options, must_serve=False)
    all_hosts = select_hosts(replace(options, limit=[], exclude=[]), must_serve=False)
    if any(name in host.settings.serve.keys for host in all_hosts):
        fix = f"choose another name, or first run `spark-deploy key revoke {name}`"
        raise SparkError.single(f"key {name}", "already exists", fix)
    token = f"sk-{secrets.token_urlsafe(32)}"
    values = {f"{_KEYS}.{name}": {"sha256": sha256(token.encode()).hexdigest(), **limits}}
    write = functools.partial(write_values, selected, all_hosts, values, label=f"key add {name}")
    edits = write(dry=True)
    if options.dry:
        print_edits(options, edits, [host.name for host in selected])
        return 0
    confirm(options, f"{', '.join(host.name for host in selected)}: accept a new key {name}?")
    write(dry=False)
    note(f"API key for {name} (this command prints it only once):")
    print_result(options, {"name": name, "key": token}, [[token]])
    return _apply(options)


def _revoke(options: Options, name: str) -> int:
    if options.limit or options.exclude:
        problem = "always applies to all hosts"
        raise SparkError.single("key revoke", problem, "remove the host names")
    hosts = select_hosts(options, must_serve=False)
    root = hosts[0].loaded.root
    files = remove_entry(root, _KEYS, name, dry=True)
    if not files:
        key_names = sorted({key for host in hosts for key in host.settings.serve.keys})
        fix = f"choose from: {', '.join(key_names)}" if key_names else "run `spark-deploy key list`"
        raise SparkError.single(f"key revoke {name}", "no settings file contains this key", fix)
    for file in files:
        note(f"{file}: will remove {_KEYS}.{name}")
    if options.dry:
        note("no changes made")
        return 0
    confirm(options, f"{', '.join(host.name for host in hosts)}: reject the key {name} at once?")
    remove_entry(root, _KEYS, name, dry=False)
    return _apply(options)


def _apply(options: Options) -> int:
    """Deploy the named keys from the changed settings; do not print to standard output."""
    hosts = select_hosts(options, must_serve=False)
    print_command(pyinfra_command("key", options, [host.name for host in hosts], ["-y"]))
    code = deploy("key", hosts, replace(options, json=True))
    if code:
        note("failed hosts keep their previous keys; fix these hosts, then run `spark-deploy up`")
    return code


def _print_keys(options: Options) -> int:
    answers = query(select_hosts(options, must_serve=False), read_status)
    data = [{**answer.data(), "keys": _keys(answer)} for answer in answers]
    print_result(options, data, map(_lines, data), separator="\n")
    return 0 if all(answer.value for answer in answers) else 1


def _keys(answer: Answer[HostStatus]) -> dict[str, Any]:
    usage = answer.value.usage() if answer.value else {}
    keys = answer.host.settings.serve.keys
    return {
        name: {**to_plain(key), "usage": to_plain(usage.get(name))} for name, key in keys.items()
    }


def _lines(host: dict[str, Any]) -> Iterator[str]:
    heading = "named keys" if host["keys"] else "no named keys"
    yield f"{host['host']}: {host['problem'] or heading}"
    for name, key in host["keys"].items():
        limits = [f"{key[field]} {unit}" for field, unit in _UNITS.items() if key[field]]
        usage = usage_text(key["usage"]) if key["usage"] else "not used"
        yield f"  {name:<12} {', '.join(limits) or 'no limits'}; {usage}"


_UNITS = {
    "max_concurrent": "concurrent",
    "max_requests_per_min": "per minute",
    "max_body_mib": "MiB per body",
    "max_output_tokens": "output tokens per request",
}
