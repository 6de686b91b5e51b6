"""``status --files``: everything we manage on a host, from the host or from its plan."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra.api.host import Host
from spark_contract.documents import plain
from spark_contract.keep import Ours

from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.options import Options
from spark_deploy.cli.query_hosts import Answer, query
from spark_deploy.cli.terminal import print_result
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.uninstall import (
    gigabytes,
    list_resources,
    read_resources,
    uninstall_request,
)


def run(options: Options, is_planned: bool) -> int:
    """Print the managed resources of the chosen hosts; 1 when one gave no answer."""
    if is_planned:
        plans = {host.name: build_plan(host) for host in select_hosts(options)}
        resources = {name: list_resources(plan, read_payload()) for name, plan in plans.items()}
        texts = (
            [name, *(f"  {entry.kind:<10} {entry.name}" for entry in entries)]
            for name, entries in resources.items()
        )
        print_result(options, resources, texts, between="\n")
        return 0
    answers = query(select_hosts(options, judged=False), _read)
    data = [{**one.data(), **(plain(one.value) if one.value else {})} for one in answers]
    print_result(options, data, map(_lines, answers))
    return 0 if all(one.value is not None for one in answers) else 1


def _read(_host: Host, host: Target) -> Ours:
    return read_resources(uninstall_request(host.settings.settings))


def _lines(answer_of: Answer[Ours]) -> Iterator[str]:
    name, resources = answer_of.host.name, answer_of.value
    if resources is None:
        yield f"{name}: {answer_of.problem}"
        return
    things = resources.things
    total = gigabytes(sum(thing.size_bytes for thing in things))
    baseline = f"at {resources.noted_at}" if resources.noted_at else "never"
    summary = f"{len(things)} resources, {total}; baseline recorded: {baseline}"
    yield f"{name}: {summary if things else 'no managed resources'}"
    for thing in things:
        size = gigabytes(thing.size_bytes) if thing.size_bytes else ""
        why = f"  ({thing.stays})" if thing.stays else ""
        yield f"  {size:>9}  {thing.kind:<13} {thing.name}{why}"
