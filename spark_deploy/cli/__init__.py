"""``spark-deploy``: looking, locking, stopping and starting; pyinfra changes everything else."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

COMMANDS = {
    "plan": "print what a deploy would make of each host; no host is touched",
    "lock": "look up the commits and digests behind the names in use and write them down",
    "inspect": "print what a repository holds and which models it would do for, by headers alone",
    "manifest": "list everything of ours on each host, by its own word",
    "status": "show what each host serves, how well it is proven and what differs from the plan",
    "doctor": "look at hosts without changing them and say what speaks against a deploy",
    "stop": "take hosts out of service until someone starts them; reboots and deploys respect it",
    "start": "put stopped hosts back into service with their last proven release",
    "bench": "measure what hosts serve, through their gateways; --compare puts results together",
    "logs": "what engines, gateways, watches and jobs print; -f goes on as lines come",
    "top": "what each host is doing now: requests, tok/s, acceptance, cache, memory, heat",
    "uninstall": "take this project off hosts; prints the pyinfra line that it runs",
    "connect": "show how to talk to each server: URL, model name, key; no host is touched",
}
# What they take beside hosts stands in their own modules.
_WITH_OPTIONS = ("bench", "inspect", "logs", "top", "uninstall")
_HOST_COMMANDS = {"status", "doctor", "stop", "start", "manifest"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 fine, 1 something is wrong, 2 bad usage)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(words).parse_args(words)
    if options.command in _HOST_COMMANDS and not getattr(options, "planned", False):
        # Hosts are asked at the same time; must happen before anything opens a socket.
        from gevent import monkey

        monkey.patch_all()
    from spark_deploy.errors import SparkError

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Answers carry the reasons of failed connections; pyinfra would say them a second time.
    logging.getLogger("pyinfra").setLevel(logging.CRITICAL)
    room = "stop" if options.command == "start" else options.command
    module = importlib.import_module(f"spark_deploy.cli.{room}")
    try:
        return int(module.run(options))
    except SparkError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `spark-deploy plan | head`
        sys.stderr.close()
        return 1


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spark-deploy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name in _WITH_OPTIONS and name in words:  # imports may open sockets: see main
            importlib.import_module(f"spark_deploy.cli.{name}").add_options(command)
        _hosts(command)
        if name == "plan":
            command.add_argument(
                "--estimate",
                action="store_true",
                help="ask no hub: sizes from the architecture, identities left open",
            )
        if name == "manifest":
            command.add_argument(
                "--planned", action="store_true", help="what a deploy would own; asks no host"
            )
        if name == "lock":
            command.add_argument(
                "--update",
                metavar="NAME",
                nargs="*",
                help="look up these names anew; without a name all of them",
            )
            command.add_argument("--check", action="store_true", help="write nothing; 1 if missing")
        else:
            command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _hosts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "inventory", nargs="?", help="inventory file (default: inventory/spark.py)"
    )
    command.add_argument("--inventory", dest="inventory_option", metavar="FILE", help="the same")
    command.add_argument("--limit", "--host", action="append", default=[], metavar="NAME")
    command.add_argument("--exclude", action="append", default=[], metavar="NAME")
    command.add_argument("--model", help="plan with this model instead")
    command.add_argument("--profile", help="plan with this profile instead")
    command.add_argument("--data", action="append", default=[], metavar="KEY=VALUE")
