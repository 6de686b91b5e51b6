"""Host tools and pinned wheels on a host: a directory per digest and a link to it."""

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.paths import CURRENT_TOOLS, QUANTISER, SITE, TOOLS_DIR
from spark_contract.units import DAILY_LINK, DAILY_TIMER, UNITS_DIR

from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.facts import HostFact, read_fact
from spark_deploy.hosts.files import encode_lines, place_files, unzip_script
from spark_deploy.hosts.host_errors import Commands, host_errors, refuse
from spark_deploy.hosts.payload import QUANTISER_REQUIREMENTS, SiteArchive, site_archive
from spark_deploy.plan.types import ManagedFile, ToolsPlan

_VERSION = 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())'


@dataclass(frozen=True, slots=True)
class Site:
    """The host's Python, and the links and wheels that we installed; "" if missing."""

    python_version: str = ""  # "3.12"
    machine: str = ""  # "aarch64"
    target: str = ""  # of the link `site`
    receipt: str = ""  # digest of the unpacked wheels
    tools: str = ""  # target of the link `current`
    timer: str = ""  # target of the link that starts the daily check


class PythonSite(HostFact[Site]):
    def command(self) -> str:
        return (
            f"python3 -I -c '{_VERSION}' 2>/dev/null || echo -; "
            f"readlink -- {SITE} || echo -; cat {SITE}/.receipt 2>/dev/null || echo -; "
            f"readlink -- {CURRENT_TOOLS} || echo -; readlink -- {DAILY_LINK} || echo -"
        )

    def process(self, output: Iterable[str]) -> Site:
        return _parse_site(list(output), 5)


class QuantiserSite(HostFact[Site]):
    """Python of the engine's image ("" without an image), and the receipt of AutoRound's wheels."""

    def command(self, image: str) -> str:
        run = f"docker run --rm --network none --log-driver none --entrypoint python3 {image}"
        return (
            f"{{ docker image inspect {shlex.quote(image)} >/dev/null && "
            f"{run} -c {shlex.quote(_VERSION)}; }} 2>/dev/null || echo -; "
            f"echo -; cat {QUANTISER}/.receipt 2>/dev/null || echo -"
        )

    def process(self, output: Iterable[str]) -> Site:
        return _parse_site(list(output), 3)


def _parse_site(lines: list[str], count: int) -> Site:
    if len(lines) != count or " " not in lines[0]:
        return Site()
    version, machine = lines[0].split()
    return Site(version, machine, *("" if line == "-" else line for line in lines[1:]))


def tools_home(plan: ToolsPlan) -> str:
    return f"{TOOLS_DIR}/{plan.digest[:12]}"


def placed_tools(plan: ToolsPlan, files: Sequence[ManagedFile]) -> tuple[ManagedFile, ...]:
    return tuple(replace(file, path=f"{tools_home(plan)}/{file.path}") for file in files)


@operation()
@host_errors
def install_tools(
    plan: ToolsPlan, files: Sequence[ManagedFile], units: Sequence[ManagedFile]
) -> Commands:
    """Install the host tools, repair each differing file, and point ``current`` at them."""
    home = tools_home(plan)
    repaired = yield from place_files((*placed_tools(plan, files), *units))
    if repaired:
        yield "systemctl daemon-reload"
    site = read_fact(PythonSite)
    if site.tools != home:
        yield _switch_link(CURRENT_TOOLS, home)
    # A timer without file has stopped, though the link that boots it may exist.
    timer = repaired or site.timer != f"{UNITS_DIR}/{DAILY_TIMER}"
    if timer:
        yield f"systemctl enable --now {DAILY_TIMER}"
    if not timer and site.tools == home:
        host.noop(f"host tools {plan.digest[:12]} are in place")


def _switch_link(link: str, target: str) -> StringCommand:
    new = shlex.quote(f"{link}.new")
    return shell(f"ln -sfn {shlex.quote(target)} {new} && mv -fT {new} {shlex.quote(link)}")


@operation()
@host_errors
def install_site(plan: ToolsPlan) -> Commands:
    """Install the builder's pinned wheels for this host's Python; the host needs no package index.

    The controller resolves them, pip checks their hashes, and they are sent once and unpacked.
    """
    site = read_fact(PythonSite)
    if not site.python_version:
        fix = "install the package python3 on the host"
        refuse(f"{host.name}: python3", "missing, or prints no version", fix)
    archive = site_archive(plan.python_requirements, site.python_version, site.machine)
    home = f"{TOOLS_DIR}/site-{archive.digest[:12]}"
    if (site.target, site.receipt) == (home, archive.digest):
        host.noop("the builder's packages are in place")
        return
    yield from _unpack(archive, home, SITE)


@operation()
@host_errors
def install_quantiser(image: str) -> Commands:
    """Install AutoRound's pinned wheels for the Python of the engine's image.

    They come after the image's own packages on the path: AutoRound uses the engine's torch and
    transformers.
    """
    site = read_fact(QuantiserSite, image=image)
    if not site.python_version:
        if host.state.is_executing:
            fix = f"run `docker run --rm --entrypoint python3 {image} --version` on the host"
            refuse(f"{host.name}: {image}", "python3 in it prints no version", fix)
        host.log("AutoRound is installed once the engine's image exists")
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
