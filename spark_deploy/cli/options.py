"""Options that commands share, as click decorators, and the object that carries them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from spark_deploy.config.checkout import catalog_names

# For shell completion; commands report unreadable files themselves.
FILE = click.Path(readable=False)
FOLDER = click.Path(file_okay=False, readable=False)


@dataclass(slots=True)
class Options:
    """Shared options; those that a command does not declare keep their defaults."""

    inventory: str | None = None
    limit: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    model: str | None = None
    profile: str | None = None
    json: bool = False
    dry: bool = False
    yes: bool = False
    verbose: bool = False


def shared_options(
    *, hosts: bool = True, plans: bool = False, changes: bool = False
) -> Callable[[Callable[..., int]], Callable[..., Any]]:
    """Add ``--json`` and other shared options; passed as the first argument of the command.

    The command runs after the end of click's context: an inventory has a separate context.

    Args:
        hosts: hosts, an inventory and ``--data``.
        plans: ``--model`` and ``--profile``.
        changes: ``--dry``, ``--yes`` and ``--verbose``.
    """

    def decorate(run: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(run)
        def bind(**values: Any) -> Callable[[], int]:
            words = values.pop("words", ())
            shared: dict[str, Any] = {
                key: list(value) if isinstance(value, tuple) else value
                for key in Options.__slots__
                if (value := values.pop(key, None)) is not None
            }
            options = Options(**shared)
            _add_words(options, words)
            return functools.partial(run, options, **values)

        parameters = [
            *_HOSTS * hosts, *_PLANS * plans, *_CHANGES * changes,
            click.option("--json", is_flag=True, help="Print the result as JSON."),
        ]  # fmt: skip
        return functools.reduce(lambda to, add: add(to), reversed(parameters), bind)

    return decorate


def _add_words(options: Options, words: tuple[str, ...]) -> None:
    files = [word for word in words if _is_inventory(word)]
    if len(files) > 1 or (files and options.inventory):
        raise click.UsageError(f"more than one inventory: {' '.join(files)}")
    options.inventory = files[0] if files else options.inventory
    options.limit += [word for word in words if word not in files]


def _is_inventory(word: str) -> bool:
    """Whether it is an inventory instead of a host name: a file, a list, or ``@local``."""
    has_form = word.endswith(".py") or word.startswith("@") or "," in word or "/" in word
    return has_form or Path(word).is_file()


def names_of(*kinds: str) -> Callable[..., list[str]]:
    """Return a completion of ``models`` and ``profiles``; with models also MODEL/PROFILE."""

    def names(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[str]:
        model, slash, _ = incomplete.partition("/")
        if slash and "models" in kinds:
            known = [f"{model}/{name}" for name in catalog_names("profiles", own=Path.cwd())]
        else:
            known = [name for kind in kinds for name in catalog_names(kind, own=Path.cwd())]
        return [name for name in known if name.startswith(incomplete)]

    return names


def host_names(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[str]:
    """Complete the hosts of ``hosts.yml`` if it can be read."""
    try:
        hosts = list(yaml.safe_load(Path("hosts.yml").read_bytes())["hosts"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return []
    return [name for name in map(str, hosts) if name.startswith(incomplete)]


def model_option(text: str = "Plan with this model instead.") -> Callable[..., Any]:
    return click.option("--model", metavar="NAME", shell_complete=names_of("models"), help=text)


def profile_option(text: str = "Plan with this profile instead.") -> Callable[..., Any]:
    return click.option("--profile", metavar="NAME", shell_complete=names_of("profiles"), help=text)


def service_option(text: str) -> Callable[..., Any]:
    return click.option("--service", metavar="NAME", help=text)


_HOSTS = (
    click.argument("words", nargs=-1, metavar="[HOST]...", shell_complete=host_names),
    click.option(
        "--inventory", metavar="FILE", type=FILE, help="Inventory file [inventory/spark.py]."
    ),
    click.option(
        "--limit", "--host", "limit", multiple=True, metavar="NAME", shell_complete=host_names,
        help="Only these hosts or groups; same as HOST.",
    ),
    click.option(
        "--exclude", multiple=True, metavar="NAME", shell_complete=host_names,
        help="Exclude these hosts or groups.",
    ),
    click.option(
        "--data", multiple=True, metavar="KEY=VALUE", help="Set a setting for this run."
    ),
)  # fmt: skip
_PLANS = (model_option(), profile_option())
_CHANGES = (
    click.option("--dry", is_flag=True, help="Print changes, make none."),
    click.option("-y", "--yes", is_flag=True, help="Skip the confirmation."),
    click.option("-v", "--verbose", is_flag=True, help="Print pyinfra's own output."),
)
