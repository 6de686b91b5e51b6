"""Feed a recorded log of pyinfra to the progress screen."""

from __future__ import annotations

import re

from spark_deploy.cli.progress_screen import Transcript

_OPERATION = re.compile(r"--> Starting operation: (.+?)\s*$")
_STATUS = re.compile(r"\s*\[(?P<host>.+?)\]\s+(?P<status>Success|No changes|Skipped|Error).*$")


def feed(seen: Transcript, line: str, now_s: float) -> list[str]:
    """Take in a line as pyinfra logs it; return what a person has to see at once."""
    shown = seen.log(line)
    if operation := _OPERATION.search(line):
        seen.begin(operation[1], now_s)
    elif status := _STATUS.match(line):
        if status["status"] == "Error":
            return shown + seen.fail(status["host"], now_s)
        seen.end(status["host"], now_s, skipped=status["status"] == "Skipped")
        seen.hosts[status["host"]].changed += status["status"] == "Success"
    return shown
