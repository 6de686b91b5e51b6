"""``spark-deploy``: the command line. A command is a line here and a click command in a module."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

import click

from spark_deploy.config.documents.shown import shown

SECTIONS = {
    "Set up": {
        "init": "Create a folder for your hosts and settings.",
        "up": "Deploy: make hosts serve what the settings say.",
    },
    "Change": {
        "use": "Select another model or profile in your settings files.",
        "stop": "Stop serving, across reboots and deploys, until start.",
        "start": "Start the last proven release of stopped hosts.",
        "rollback": "Return to the previous release.",
        "prune": "Remove files and images that no kept release needs.",
        "rotate-key": "Create a new API key and reject the old one.",
        "uninstall": "Remove this project from hosts.",
        "fabric": "Configure or measure the links between hosts.",
    },
    "Inspect": {
        "plan": "Print what a deploy would create; change no host.",
        "status": "Show releases, checks and differences from the plan.",
        "doctor": "Check what a deploy would refuse; change nothing.",
        "connect": "Print URL, model name and client setup.",
        "top": "Show requests, tok/s, cache, memory and temperature.",
        "logs": "Print logs of engines, gateways and jobs, merged.",
        "bench": "Benchmark servers through their gateways; compare results.",
    },
    "Models and files": {
        "update": "Lock new commits and image digests.",
        "settings": "Print all settings with defaults and descriptions.",
        "add": "Add a model from a repository, shared file or recipe.",
        "share": "Write a model, its profile and lock to one file.",
    },
}
COMMANDS = {name: text for commands in SECTIONS.values() for name, text in commands.items()}
_MODULES = {
    "start": "stop",
    **dict.fromkeys(("rollback", "prune", "rotate-key", "uninstall", "fabric"), "run_pyinfra"),
}
_ABOUT = "Turn NVIDIA DGX Sparks into proven model servers."
_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 fine, 1 something is wrong, 2 bad usage)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _have_streams()
    try:
        code = _called(words)
        sys.stdout.flush()
    except OSError as error:
        return _failed(error)
    return code


def _failed(error: OSError) -> int:
    """Say which place could not be read or written.

    Raises:
        OSError: it is about no place, so somebody has to read where it comes from.
    """
    where = error.filename
    if where is None and error.errno in _OF_OUTPUT:
        where = "output"
        # What is left of it is tried again at the end, and would be told without these words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if where is None or error.strerror is None:
        raise error
    if not isinstance(error, BrokenPipeError):  # `spark-deploy plan | head`
        click.secho(shown(f"{where}: {error.strerror}"), fg="red", err=True)
        fix = "name a place that can be read and written, or mend that one"
        if where == "ssh":
            fix = "install the client of OpenSSH: apt-get install openssh-client"
        click.echo(f"  fix: {fix}", err=True)
    return 1


def _have_streams() -> None:
    """Open what whoever started this closed, and let no character be too much for a terminal."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # What is started from here gets it, too.
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _called(words: list[str]) -> int:
    try:
        called = GROUP.main(words, "spark-deploy", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    if not callable(called):  # --help, --version: printed already
        return int(called or 0)
    return _run(called)


def _run(command: Callable[[], int]) -> int:
    from spark_deploy.config.errors import SparkError

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Answers carry the reasons of failed connections; pyinfra would say them a second time.
    logging.getLogger("pyinfra").setLevel(logging.CRITICAL)
    try:
        return command()
    except SparkError as error:
        from spark_deploy.cli.terminal import tell_problem

        for problem in error.problems:
            tell_problem(problem)
        return 1
    except click.Abort:
        print("\nstopped; nothing was changed", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("\ninterrupted; work already started on hosts continues", file=sys.stderr)
        return 130


def _queries_hosts(name: str, words: Sequence[str]) -> bool:
    """Whether a command queries hosts over pyinfra's connections."""
    if "--help" in words:
        return False
    if name in ("plan", "update"):
        return "--on-host" in words or "--counted" in words
    if name in ("status", "share"):
        return "--planned" not in words and "--unasked" not in words
    return name in ("up", "doctor", "stop", "start")


class _Group(click.Group):
    """Imports the module of a command when it is needed, so that ``--help`` loads nothing else."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"spark_deploy.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        command.help = COMMANDS[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the named command; an unknown name gets a suggestion."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            guess = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {guess[0]}?" if guess else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        if args and not ctx.resilient_parsing and _queries_hosts(args[0], args[1:]):
            # Hosts are queried in parallel; gevent must patch before anything imports ssl.
            from gevent import hub, monkey

            monkey.patch_all()
            hub.Hub.NOT_ERROR += (KeyboardInterrupt,)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl(list(commands.items()))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dgx-spark-deploy")
    except PackageNotFoundError:
        return "unknown: not installed"


def _say_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"spark-deploy {_version()}")
        context.exit()


GROUP = _Group(
    "spark-deploy",
    help=_ABOUT,
    params=[
        click.Option(
            ["--version"], is_flag=True, expose_value=False, is_eager=True, callback=_say_version,
            help="Print the version and exit.",
        )
    ],
    no_args_is_help=True,
)  # fmt: skip
