"""``spark-deploy manifest``: everything of ours on each host, by the host's own word."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra.api.host import Host
from spark_contract.documents import plain
from spark_contract.keep import Ours

from spark_deploy.cli.hosts import Listed, answer, listed, planned
from spark_deploy.cli.options import Options
from spark_deploy.cli.query_hosts import Answer, look, plain_answer
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.uninstall import (
    gigabytes,
    list_resources,
    read_resources,
    uninstall_request,
)


def run(options: Options) -> int:
    """Print what is ours on the chosen hosts; 1 when one gave no answer."""
    if options.planned:
        return _planned(options)
    answers = look(listed(options, judged=False), _ask)
    found = [{**plain_answer(one), **(plain(one.value) if one.value else {})} for one in answers]
    answer(options, found, (_shown(one) for one in answers))
    return 0 if all(one.value is not None for one in answers) else 1


def _ask(host: Host, one: Listed) -> Ours:
    return read_resources(uninstall_request(one.settings.settings))


def _shown(one: Answer[Ours]) -> Iterator[str]:
    found = one.value
    if found is None:
        yield f"{one.host.name}: {one.problem}"
        return
    total = gigabytes(sum(thing.size_bytes for thing in found.things))
    noted = f"at {found.noted_at}" if found.noted_at else "never"
    ours = f"{len(found.things)} things, {total}; what it was before was noted: {noted}"
    yield f"{one.host.name}: {ours if found.things else 'nothing of ours'}"
    for thing in found.things:
        size = gigabytes(thing.size_bytes) if thing.size_bytes else ""
        why = f"  ({thing.stays})" if thing.stays else ""
        yield f"  {size:>9}  {thing.kind:<13} {thing.name}{why}"


def _planned(options: Options) -> int:
    found = {host.name: list_resources(planned(host), read_payload()) for host in listed(options)}
    texts = (
        [name, *(f"  {entry.kind:<10} {entry.name}" for entry in owned)]
        for name, owned in found.items()
    )
    answer(options, found, texts, between="\n")
    return 0
