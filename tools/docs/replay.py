import re

from spark_deploy.cli.progress_screen import Transcript

_OPERATION = re.compile(r"--> Starting operation: (.+?)\s*$")
_STATUS = re.compile(r"\s*\[(?P<host>.+?)\]\s+(?P<status>Success|No changes|Skipped|Error).*$")


def feed(transcript: Transcript, line: str, now_s: float) -> list[str]:
    lines = transcript.log(line)
    if operation := _OPERATION.search(line):
        transcript.start_operation(operation[1], now_s)
    elif status := _STATUS.match(line):
        if status["status"] == "Error":
            return lines + transcript.fail_operation(status["host"], now_s)
        transcript.end_operation(status["host"], now_s, skipped=status["status"] == "Skipped")
        transcript.hosts[status["host"]].changed += status["status"] == "Success"
    return lines
