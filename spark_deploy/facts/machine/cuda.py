"""CUDA toolkits of a host, by their own word and not by package names.

Sources: version.json beside each toolkit (CUDA 11 and later), `nvcc --version`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_deploy.facts import sections
from spark_deploy.facts.machine.packages import (
    Repositories,
    parse_repositories,
    repositories_script,
)
from spark_deploy.facts.reading import HostFact

_TOOLKITS = r"""
echo '== version-json'
for file in /usr/local/cuda*/version.json; do
  [ -e "$file" ] && echo "# $file" && cat "$file" && echo
done
echo '== nvcc'
for nvcc in /usr/local/cuda*/bin/nvcc $(command -v nvcc); do
  [ -x "$nvcc" ] && "$nvcc" --version | sed -n "s|^.*release .*, V|$nvcc |p"
done
"""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """One CUDA toolkit."""

    path: str
    version: str  # "13.0.2", or nvcc's "13.0.88" where there is no version.json


@dataclass(frozen=True, slots=True)
class Cuda:
    """State of the cuda role."""

    toolkits: tuple[Toolkit, ...]
    repositories: Repositories


class CudaState(HostFact[Cuda]):
    """Everything the cuda role compares with its plan, in one command."""

    def command(self, urls: Sequence[str] = (), repository_files: Sequence[str] = ()) -> str:
        return sections.script(_TOOLKITS, repositories_script(urls, repository_files))

    def process(self, output: list[str]) -> Cuda:
        found = sections.whole(output)
        return Cuda(
            toolkits=(
                *parse_version_json(found.get("version-json", ())),
                *parse_nvcc(found.get("nvcc", ())),
            ),
            repositories=parse_repositories(found),
        )


def parse_version_json(lines: Iterable[str]) -> tuple[Toolkit, ...]:
    """Read version.json files, each below a line `# path`; a broken file is no toolkit."""
    texts: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("# "):
            texts[line[2:]] = []
        elif texts:
            next(reversed(texts.values())).append(line)
    found = []
    for path, text in texts.items():
        try:
            version = str(json.loads("\n".join(text))["cuda"]["version"])
        except (ValueError, KeyError, TypeError):
            continue
        found.append(Toolkit(path.removesuffix("/version.json"), version))
    return tuple(found)


def parse_nvcc(lines: Iterable[str]) -> tuple[Toolkit, ...]:
    """Read lines of `path version` made from nvcc's release line."""
    found = []
    for line in lines:
        match = re.match(r"(\S+)/bin/nvcc (\d+\.\d+\S*)", line)
        if match:
            found.append(Toolkit(match.group(1), match.group(2)))
    return tuple(found)
