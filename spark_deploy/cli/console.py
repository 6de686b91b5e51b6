"""Options that commands share, and output that fits the terminal width."""

import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.text import Text
from spark_contract.documents import to_plain

from spark_deploy.config.checkout import catalog_files
from spark_deploy.config.errors import Problem, printable

# Types for shell completion; commands report unreadable files themselves.
FILE = click.Path(readable=False)
FOLDER = click.Path(file_okay=False, readable=False)


@dataclass(slots=True)
class Options:
    """Shared options. Options that a command does not declare keep their defaults."""

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

    @property
    def choice(self) -> dict[str, str]:
        """Return the values of ``--model`` and ``--profile`` on the command line."""
        values = {"model": self.model, "profile": self.profile}
        return {name: value for name, value in values.items() if value is not None}


def shared_options(
    *,
    hosts: bool = True,
    plans: bool = False,
    confirms: bool = False,
    changes: bool = False,
    metavar: str = "[HOST]...",
) -> Callable[[Callable[..., int]], Callable[..., Any]]:
    """Add ``--json`` and groups of options, which the command receives as ``Options``.

    If ``metavar`` contains "=", the command also receives arguments with "=" as ``assignments``.
    """

    def decorate(run: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(run)
        def bind(**values: Any) -> Callable[[], int]:
            arguments = values.pop("words", ())
            if "=" in metavar:
                values["assignments"] = [argument for argument in arguments if "=" in argument]
                arguments = [argument for argument in arguments if "=" not in argument]
            shared: dict[str, Any] = {}
            for key in Options.__slots__:
                value = values.pop(key, None)
                if value is not None:
                    shared[key] = list(value) if isinstance(value, tuple) else value
            options = Options(**shared)
            files = [argument for argument in arguments if _is_inventory(argument)]
            if len(files) > 1 or (files and options.inventory):
                raise click.UsageError(f"more than one inventory: {' '.join(files)}")
            options.inventory = files[0] if files else options.inventory
            options.limit += [argument for argument in arguments if argument not in files]
            return functools.partial(run, options, **values)

        parameters = [
            *((_host_arguments(metavar), *_HOSTS) if hosts else ()),
            *(_PLANS if plans else ()),
            *(_CONFIRMS if confirms else ()),
            *(_CHANGES if changes else ()),
            click.option("--json", is_flag=True, help="Print the result as JSON."),
        ]
        return functools.reduce(lambda command, add: add(command), reversed(parameters), bind)

    return decorate


def _is_inventory(arg: str) -> bool:
    """Return whether an argument is an inventory: a file, a list of hosts, or ``@local``."""
    if arg.endswith(".py") or arg.startswith("@") or "," in arg or "/" in arg:
        return True
    return Path(arg).is_file()


def name_completer(*kinds: str) -> Callable[..., list[str]]:
    """Return a completer for names in the catalog; "models" includes MODEL/PROFILE."""

    def complete(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[str]:
        model, slash, _ = incomplete.partition("/")
        if slash and "models" in kinds:
            choices = [f"{model}/{name}" for name in catalog_files("profiles", user_dir=Path.cwd())]
        else:
            choices = [name for kind in kinds for name in catalog_files(kind, user_dir=Path.cwd())]
        return [name for name in choices if name.startswith(incomplete)]

    return complete


def complete_host_names(
    _context: click.Context, _option: click.Parameter, incomplete: str
) -> list[str]:
    """Suggest host names from ``hosts.yml``, or nothing if the file cannot be read."""
    try:
        hosts = list(yaml.safe_load(Path("hosts.yml").read_bytes())["hosts"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return []
    return [name for name in map(str, hosts) if name.startswith(incomplete)]


def model_option(text: str = "Plan with this model instead.") -> Callable[..., Any]:
    return click.option(
        "--model", metavar="NAME", shell_complete=name_completer("models"), help=text
    )


def profile_option(text: str = "Plan with this profile instead.") -> Callable[..., Any]:
    return click.option(
        "--profile", metavar="NAME", shell_complete=name_completer("profiles"), help=text
    )


def service_option(text: str) -> Callable[..., Any]:
    return click.option("--service", metavar="NAME", help=text)


def _host_arguments(metavar: str) -> Callable[..., Any]:
    return click.argument("words", nargs=-1, metavar=metavar, shell_complete=complete_host_names)


_HOSTS = (
    click.option(
        "--inventory", metavar="FILE", type=FILE, help="Inventory file [inventory/spark.py]."
    ),
    click.option(
        "--limit", "--host", "limit", multiple=True, metavar="NAME",
        shell_complete=complete_host_names, help="Select only these hosts or groups; same as HOST.",
    ),
    click.option(
        "--exclude", multiple=True, metavar="NAME", shell_complete=complete_host_names,
        help="Exclude these hosts or groups.",
    ),
    click.option(
        "--data", multiple=True, metavar="KEY=VALUE", help="Override a setting for this run."
    ),
)  # fmt: skip
_PLANS = (model_option(), profile_option())
_CONFIRMS = (
    click.option("--dry", is_flag=True, help="Show the changes without making them."),
    click.option("-y", "--yes", is_flag=True, help="Skip the confirmation."),
)
_CHANGES = (
    *_CONFIRMS,
    click.option("-v", "--verbose", is_flag=True, help="Print pyinfra's own output."),
)


_TITLE = re.compile(r"^(?:\S+: | *\S+(?: \S+)? {2,}| {2,})")
_COMMAND = re.compile(  # commands for a shell
    r"(?:ssh (?:-|\S+ (?:sudo|cat) )|(?:sudo )?cat /|curl -|docker run |spark-deploy |vllm serve )"
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_STYLES = {
    "REFUSED": "bold red",
    "FAILED": "bold red",
    "WARNING": "bold yellow",
    "warning": "bold yellow",
}


_DOT_COLORS = {"●": "green", "◐": "yellow", "○": "red"}  # also distinct without color


def print_result(
    options: Options, data: Any, texts: Iterable[Iterable[str]], *, separator: str = "\n\n"
) -> None:
    """Print ``data`` as JSON if requested, otherwise ``texts`` (lines per host)."""
    if options.json:
        print(json.dumps(to_plain(data), indent=1))
        return
    text = printable(separator.join("\n".join(lines) for lines in texts))
    if sys.stdout.isatty():
        print_wrapped(text.splitlines())
    elif text:
        print(text)


def print_wrapped(lines: Iterable[str], console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    for line in lines:
        for text in wrap_line(line, console.width):
            console.print(styled(text), no_wrap=True, overflow="ignore", crop=False)


def note(text: str, style: str = "") -> None:
    console = Console(stderr=True, highlight=False)
    for line in printable(text).splitlines():
        if not console.is_terminal:
            print(line, file=sys.stderr)
            continue
        for part in wrap_line(line, console.width):
            console.print(Text(part, style), no_wrap=True, overflow="ignore", crop=False)


def print_problem(problem: Problem) -> None:
    error, *fix = str(problem).splitlines()
    note(error, "red")
    note("\n".join(fix))


def wrap_line(line: str, width: int) -> list[str]:
    """Split a line at spaces, and align the following lines with the text after the title.

    If the text is a command, all lines but the last end with a backslash for the shell.
    """
    if len(line) <= width:
        return [line]
    title = _TITLE.match(line)
    title_width = len(title[0]) if title and line.startswith(" ") else 4
    indent = min(title_width, width // 2)
    is_command = bool(title and _COMMAND.match(line, title.end()))
    continuation = " \\" if is_command else ""
    lines, rest = [], line
    while len(rest) > width:
        # A line break inside quotes would become part of the argument.
        text = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), rest) if is_command else rest
        cut = text.rfind(" ", indent + 1, width + 1 - len(continuation))
        if cut <= indent:
            cut = text.find(" ", indent + 1)
        if cut < 0:
            break
        lines.append(rest[:cut].rstrip() + continuation)
        rest = " " * indent + rest[cut:].lstrip()
    return [*lines, rest] if rest.strip() else lines


def styled(line: str) -> Text:
    text = Text(line)
    if color := _DOT_COLORS.get(line[:1]):
        text.stylize(color, 0, 1)
    elif not line.startswith(" ") and ": " in line:
        text.stylize("bold", 0, line.index(": "))
    for word, style in _STYLES.items():
        if re.match(rf"\s*{word}\b", line):
            text.stylize(style, line.index(word), line.index(word) + len(word))
    return text


def short_list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} hosts"


def next_command(options: Options, *arguments: str) -> str:
    inventory = ["--inventory", str(options.inventory)] if options.inventory else []
    return shlex.join([command_path("spark-deploy"), *arguments, *inventory])


def command_path(name: str) -> str:
    """Return a program's name, or its path if the shell would start another program."""
    program = Path(sys.executable).with_name(name)
    in_path = shutil.which(name)
    is_same = in_path is not None and os.path.realpath(in_path) == os.path.realpath(program)
    return name if is_same or not program.exists() else str(program)
