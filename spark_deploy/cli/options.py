"""What a command is: what it takes on its command line, in click's words, and was called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import yaml

from spark_deploy.config.checkout import catalog_names


class Options(SimpleNamespace):
    """What a command was called with: one attribute for each option, by its long name.

    Commands about hosts have ``inventory``, ``limit``, ``exclude``, ``model``, ``profile`` and
    ``data``; those that take no model or profile have ``None`` there.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """One command of the table."""

    section: str
    does: str  # for --help: plain words, without markup
    takes: tuple[click.Parameter, ...] = ()
    module: str | None = None  # below spark_deploy.cli; None: named as the command
    # Whether it asks hosts over pyinfra's connections: gevent must come before any socket.
    asks: Callable[[Options], bool] = lambda options: False
    about_hosts: bool = True  # takes hosts, an inventory and settings
    plans: bool = False  # may be told of another model or profile than the settings choose


def always(_options: Options) -> bool:
    """Every time."""
    return True


class Several(click.Option):
    """An option that takes all words up to the next option: ``--compare a.json b.json``."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__([name], multiple=True, **more)


# Shells complete them; what cannot be read is told where it is read.
FILE = click.Path(readable=False)
FOLDER = click.Path(file_okay=False, readable=False)


def option(name: str, does: str, **more: Any) -> click.Option:
    """Return an option with a value."""
    return click.Option([name], help=does, **more)


def file_option(name: str, does: str) -> click.Option:
    """Return an option whose value is a file, which shells complete."""
    return option(name, does, metavar="FILE", type=FILE)


def flag(name: str, does: str, *also: str) -> click.Option:
    """Return an option without a value."""
    return click.Option([*also, name], is_flag=True, help=does)


def names_of(*kinds: str) -> Callable[..., list[str]]:
    """Return what completes names of models or profiles; with models also MODEL/PROFILE."""

    def names(_context: click.Context, _option: click.Parameter, begun: str) -> list[str]:
        model, slash, _ = begun.partition("/")
        if slash and "models" in kinds:
            known = [f"{model}/{name}" for name in catalog_names("profiles", own=Path.cwd())]
        else:
            known = [name for kind in kinds for name in catalog_names(kind, own=Path.cwd())]
        return [name for name in known if name.startswith(begun)]

    return names


def host_names(_context: click.Context, _option: click.Parameter, begun: str) -> list[str]:
    """Complete the hosts of this folder; a list that cannot be read is told by the command."""
    try:
        listed = list(yaml.safe_load(Path("hosts.yml").read_bytes())["hosts"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return []
    return [name for name in map(str, listed) if name.startswith(begun)]


def name_option(name: str, does: str) -> click.Option:
    """Return ``--model`` or ``--profile``."""
    return option(
        name, does, metavar="NAME", shell_complete=names_of(f"{name.removeprefix('--')}s")
    )


def plan_options() -> list[click.Parameter]:
    """Return what commands take that plan."""
    return [
        name_option("--model", "Plan with this model instead."),
        name_option("--profile", "Plan with this profile instead."),
    ]


def host_options() -> list[click.Parameter]:
    """Return what every command about hosts takes."""
    return [
        click.Argument(["words"], nargs=-1, metavar="[HOST]...", shell_complete=host_names),
        file_option("--inventory", "Inventory file; else inventory/spark.py."),
        click.Option(
            ["--limit", "--host", "limit"], multiple=True, metavar="NAME",
            help="Only these hosts or groups; the same as naming them.",
            shell_complete=host_names,
        ),
        option(
            "--exclude", "All hosts but these.", multiple=True, metavar="NAME",
            shell_complete=host_names,
        ),
        option("--data", "Any setting, for this run alone.", multiple=True, metavar="KEY=VALUE"),
    ]  # fmt: skip


def service_option(does: str) -> click.Option:
    """Return the option of commands that are about one service of a host."""
    return option("--service", does, metavar="NAME")


def json_option() -> click.Option:
    """Return the option that every command with an answer takes."""
    return flag("--json", "Print the answer as JSON.")


_COUNT = click.IntRange(min=1)
BENCH = (
    option("--out", "Folder of the results.", metavar="DIR", default="bench", type=FOLDER),
    option(
        "--protocol",
        "Measure by these alone; else by all that are there.",
        multiple=True,
        type=click.Choice(["seeds", "llama-benchy", "vllm-bench"]),
    ),
    service_option("This one of its services; else the main one."),
    Several(
        "--compare",
        metavar="FILE...",
        help="Put results beside each other; asks no host.",
        type=FILE,
    ),
    Several("--depths", type=click.IntRange(min=0), metavar="N...", help="Depths of llama-benchy."),
    Several("--clients", type=_COUNT, metavar="N...", help="Numbers of concurrent clients."),
    option("--pp", "Tokens of its prompts; else its own default.", type=_COUNT, metavar="N"),
    option("--tg", "Tokens of its answers; else its own default.", type=_COUNT, metavar="N"),
    option("--runs", "How often it measures; else its own default.", type=_COUNT, metavar="N"),
    flag("--ladder", "Serve and measure the published stages one after the other, then go back."),
    flag("--yes", "Ask nothing; it asks only before a ladder.", "-y"),
    option("--book-url", "The text that llama-benchy makes prompts of.", metavar="URL"),
)

# Of commands that run a deploy.
CHANGE = (
    flag("--dry", "Say what would change, do nothing."),
    flag("--yes", "Ask nothing.", "-y"),
    flag("--verbose", "Show all that pyinfra says.", "-v"),
)
