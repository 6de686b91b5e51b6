"""Output of commands: results, notes and problems within the width of the terminal."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from spark_contract.documents import plain

from spark_deploy.cli.options import Options
from spark_deploy.config.errors import Problem
from spark_deploy.config.printable import shown

_TITLE = re.compile(r"^(?:\S+: | *\S+(?: \S+)? {2,}| {2,})")
_COMMAND = re.compile(  # to be copied into a shell
    r"(?:ssh (?:-|\S+ (?:sudo|cat) )|(?:sudo )?cat /|curl -|docker run |spark-deploy |vllm serve )"
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_STYLES = {
    "REFUSED": "bold red",
    "FAILED": "bold red",
    "WARNING": "bold yellow",
    "warning": "bold yellow",
}


def print_result(
    options: Options, data: Any, texts: Iterable[Iterable[str]], *, between: str = "\n\n"
) -> None:
    """Print a result: ``data`` as JSON, or ``texts`` with the lines of each host."""
    if options.json:
        print(json.dumps(plain(data), indent=1))
    elif text := shown(between.join("\n".join(lines) for lines in texts)):
        print_wrapped(text.splitlines()) if sys.stdout.isatty() else print(text)


def print_wrapped(lines: Iterable[str], console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    for line in lines:
        for text in wrap_line(line, console.width):
            console.print(styled(text), no_wrap=True, overflow="ignore", crop=False)


def note(text: str, style: str = "") -> None:
    """Print a message to standard error, apart from the result."""
    console = Console(stderr=True, highlight=False)
    for line in shown(text).splitlines():
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
    """Split a line at spaces, aligned with the text after the title; longer words stay whole.

    A command continues after a backslash, so that it can be copied.
    """
    if len(line) <= width:
        return [line]
    title = _TITLE.match(line)
    indent = min(len(title[0]) if title and line.startswith(" ") else 4, width // 2)
    is_command = bool(title and _COMMAND.match(line, title.end()))
    lines, rest = [], line
    while len(rest) > width:
        # A line break inside quotes would be part of the command.
        text = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), rest) if is_command else rest
        cut = text.rfind(" ", indent + 1, width + 1 - 2 * is_command)
        if cut <= indent:
            cut = text.find(" ", indent + 1)
        if cut < 0:
            break
        lines.append(rest[:cut].rstrip() + " \\" * is_command)
        rest = " " * indent + rest[cut:].lstrip()
    return [*lines, rest] if rest.strip() else lines


def styled(line: str) -> Text:
    text = Text(line)
    if not line.startswith(" ") and ": " in line:
        text.stylize("bold", 0, line.index(": "))
    for word, style in _STYLES.items():
        if re.match(rf"\s*{word}\b", line):
            text.stylize(style, line.index(word), line.index(word) + len(word))
    return text


def short_list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} hosts"


def next_command(options: Options, *words: str) -> str:
    inventory = ["--inventory", str(options.inventory)] if options.inventory else []
    return shlex.join([command_path("spark-deploy"), *words, *inventory])


def installed_program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def command_path(name: str) -> str:
    """Return a program's name, or the path if the shell would start another program."""
    program, in_path = installed_program(name), shutil.which(name)
    is_same = in_path is not None and os.path.realpath(in_path) == os.path.realpath(program)
    return name if is_same or not program.exists() else str(program)
