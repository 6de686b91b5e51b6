"""Files for hosts (tools, units, wheels) and the operations that install them.

Plans contain only digests. On a host, each version has a directory named by its digest, and a link
points to the current version.
"""

import ast
import base64
import functools
import hashlib
import io
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pyinfra import host
from pyinfra.api import StringCommand
from spark_contract.paths import CURRENT_TOOLS, QUANTIZER, SITE, SYSUSERS, TOOLS_DIR
from spark_contract.tool import TOOL
from spark_contract.units import DAILY_LINK, DAILY_TIMER, UNITS_DIR

from spark_deploy.config.checkout import CHECKOUT, cache_folder
from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.facts import HostFact, read_fact
from spark_deploy.hosts.files import encode_lines, place_files, unzip_script
from spark_deploy.hosts.operations import Commands, fail, host_operation
from spark_deploy.plan.types import ManagedFile, PayloadIdentity

FILES = CHECKOUT / "files"
SITE_REQUIREMENTS = "files/checkpoint/requirements.txt"
QUANTIZER_REQUIREMENTS = "files/checkpoint/quantizer.txt"
LAUNCHER = """#!/bin/sh
# Runs the host tools installed next to this file. The tools and their jobs ignore Python modules in
# the caller's directory and environment. SPARK_CALLED_FROM resolves relative file arguments.
home=$(dirname "$(dirname "$(readlink -f "$0")")")
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 SPARK_CALLED_FROM="$PWD"
cd / && PYTHONPATH="$home:$(dirname "$home")/site" exec /usr/bin/python3 -m spark_host "$@"
"""


@dataclass(frozen=True, slots=True)
class Payload:
    tools: tuple[ManagedFile, ...]  # paths relative to the tools' home
    units: tuple[ManagedFile, ...]  # static systemd units and users, absolute paths
    image_context: tuple[ManagedFile, ...]  # relative paths

    @property
    def tools_digest(self) -> str:
        return _digest(self.tools)

    @property
    def image_context_digest(self) -> str:
        return _digest(self.image_context)


def _digest(files: tuple[ManagedFile, ...]) -> str:
    return digest_of([(file.path, file.mode, file.sha256) for file in files])


@functools.cache
def read_payload() -> Payload:
    """Read ``files/`` once per run."""
    tools = (
        *read_tree(FILES / "contract" / "spark_contract", "spark_contract"),
        *read_tree(FILES / "host" / "spark_host", "spark_host"),
        *read_tree(FILES / "checkpoint" / "spark_checkpoint", "spark_checkpoint"),
        ManagedFile(f"bin/{TOOL}", LAUNCHER.encode(), 0o755),
    )
    image_context = tuple(
        file
        for file in read_tree(FILES / "image")
        if not file.path.startswith(("tests/", "build/", "dist/")) and ".egg-info/" not in file.path
    )
    units = tuple(
        ManagedFile(
            SYSUSERS if file.path == "spark-sysusers.conf" else f"{UNITS_DIR}/{file.path}",
            file.content,
        )
        for file in read_tree(FILES / "units")
    )
    return Payload(tools, units, image_context)


def quantizer_digest() -> str:
    """Return a digest of AutoRound's wheels and the script that runs it."""
    script = FILES / "checkpoint/spark_checkpoint/autoround_job.py"
    paths = (CHECKOUT / QUANTIZER_REQUIREMENTS, script)
    return digest_of([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths])


@functools.cache
def supported_engines() -> tuple[str, ...]:
    """Read the engine versions that the plugin supports from its source."""
    text = (FILES / "image" / "spark_vllm" / "__init__.py").read_text("utf-8")
    [value] = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_ENGINES"
    )
    versions: tuple[str, ...] = ast.literal_eval(value)
    return versions


def read_tree(source: Path, target: str = "") -> tuple[ManagedFile, ...]:
    return tuple(
        ManagedFile(str(PurePosixPath(target) / path.relative_to(source)), path.read_bytes())
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    )


def site_archive(requirements: str, python_version: str, machine: str) -> tuple[Path, str]:
    """Return a zip of the pinned wheels, downloaded on the first call, and its inputs' digest."""
    pins = (CHECKOUT / requirements).read_bytes()
    digest = hashlib.sha256(f"{python_version} {machine}\n".encode() + pins).hexdigest()
    cache = cache_folder() / "site"
    path = cache / f"{digest[:16]}.zip"
    if not path.exists():
        wheels = cache / f"{digest[:16]}.wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        _download_wheels(requirements, python_version, machine, wheels)
        new = path.with_suffix(f".{os.getpid()}.new")
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as merged:
            for wheel in sorted(wheels.glob("*.whl")):
                with zipfile.ZipFile(wheel) as source:
                    for info in source.infolist():
                        merged.writestr(info, source.read(info))
        new.replace(path)
    return path, digest


def _download_wheels(requirements: str, python_version: str, machine: str, folder: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--only-binary=:all:", "--no-deps", "--require-hashes", "--implementation", "cp",
        "--python-version", python_version, "--dest", str(folder),
        "-r", str(CHECKOUT / requirements),
    ]  # fmt: skip
    # Wheels for an older glibc run on DGX OS 7 (2.39).
    for platform in ("manylinux_2_17", "manylinux_2_27", "manylinux_2_28", "manylinux2014"):
        command += ["--platform", f"{platform}_{machine}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise SparkError.single(
            requirements,
            f"cannot download the pinned wheels for Python {python_version} on {machine}: {reason}",
            "connect this machine to the package index once; hosts need no access to it",
        )


