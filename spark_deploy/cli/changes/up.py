"""``spark-deploy up``: from an SSH login to a proven server, and from one choice to another.

Bootstraps what needs it, says what will happen, asks once, runs exactly the pyinfra line it prints.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from pyinfra.connectors.sshuserclient.client import get_host_keys
from rich.console import Console
from rich.text import Text

from spark_deploy.cli.changes import line
from spark_deploy.cli.changes.forecast import found_on, sentence
from spark_deploy.cli.changes.screen import lay
from spark_deploy.cli.connecting.reach import reach
from spark_deploy.cli.hosts import Listed, listed, planned, say
from spark_deploy.cli.planned import lock
from spark_deploy.cli.taken import Options
from spark_deploy.errors import SparkError
from spark_deploy.inventory.contact.login import public_key
from spark_deploy.lockfile.file import read_lock
from spark_deploy.lockfile.resolve import wanted_by


def run(options: Options) -> int:
    """Bring the chosen hosts to what the settings say; the exit code is pyinfra's."""
    hosts = listed(options)
    named = [host.name for host in hosts] if options.limit or options.exclude else []
    flags = ["--dry"] if options.dry else ["-y"]
    words = line.line("up", options, named, flags)
    if code := _bootstrapped(hosts, options):
        return code
    if not options.dry:
        _lock(hosts, options)
    plans = {host.name: planned(host) for host in hosts}
    told = [sentence(plans[one.host.name], one) for one in found_on(hosts, plans)]
    if options.json:
        print(json.dumps(told, indent=1))
    else:
        console = Console(highlight=False)
        for one, host in zip(told, hosts, strict=True):
            lay(Text.assemble((host.name, "bold"), f": {one['text']}"), console)
            for warning in plans[host.name].warnings:
                lay(Text(f"  WARNING {warning}", "yellow"), console)
    if options.dry and not options.verbose:
        say("nothing was done; to see every single step, run:")
        line.show(words)
        return 0 if all(one["reachable"] for one in told) else 1
    if not options.dry:
        # Where what is served stays, something else of a host may still be mended.
        line.agreed(options, "Go on?")
    line.show(words)
    return line.watched(words, [host.name for host in hosts], options)


def _bootstrapped(hosts: Sequence[Listed], options: Options) -> int:
    """Install key and sudo rule where they are missing; asks for the password, once.

    Raises:
        SparkError: no host can be reached, or one does not know our key and nobody shall ask, or
            there is no key to let in.
    """
    found = reach(hosts)
    if found.silent and len(found.silent) == len(hosts):
        raise SparkError(list(found.problems()))
    if not found.closed:
        return 0
    for one in found.closed:
        if not one.is_local:
            public_key(one.key_file)  # said by itself, and not in the middle of pyinfra's words
    new = [one.host for one in found.closed]
    if options.dry:
        fix = "run `spark-deploy up` without --dry"
        raise SparkError.one(", ".join(new), "the SSH key or the sudo rule is missing", fix)
    say(f"{', '.join(new)}: key or sudo rule is missing; the password is asked for once")
    words = line.line("bootstrap", options, new, ["-y"])
    line.show(words)
    code = subprocess.run(line.argv(words), check=False).returncode
    get_host_keys.cache.clear()  # what was just recorded counts from now on
    return code


def _lock(hosts: Sequence[Listed], options: Options) -> None:
    """Write down what names stand for, so that what is said is what is done."""
    missing = (
        wanted_by(host.settings.settings, host.catalog).missing_in(
            read_lock(host.settings.lock_path)
        )
        for host in hosts
    )
    if any(one.names for one in missing):
        lock.lock_missing(options)
