"""``spark-deploy``: the command line, made of the table in ``commands.py``."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import click

from spark_deploy.cli.commands import COMMANDS
from spark_deploy.cli.options import (
    Entry,
    Options,
    Several,
    host_options,
    json_option,
    plan_options,
)
from spark_deploy.config.documents.shown import shown

_ABOUT = "Turn NVIDIA DGX Sparks into proven model servers: from an SSH login to answers."
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
        called = _GROUP.main(words, "spark-deploy", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    if not isinstance(called, Options):  # --help, --version: said already
        return int(called or 0)
    return _run(called)


def _run(options: Options) -> int:
    """Run a command outside of click's context: an inventory has one of its own."""
    entry = COMMANDS[options.command]
    if entry.asks(options):
        # Hosts are asked at the same time; must happen before anything opens a socket.
        from gevent import hub, monkey

        monkey.patch_all()
        hub.Hub.NOT_ERROR += (KeyboardInterrupt,)  # told below, in our own words
    from spark_deploy.config.errors import SparkError

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Answers carry the reasons of failed connections; pyinfra would say them a second time.
    logging.getLogger("pyinfra").setLevel(logging.CRITICAL)
    module = importlib.import_module(f"spark_deploy.cli.{entry.module or options.command}")
    try:
        return int(module.run(options))
    except SparkError as error:
        from spark_deploy.cli.terminal import tell_problem

        for problem in error.problems:
            tell_problem(problem)
        return 1
    except click.Abort:
        print("\nended; nothing more was done", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("\ninterrupted; what a host was told already goes on there", file=sys.stderr)
        return 130


class _Command(click.Command):
    """A command of the table; its callback hands on what it was called with."""

    def __init__(self, name: str, entry: Entry) -> None:
        more = [
            *(host_options() if entry.about_hosts else []),
            *(plan_options() if entry.plans else []),
            json_option(),
        ]
        super().__init__(
            name,
            params=[*entry.takes, *more],
            help=entry.does,
            callback=lambda **values: _options(name, entry, values),
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {word for one in self.params if isinstance(one, Several) for word in one.opts}
        return super().parse_args(ctx, list(_spread(args, several)))


def _spread(words: Iterable[str], several: set[str]) -> Iterator[str]:
    """Yield ``--depths=0 --depths=4096`` for ``--depths 0 4096``; ``--update=`` for none."""
    option, given = "", 0
    for word in [*words, "--"]:
        if word.startswith("-") and option and not given:
            yield f"{option}="
        if word in several:
            option, given = word, 0
        elif word.startswith("-"):
            option = ""
            yield word
        elif option:
            given += 1
            yield f"{option}={word}"
        else:
            yield word


def _options(name: str, entry: Entry, values: dict[str, object]) -> Options:
    found = {key: list(one) if isinstance(one, tuple) else one for key, one in values.items()}
    if entry.about_hosts:
        found = {"model": None, "profile": None, **found}
        words: list[str] = found.pop("words")  # type: ignore[assignment]  # click's, of nargs=-1
        files = [word for word in words if _is_inventory(word)]
        if len(files) > 1 or (files and found["inventory"]):
            raise click.UsageError(f"one inventory, please: {' '.join(files)}")
        found["inventory"] = files[0] if files else found["inventory"]
        limit: list[str] = found["limit"]  # type: ignore[assignment]  # click's, of multiple=True
        limit += [word for word in words if word not in files]
    return Options(command=name, **found)


def _is_inventory(word: str) -> bool:
    """Tell an inventory from the name of a host: a file, a list with commas, or this machine."""
    named_so = word.endswith(".py") or word.startswith("@")
    return named_so or "," in word or "/" in word or Path(word).is_file()


class _Group(click.Group):
    """The commands of the table, made when they are needed and listed by section."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _Command(cmd_name, COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named; one that is none gets a guess."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            guess = get_close_matches(args[0], COMMANDS, n=1)
            meant = f" Did you mean {guess[0]}?" if guess else ""
            ctx.fail(f"No such command '{args[0]}'.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, one.does) for name, one in COMMANDS.items() if one.section == section]
                )


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


_GROUP = _Group(
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
