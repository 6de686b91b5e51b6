"""Package repositories of a host: which of ours are there, which were known before us."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_deploy.facts.files import FileStates
from spark_deploy.facts.sections import Sections
from spark_deploy.managed import FileState


@dataclass(frozen=True, slots=True)
class Repositories:
    """What apt of the host knows."""

    files: Mapping[str, FileState]  # our key and source files that exist
    known_urls: tuple[str, ...]  # repository addresses named in files that are not ours


def script(urls: Sequence[str], files: Sequence[str]) -> str:
    """Ask for our files, and for each address whether somebody else's source names it."""
    addresses = " ".join(shlex.quote(url) for url in urls)
    states = FileStates().command(files) if files else "true"
    return rf"""
echo '== repository-files'; {states}
echo '== known-urls'
for url in {addresses}; do
  others=$(ls /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v /spark-)
  [ -n "$others" ] && grep -qsF -- "$url" $others && echo "$url"
done
"""


def parse(sections: Sections) -> Repositories:
    """Read the sections of ``script``."""
    return Repositories(
        files=FileStates().process(sections.get("repository-files", ())),
        known_urls=tuple(sections.get("known-urls", ())),
    )
