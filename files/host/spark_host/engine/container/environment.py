"""The variables of the engine's container, handed over in a file that only root can read.

They are chosen in settings and profiles, so they must not reach programs that run as root: the
docker client, like any program, does what LD_PRELOAD or DOCKER_HOST say.
"""

from __future__ import annotations

import re
from pathlib import Path

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release

from spark_host.system import members

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The client takes the file line by line, and none that is longer than 64 KiB.
_MAX_LINE_BYTES = 60_000


def write(release: Release, paths: Paths) -> Path:
    """Write the file for ``docker run --env-file`` and return where it is.

    Raises:
        HostToolError: A variable cannot be told in one line.
    """
    member = members.own(release, paths)
    variables = {**release.engine.env, **(member.env if member else {})}
    lines = [_line(name, value) for name, value in sorted(variables.items())]
    path = paths.engine_environment(release.name)
    files.write_text(path, "".join(lines), 0o600)
    return path


def remove(release: Release, paths: Paths) -> None:
    """Remove the file; one that was never written is fine."""
    files.remove(paths.engine_environment(release.name))


def _line(name: str, value: str) -> str:
    line = f"{name}={value}\n"
    if not _NAME.fullmatch(name):
        what = f"the name {name!r} is none of a variable"
    elif any(letter in value for letter in "\n\r\0"):
        what = f"the value of {name} is more than one line"
    elif len(line.encode()) > _MAX_LINE_BYTES:
        what = f"the value of {name} is longer than {_MAX_LINE_BYTES} bytes"
    else:
        return line
    raise HostToolError("environment of the engine", what, "change it, then deploy again", 2)
