"""Files sent to hosts: our own files, read from the checkout, and pinned wheels.

The plan is pure and gets only the digests; operations get the content.
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from spark_contract.paths import SYSUSERS
from spark_contract.tool import TOOL
from spark_contract.units import UNITS_DIR

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import SparkError
from spark_deploy.plan.types import ManagedFile

FILES = CHECKOUT / "files"
SITE_REQUIREMENTS = "files/checkpoint/requirements.txt"
QUANTISER_REQUIREMENTS = "files/checkpoint/quantiser.txt"
LAUNCHER = """#!/bin/sh
# Runs the host tools of the version this file belongs to, ignoring Python of the caller's directory
# and environment; so do the jobs it starts. SPARK_CALLED_FROM resolves relative file arguments.
home=$(dirname "$(dirname "$(readlink -f "$0")")")
export PYTHONSAFEPATH=1 SPARK_CALLED_FROM="$PWD"
cd / && PYTHONPATH="$home:$(dirname "$home")/site" exec python3 -m spark_host "$@"
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
    """Read everything below ``files/`` for hosts; once per run."""
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
    return Payload(tools, tuple(_unit(file) for file in read_tree(FILES / "units")), image_context)


def quantiser_digest() -> str:
    """Return the identity of AutoRound's wheels, and of the script that runs it."""
    script = FILES / "checkpoint/spark_checkpoint/requantize/autoround_job.py"
    paths = (CHECKOUT / QUANTISER_REQUIREMENTS, script)
    return digest_of([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths])


@functools.cache
def supported_engines() -> tuple[str, ...]:
    """Return the versions of vLLM listed in our plugin's source."""
    text = (FILES / "image" / "spark_vllm" / "__init__.py").read_text("utf-8")
    [value] = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_ENGINES"
    )
    versions: tuple[str, ...] = ast.literal_eval(value)
    return versions


def _unit(file: ManagedFile) -> ManagedFile:
    is_users = file.path == "spark-sysusers.conf"
    return ManagedFile(SYSUSERS if is_users else f"{UNITS_DIR}/{file.path}", file.content)


def read_tree(source: Path, target: str = "") -> tuple[ManagedFile, ...]:
    """Read the files below ``source``, without bytecode, with their paths below ``target``."""
    return tuple(
        ManagedFile(str(PurePosixPath(target) / path.relative_to(source)), path.read_bytes())
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    )


@dataclass(frozen=True, slots=True)
class SiteArchive:
    path: Path
    digest: str


def site_archive(requirements: str, python_version: str, machine: str) -> SiteArchive:
    """Resolve the pinned wheels for a Python and machine, cached here. Raises SparkError."""
    pins = (CHECKOUT / requirements).read_bytes()
    key = hashlib.sha256(f"{python_version} {machine}\n".encode() + pins).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = base / "spark-deploy" / "site"
    path = cache / f"{key[:16]}.zip"
    if not path.exists():
        wheels = cache / f"{key[:16]}.wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        _download(requirements, python_version, machine, wheels)
        _merge(wheels, path)
    return SiteArchive(path, key)


def _download(requirements: str, python_version: str, machine: str, into: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--only-binary=:all:", "--no-deps", "--require-hashes", "--implementation", "cp",
        "--python-version", python_version, "--dest", str(into),
        "-r", str(CHECKOUT / requirements),
    ]  # fmt: skip
    # glibc of DGX OS 7 is 2.39; wheels built against older versions run there.
    for platform in ("manylinux_2_17", "manylinux_2_27", "manylinux_2_28", "manylinux2014"):
        command += ["--platform", f"{platform}_{machine}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise SparkError.one(
            requirements,
            f"no pinned wheels for Python {python_version} on {machine}: {reason}",
            "let this machine reach the package index once; hosts need none",
        )


def _merge(wheels: Path, path: Path) -> None:
    """Merge all wheels into a zip under a temporary name, and rename it."""
    new = path.with_suffix(f".{os.getpid()}.new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as out:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as source:
                for info in source.infolist():
                    out.writestr(info, source.read(info))
    new.replace(path)


# For verbs that must work on a host without our tools, with older tools, or half of them: the tools
# are sent on standard input as a zip and imported from memory.
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


def memory_command(*words: str) -> str:
    """Return the command that runs a verb of the tools sent on standard input."""
    return shlex.join(["python3", "-I", "-B", "-c", _LOADER, *words])


def packed_tools() -> str:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for file in read_payload().tools:
            if file.path.startswith(_SENT_PACKAGES):
                out.writestr(file.path, file.content)
    return base64.encodebytes(buffer.getvalue()).decode()
