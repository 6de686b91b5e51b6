"""What of our own programs a host has."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from spark_contract.host.paths import CURRENT_TOOLS, QUANTISER, SITE
from spark_contract.host.units import DAILY_LINK

from spark_deploy.facts.reading import HostFact


class SymlinkTarget(HostFact[str]):
    """Where a symlink points, literally; empty when there is none."""

    default = str

    def command(self, path: str) -> str:
        return f"readlink -- {shlex.quote(path)} || true"

    def process(self, output: Iterable[str]) -> str:
        return next(iter(output), "")


@dataclass(frozen=True, slots=True)
class Site:
    """The host's Python, and what it has from us."""

    python_version: str  # "3.12"; "" where there is no usable one
    machine: str  # "aarch64"
    target: str  # where `site` points; "" when absent
    receipt: str  # digest of what was unpacked; "" when unproven
    tools: str  # where `current` points; "" when absent
    timer: str  # where the link that starts the daily look points; "" when absent


class PythonSite(HostFact[Site]):
    """Version and architecture of ``python3``, our site directory and which tools are current."""

    def command(self) -> str:
        return (
            "python3 -I -c 'import platform, sys; "
            'print("%d.%d" % sys.version_info[:2], platform.machine())\' 2>/dev/null || echo -; '
            f"readlink -- {SITE} || echo -; cat {SITE}/.receipt 2>/dev/null || echo -; "
            f"readlink -- {CURRENT_TOOLS} || echo -; readlink -- {DAILY_LINK} || echo -"
        )

    def process(self, output: Iterable[str]) -> Site:
        lines = list(output)
        if len(lines) != 5 or " " not in lines[0]:
            return Site("", "", "", "", "", "")
        version, machine = lines[0].split()
        target, receipt, tools, timer = ("" if line == "-" else line for line in lines[1:])
        return Site(version, machine, target, receipt, tools, timer)


@dataclass(frozen=True, slots=True)
class Quantiser:
    """The Python of the engine's image, and which of AutoRound's wheels the host has for it."""

    python_version: str  # "3.12"; "" where there is no image yet
    machine: str  # "aarch64"
    receipt: str  # digest of what was unpacked; "" when unproven


class QuantiserSite(HostFact[Quantiser]):
    """Version and architecture of ``python3`` in an image, and our folder of AutoRound."""

    def command(self, image: str) -> str:
        said = 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())'
        run = f"docker run --rm --network none --log-driver none --entrypoint python3 {image}"
        return (
            f"{{ docker image inspect {shlex.quote(image)} >/dev/null && "
            f"{run} -c {shlex.quote(said)}; }} 2>/dev/null || echo -; "
            f"cat {QUANTISER}/.receipt 2>/dev/null || echo -"
        )

    def process(self, output: Iterable[str]) -> Quantiser:
        lines = list(output)
        if len(lines) != 2 or " " not in lines[0]:
            return Quantiser("", "", "")
        version, machine = lines[0].split()
        return Quantiser(version, machine, "" if lines[1] == "-" else lines[1])
