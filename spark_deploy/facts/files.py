"""What a host has at the paths we manage."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from spark_deploy.facts.reading import HostFact
from spark_deploy.managed import FileState


class FileStates(HostFact[dict[str, FileState]]):
    """Mode, owner and sha256 of each regular file among ``paths``; others are left out.

    Two processes whatever the number of files (GNU coreutils' ``stat`` and ``sha256sum``).
    """

    default = dict

    def command(self, paths: Sequence[str]) -> str:
        names = " ".join(shlex.quote(path) for path in paths)
        return (
            f"LC_ALL=C stat -c 'stat %F|%a|%U:%G|%n' -- {names} 2>/dev/null; "
            f"LC_ALL=C sha256sum -- {names} 2>/dev/null; true"
        )

    def process(self, output: Iterable[str]) -> dict[str, FileState]:
        modes: dict[str, tuple[int, str]] = {}
        hashes: dict[str, str] = {}
        for line in output:
            if line.startswith("stat "):
                kind, mode, owner, path = line[5:].split("|", 3)
                if kind.startswith("regular"):
                    modes[path] = (int(mode, 8), owner)
            elif "  " in line:
                digest, path = line.split("  ", 1)
                hashes[path] = digest
        return {
            path: FileState(mode, owner, hashes[path])
            for path, (mode, owner) in modes.items()
            if path in hashes
        }
