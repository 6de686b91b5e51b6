"""Leave a host: note what it was before the first deploy, and take ours off it again."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract.documents import DocumentError, parse, plain
from spark_contract.host import tool
from spark_contract.host.paths import STATE_DIR
from spark_contract.work.keep import Ours, Thing

from spark_deploy.facts.machine.access import ACCOUNT_HOME
from spark_deploy.facts.memo import read
from spark_deploy.facts.service.ours import OursOnHost
from spark_deploy.operations.commands import CommandFailed, heartbeat, log_once, run
from spark_deploy.operations.host_errors import Commands, host_errors, show
from spark_deploy.operations.machine.base import HOLD_PATH, SLEEP_TARGETS, state_of
from spark_deploy.operations.machine.gpu_access import SPECIFICATION
from spark_deploy.operations.service.releases import gigabytes
from spark_deploy.payload.host_protection import COMPACTION_PATH, EARLYOOM_PATH, guarantee_files
from spark_deploy.payload.sent import sent_command, sent_tools
from spark_deploy.planning.machine import SUDOERS_PATH, BasePlan
from spark_deploy.planning.work.uninstall import wanted_of
from spark_deploy.settings.types import Settings

_TIMEOUT_S = 3600
SHOWN = 12  # names of one kind


def asked_of(settings: Settings) -> str:
    """Return, as JSON, what the host is asked about."""
    wanted = wanted_of(
        settings,
        files=(HOLD_PATH, COMPACTION_PATH, *(file.path for file in guarantee_files())),
        shared_files=(EARLYOOM_PATH, SPECIFICATION),
        masked=SLEEP_TARGETS,
        access_files=(SUDOERS_PATH, ACCOUNT_HOME),
    )
    return json.dumps(plain(wanted), sort_keys=True)


def ours_on_host(asked: str) -> Ours:
    """Ask the current host what is ours on it."""
    return read(OursOnHost, command=sent_command(tool.MANIFEST, asked), _stdin=sent_tools())


@operation()
@host_errors
def noted(plan: BasePlan, asked: str) -> Commands:
    """Have written down what the host was before us, so that an uninstall can go back to it.

    Args:
        plan: says what is read of the host.
        asked: what ``asked_of`` returned.
    """
    if STATE_DIR in state_of(plan).directories:
        host.noop("deployed to before")
        return
    yield StringCommand(sent_command(tool.NOTE, asked), _stdin=sent_tools())


@operation()
@host_errors
def uninstalled(asked: str) -> Commands:
    """Have nothing of ours on the host but what is said to stay.

    Args:
        asked: what ``asked_of`` returned.
    """
    found = ours_on_host(asked)
    for line in lines(found):
        log_once(line)
    if not any(not thing.stays for thing in found.things):
        host.noop("nothing of ours is left that may go")
        return
    yield FunctionCommand(_uninstall, [asked], {})


def _uninstall(state: State, host: Host, asked: str) -> bool:
    try:
        with heartbeat(host, "removing"):
            said = run(
                host, sent_command(tool.UNINSTALL, asked), timeout_s=_TIMEOUT_S, stdin=sent_tools()
            )
        found = parse(Ours, said[-1])
    except CommandFailed as error:
        show(host, f"{_tail(error.output)}\n  fix: see above, then run again")
        return False
    except DocumentError as error:
        show(host, f"spark-host uninstall: {error}")
        return False
    freed = sum(thing.size_bytes for thing in found.things)
    host.log(f"removed {len(found.things)} things, {gigabytes(freed)}")
    return True


def _tail(output: str) -> str:
    try:
        return "\n".join(parse(Ours, output.strip().splitlines()[-1]).problems)
    except (DocumentError, IndexError):
        return output.strip()[-2000:]


def lines(found: Ours) -> Iterator[str]:
    """Say what goes and what stays, each with its bytes, small things of a kind in one line."""
    if found.noted_at is None and found.things:
        yield "nobody noted what this host was before the first deploy: what is unknown stays"
    for kind in dict.fromkeys(thing.kind for thing in found.things):
        yield from _kind(kind, [thing for thing in found.things if thing.kind == kind])
    freed = sum(thing.size_bytes for thing in found.things if not thing.stays)
    left = sum(thing.size_bytes for thing in found.things if thing.stays)
    yield f"goes  {gigabytes(freed)} in all; stays {gigabytes(left)}"


def _kind(kind: str, things: list[Thing]) -> Iterator[str]:
    going = [thing for thing in things if not thing.stays]
    if going:
        size = sum(thing.size_bytes for thing in going)
        names = [thing.name for thing in going]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"goes  {_size(size)} {kind:<13} {', '.join(names[:SHOWN])}{more}"
    for why in dict.fromkeys(thing.stays for thing in things if thing.stays):
        same = [thing for thing in things if thing.stays == why]
        size = sum(thing.size_bytes for thing in same)
        yield f"stays {_size(size)} {kind:<13} {', '.join(thing.name for thing in same)}: {why}"


def _size(size_bytes: int) -> str:
    return f"{gigabytes(size_bytes) if size_bytes else '':>9}"