# Some verbs must work without installed host tools. The tools are then sent on standard input as a
# zip and imported from memory.
_LOADER = """
import base64, os, sys
zip = os.memfd_create("spark-host")
with open(zip, "wb", closefd=False) as out:
    out.write(base64.b64decode(sys.stdin.read()))
sys.path.insert(0, f"/proc/self/fd/{zip}")
from spark_host.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
_SENT_PACKAGES = ("spark_contract/", "spark_host/")


def memory_command(*arguments: str) -> str:
    """Return the command that runs a verb of the host tools, which it reads from standard input."""
    return shlex.join(["python3", "-I", "-B", "-c", _LOADER, *arguments])


def pack_tools() -> str:
    """Return the zip for ``memory_command``, as base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for file in read_payload().tools:
            if file.path.startswith(_SENT_PACKAGES):
                out.writestr(file.path, file.content)
    return base64.encodebytes(buffer.getvalue()).decode()


_VERSION = 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())'


@dataclass(frozen=True, slots=True)
class Site:
    python_version: str = ""  # "3.12"
    machine: str = ""  # "aarch64"
    target: str = ""  # target of the link `site`
    receipt: str = ""  # digest of the unpacked wheels
    tools: str = ""
    timer: str = ""  # target of the link that enables the daily check


class PythonSite(HostFact[Site]):
    def command(self) -> str:
        return (
            f"python3 -I -c '{_VERSION}' 2>/dev/null || echo -; "
            f"readlink -- {SITE} || echo -; cat {SITE}/.receipt 2>/dev/null || echo -; "
            f"readlink -- {CURRENT_TOOLS} || echo -; readlink -- {DAILY_LINK} || echo -"
        )

    def process(self, output: Iterable[str]) -> Site:
        return _parse_site(list(output), 5)


class QuantizerSite(HostFact[Site]):
    """Python of the engine's image ("" if the image is missing), and AutoRound's receipt."""

    def command(self, image: str) -> str:
        run = f"docker run --rm --network none --log-driver none --entrypoint python3 {image}"
        return (
            f"{{ docker image inspect {shlex.quote(image)} >/dev/null && "
            f"{run} -c {shlex.quote(_VERSION)}; }} 2>/dev/null || echo -; "
            f"echo -; cat {QUANTIZER}/.receipt 2>/dev/null || echo -"
        )

    def process(self, output: Iterable[str]) -> Site:
        return _parse_site(list(output), 3)


def _parse_site(lines: list[str], expected_lines: int) -> Site:
    if len(lines) != expected_lines or " " not in lines[0]:
        return Site()
    version, machine = lines[0].split()
    others = ("" if line == "-" else line for line in lines[1:])
    return Site(version, machine, *others)


def tools_home(identity: PayloadIdentity) -> str:
    return f"{TOOLS_DIR}/{identity.tools_digest[:12]}"


def tool_files(identity: PayloadIdentity, files: Sequence[ManagedFile]) -> tuple[ManagedFile, ...]:
    return tuple(replace(file, path=f"{tools_home(identity)}/{file.path}") for file in files)


@host_operation
def install_tools(
    identity: PayloadIdentity, files: Sequence[ManagedFile], units: Sequence[ManagedFile]
) -> Commands:
    """Install or repair the host tools, and point ``current`` at them."""
    home = tools_home(identity)
    repaired = yield from place_files((*tool_files(identity, files), *units))
    if repaired:
        yield "systemctl daemon-reload"
    site = read_fact(PythonSite)
    if site.tools != home:
        yield _switch_link(CURRENT_TOOLS, home)
    # A timer whose file was missing has stopped, even if it is enabled.
    starts_timer = repaired or site.timer != f"{UNITS_DIR}/{DAILY_TIMER}"
    if starts_timer:
        yield f"systemctl enable --now {DAILY_TIMER}"
    if not starts_timer and site.tools == home:
        host.noop(f"host tools {identity.tools_digest[:12]} are installed")


def _switch_link(link: str, target: str) -> StringCommand:
    new = shlex.quote(f"{link}.new")
    return shell(f"ln -sfn {shlex.quote(target)} {new} && mv -fT {new} {shlex.quote(link)}")


@host_operation
def install_site(identity: PayloadIdentity) -> Commands:
    """Install the builder's pinned wheels.

    The controller downloads them and pip checks their hashes; the host needs no package index.
    """
    site = read_fact(PythonSite)
    if not site.python_version:
        fix = "install the package python3 on the host"
        fail(f"{host.name}: python3", "python3 is missing or does not print its version", fix)
    path, digest = site_archive(identity.python_requirements, site.python_version, site.machine)
    home = f"{TOOLS_DIR}/site-{digest[:12]}"
    if (site.target, site.receipt) == (home, digest):
        host.noop("the builder's packages are installed")
    else:
        yield from _unpack_archive(path, digest, home, SITE)


@host_operation
def install_quantizer(image: str) -> Commands:
    """Install AutoRound's pinned wheels for the Python of the engine's image.

    AutoRound uses torch and transformers from the image, whose packages come first in sys.path.
    """
    site = read_fact(QuantizerSite, image=image)
    if not site.python_version:
        if host.state.is_executing:
            fix = f"run `docker run --rm --entrypoint python3 {image} --version` on the host"
            fail(f"{host.name}: {image}", "python3 in the image does not print its version", fix)
        host.log("AutoRound will be installed once the engine's image is present")
        return
    path, digest = site_archive(QUANTIZER_REQUIREMENTS, site.python_version, site.machine)
    if site.receipt == digest:
        host.noop("AutoRound is installed")
    else:
        yield from _unpack_archive(path, digest, f"{TOOLS_DIR}/quantizer-{digest[:12]}", QUANTIZER)


def _unpack_archive(path: Path, digest: str, home: str, link: str) -> Commands:
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    yield shell(unzip_script(home, sha256, digest), stdin=encode_lines(content))
    yield _switch_link(link, home)
