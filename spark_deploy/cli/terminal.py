"""Lines for people on a terminal: wrapped under their own column, and what is wrong stands out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from spark_deploy.config.documents.shown import shown
from spark_deploy.config.errors import Problem

_TITLE = re.compile(r"^(?:\S+: | *\S+(?: \S+)? {2,}| {2,})")
# What people copy into a shell.
_COMMAND = re.compile(
    r"(?:ssh (?:-|\S+ (?:sudo|cat) )|(?:sudo )?cat /|curl -|docker run |spark-deploy |vllm serve )"
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_STYLES = {
    "REFUSED": "bold red",
    "FAILED": "bold red",
    "WARNING": "bold yellow",
    "warning": "bold yellow",
}


def show(lines: Iterable[str], console: Console | None = None) -> None:
    """Print lines at the width of the terminal."""
    paper = console or Console(highlight=False)
    for line in lines:
        for text in wrapped(line, paper.width):
            paper.print(styled(text), no_wrap=True, overflow="ignore", crop=False)


def tell(text: str, style: str = "") -> None:
    """Print what is no part of an answer, at the width of the terminal where there is one."""
    console = Console(stderr=True, highlight=False)
    for line in text.splitlines():
        if not console.is_terminal:
            print(line, file=sys.stderr)
            continue
        for part in wrapped(line, console.width):
            console.print(Text(part, style), no_wrap=True, overflow="ignore", crop=False)


def tell_problem(problem: Problem) -> None:
    """Print what is wrong and stands out, and below it what helps."""
    where, *fix = shown(str(problem)).splitlines()
    tell(where, "red")
    tell("\n".join(fix))


def wrapped(line: str, width: int) -> list[str]:
    """Return a line as several of at most ``width``; words longer than that stay whole.

    What follows stands below where the text began, behind its title. A command goes on behind a
    backslash, so that it can be copied.
    """
    if len(line) <= width:
        return [line]
    title = _TITLE.match(line)
    indent = min(len(title[0]) if title and line.startswith(" ") else 4, width // 2)
    command = bool(title and _COMMAND.match(line, title.end()))
    found, rest = [], line
    while len(rest) > width:
        # A break inside quotes would be part of the command.
        seen = _QUOTED.sub(lambda word: "x" * len(word[0]), rest) if command else rest
        cut = seen.rfind(" ", indent + 1, width + 1 - 2 * command)
        if cut <= indent:
            cut = seen.find(" ", indent + 1)
        if cut < 0:
            break
        found.append(rest[:cut].rstrip() + " \\" * command)
        rest = " " * indent + rest[cut:].lstrip()
    return [*found, rest] if rest.strip() else found


def styled(line: str) -> Text:
    """Return a line whose first word, or whose warning, can be seen from afar."""
    text = Text(line)
    if not line.startswith(" ") and ": " in line:
        text.stylize("bold", 0, line.index(": "))
    for word, style in _STYLES.items():
        if re.match(rf"\s*{word}\b", line):
            text.stylize(style, line.index(word), line.index(word) + len(word))
    return text
