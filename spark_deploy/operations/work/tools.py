"""Our own programs on a host: a directory per content digest, `current` points at one."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.host.paths import CURRENT_TOOLS, QUANTISER, SITE, TOOLS_DIR
from spark_contract.host.units import DAILY_TIMER, UNITS_DIR

from spark_deploy.facts.memo import read
from spark_deploy.facts.service.tools import PythonSite, QuantiserSite
from spark_deploy.managed import ManagedFile
from spark_deploy.operations.commands import shell
from spark_deploy.operations.files import in_lines, place, unzip_script
from spark_deploy.operations.host_errors import Commands, host_errors, refuse
from spark_deploy.payload.content import (
    QUANTISER_REQUIREMENTS,
    SiteArchive,
    ToolFiles,
    site_archive,
)
from spark_deploy.planning.machine import ToolsPlan


@operation()
@host_errors
def host_tools(plan: ToolsPlan, files: ToolFiles, units: Sequence[ManagedFile]) -> Commands:
    """Have the host tools of ``plan.digest``, every file as shipped, and ``current`` on them."""
    home = home_of(plan)
    changed = yield from place((*files.installed(home), *units))
    repaired = changed
    if repaired:
        yield "systemctl daemon-reload"
    if read(PythonSite).tools != home:
        yield _point(CURRENT_TOOLS, home)
        changed = True
    # A timer whose file was gone has ended, though the link that boots it may be there.
    if repaired or read(PythonSite).timer != f"{UNITS_DIR}/{DAILY_TIMER}":
        yield f"systemctl enable --now {DAILY_TIMER}"
        changed = True
    if not changed:
        host.noop(f"host tools {plan.digest[:12]} are in place")


def home_of(plan: ToolsPlan) -> str:
    """Return the folder of the tools of one digest."""
    return f"{TOOLS_DIR}/{plan.digest[:12]}"


def _point(link: str, target: str) -> StringCommand:
    """Return the command that moves a symlink in one step."""
    new = shlex.quote(f"{link}.new")
    return shell(f"ln -sfn {shlex.quote(target)} {new} && mv -fT {new} {shlex.quote(link)}")


@operation()
@host_errors
def python_site(plan: ToolsPlan) -> Commands:
    """Have the builder's pinned wheels for this host's Python, without a package index there.

    The wheels are resolved on the controller, hash-checked by pip, sent once and unpacked.
    """
    site = read(PythonSite)
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
    yield from _unpacked(archive, f"{TOOLS_DIR}/{name}", SITE)


@operation()
@host_errors
def quantiser(image: str) -> Commands:
    """Have AutoRound's pinned wheels for the Python of the engine's image.

    They are resolved on the controller like the builder's, and come after the image's own packages
    on its path: torch and transformers are those that the engine runs with.
    """
    site = read(QuantiserSite, image=image)
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
    yield from _unpacked(archive, f"{TOOLS_DIR}/quantiser-{archive.digest[:12]}", QUANTISER)


def _unpacked(archive: SiteArchive, home: str, link: str) -> Commands:
    content = archive.path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    yield shell(unzip_script(home, sha256, archive.digest), stdin=in_lines(content))
    yield _point(link, home)
