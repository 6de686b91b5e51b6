"""docs/reference/commands.md: commands with options, as click declares them."""

from collections.abc import Iterator

import click

from spark_deploy.cli import GROUP

SHARED = {"inventory", "limit", "exclude", "data", "json", "model", "profile", "dry"}
CHANGING = {"dry", "yes", "verbose"}


def command_rows() -> Iterator[str]:
    yield from ("| command | does | options |", "|---|---|---|")
    context = click.Context(GROUP)
    for name in GROUP.list_commands(context):
        command = GROUP.get_command(context, name)
        assert command is not None
        changes_hosts = {option.name for option in command.params} >= CHANGING
        cells = (
            f"`{name}{_arguments(command)}`" + (" *" if changes_hosts else ""),
            str(command.help),
            "<br>".join(_options(command, changes_hosts)),
        )
        yield f"| {' | '.join(cells)} |"


def _arguments(command: click.Command) -> str:
    arguments = [part for part in command.params if isinstance(part, click.Argument)]
    names = [part.metavar or part.human_readable_name for part in arguments if part.name != "words"]
    return "".join(f" {name}" for name in names).replace("|", "\\|")


def _options(command: click.Command, changes_hosts: bool) -> Iterator[str]:
    described = SHARED | CHANGING if changes_hosts else SHARED
    for part in command.params:
        if isinstance(part, click.Option) and part.name not in described:
            metavar = f" {part.metavar}" if part.metavar else ""
            yield f"`{', '.join(part.opts)}{metavar}` {part.help}"
