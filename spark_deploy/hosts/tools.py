"""Host tools and pinned wheels on a host: one directory per digest, a link to the current one."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.paths import CURRENT_TOOLS, QUANTISER, SITE, TOOLS_DIR
from spark_contract.units import (
    DAILY_LINK,
    DAILY_TIMER,
    UNITS_DIR,
)

from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.facts import HostFact, read_fact
from spark_deploy.hosts.files import encode_lines, place_files, unzip_script
from spark_deploy.hosts.host_errors import Commands, host_errors, refuse
from spark_deploy.hosts.payload import QUANTISER_REQUIREMENTS, SiteArchive, ToolFiles, site_archive
from spark_deploy.plan.machine import ToolsPlan
from spark_deploy.plan.managed_files import ManagedFile


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


@operation()
@host_errors
def install_tools(plan: ToolsPlan, files: ToolFiles, units: Sequence[ManagedFile]) -> Commands:
    """Have the host tools of ``plan.digest``, every file as shipped, and ``current`` on them."""
    home = tools_home(plan)
    changed = yield from place_files((*files.installed(home), *units))
    repaired = changed
    if repaired:
        yield "systemctl daemon-reload"
    if read_fact(PythonSite).tools != home:
        yield _switch_link(CURRENT_TOOLS, home)
        changed = True
    # A timer whose file was gone has ended, though the link that boots it may be there.
    if repaired or read_fact(PythonSite).timer != f"{UNITS_DIR}/{DAILY_TIMER}":
        yield f"systemctl enable --now {DAILY_TIMER}"
        changed = True
    if not changed:
        host.noop(f"host tools {plan.digest[:12]} are in place")


def tools_home(plan: ToolsPlan) -> str:
    """Return the folder of the tools of one digest."""
    return f"{TOOLS_DIR}/{plan.digest[:12]}"


def _switch_link(link: str, target: str) -> StringCommand:
    """Return the command that moves a symlink in one step."""
    new = shlex.quote(f"{link}.new")
    return shell(f"ln -sfn {shlex.quote(target)} {new} && mv -fT {new} {shlex.quote(link)}")


@operation()
@host_errors
def install_site(plan: ToolsPlan) -> Commands:
    """Have the builder's pinned wheels for this host's Python, without a package index there.

    The wheels are resolved on the controller, hash-checked by pip, sent once and unpacked.
    """
    site = read_fact(PythonSite)
    if not site.python_version:
        refuse(
            f"{host.name}: python3",
            "not found, or not able to say its version",
            "install the package python3 on the host",
        )
    archive = site_archive(plan.python_requirements, site.python_version, site.machine)
    name = f"site-{archive.digest[:12]}"
    if site.target == f"{TOOLS_DIR}/{name}" and site.receipt == archive.digest:
        host.noop(f"{name} is in place")
        return
    yield from _unpack(archive, f"{TOOLS_DIR}/{name}", SITE)


@operation()
@host_errors
def install_quantiser(image: str) -> Commands:
    """Have AutoRound's pinned wheels for the Python of the engine's image.

    They are resolved on the controller like the builder's, and come after the image's own packages
    on its path: torch and transformers are those that the engine runs with.
    """
    site = read_fact(QuantiserSite, image=image)
    if not site.python_version:
        if host.state.is_executing:
            what = f"python3 of {image} does not say its version"
            refuse(f"{host.name}: {image}", what, "see `docker run --entrypoint python3`")
        host.log("AutoRound is put beside the engine's image once that is there")
        return
    archive = site_archive(QUANTISER_REQUIREMENTS, site.python_version, site.machine)
    if site.receipt == archive.digest:
        host.noop("AutoRound is in place")
        return
    yield from _unpack(archive, f"{TOOLS_DIR}/quantiser-{archive.digest[:12]}", QUANTISER)


def _unpack(archive: SiteArchive, home: str, link: str) -> Commands:
    content = archive.path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    yield shell(unzip_script(home, sha256, archive.digest), stdin=encode_lines(content))
    yield _switch_link(link, home)
