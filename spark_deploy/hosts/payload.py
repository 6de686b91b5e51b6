"""What is sent to hosts: our own files, pinned wheels, host-care files."""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import io
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from spark_contract.paths import SYSUSERS
from spark_contract.tool import TOOL
from spark_contract.units import UNITS_DIR, drop_in_dir

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents.digest import digest_of
from spark_deploy.config.errors import SparkError
from spark_deploy.plan.managed_files import ManagedFile

FILES = CHECKOUT / "files"


SITE_REQUIREMENTS = "files/checkpoint/requirements.txt"


QUANTISER_REQUIREMENTS = "files/checkpoint/quantiser.txt"


LAUNCHER = """#!/bin/sh
# Runs the host tools from the version this file belongs to, and no Python of the folder or the
# environment that somebody calls it from; the second line holds for the jobs it starts, too. What
# files its caller names is told by the folder of the call.
home=$(dirname "$(dirname "$(readlink -f "$0")")")
export PYTHONSAFEPATH=1 SPARK_CALLED_FROM="$PWD"
cd / && PYTHONPATH="$home:$(dirname "$home")/site" exec python3 -m spark_host "$@"
"""


@dataclass(frozen=True, slots=True)
class ToolFiles:
    """The host tools with paths relative to their home directory."""

    files: tuple[ManagedFile, ...]

    @property
    def digest(self) -> str:
        """Identity of the tools' content."""
        return digest_of([(file.path, file.mode, file.sha256) for file in self.files])

    def installed(self, home: str) -> tuple[ManagedFile, ...]:
        """Return the files as they stand below ``home`` on a host."""
        return tuple(
            ManagedFile(f"{home}/{file.path}", file.content, file.mode) for file in self.files
        )


@dataclass(frozen=True, slots=True)
class SiteArchive:
    """Pinned wheels merged into one zip, and the digest of what it holds."""

    path: Path
    digest: str


@dataclass(frozen=True, slots=True)
class Payload:
    """Digests the plan needs, and the content behind them."""

    tools: ToolFiles
    units: tuple[ManagedFile, ...]  # static systemd units and users, absolute paths
    image_context: tuple[ManagedFile, ...]  # relative paths

    @property
    def tools_digest(self) -> str:
        """Identity of the host tools."""
        return self.tools.digest

    @property
    def image_context_digest(self) -> str:
        """Identity of the image's build context."""
        return digest_of([(file.path, file.mode, file.sha256) for file in self.image_context])


@functools.cache
def read_payload() -> Payload:
    """Read everything below ``files/`` that goes to hosts; once per run."""
    tools = (
        *read_tree(FILES / "contract" / "spark_contract", "spark_contract"),
        *read_tree(FILES / "host" / "spark_host", "spark_host"),
        *read_tree(FILES / "checkpoint" / "spark_checkpoint", "spark_checkpoint"),
        ManagedFile(f"bin/{TOOL}", LAUNCHER.encode(), 0o755),
    )
    return Payload(
        tools=ToolFiles(tools),
        units=tuple(_unit(file) for file in read_tree(FILES / "units")),
        image_context=tuple(
            file
            for file in read_tree(FILES / "image")
            if not file.path.startswith(("tests/", "build/", "dist/"))
            and ".egg-info/" not in file.path
        ),
    )


def quantiser_digest() -> str:
    """Return the identity of AutoRound's wheels, and of the script that runs it."""
    script = FILES / "checkpoint/spark_checkpoint/requantize/inside.py"
    told = (CHECKOUT / QUANTISER_REQUIREMENTS, script)
    return digest_of([hashlib.sha256(path.read_bytes()).hexdigest() for path in told])


@functools.cache
def supported_engines() -> tuple[str, ...]:
    """Return the versions of vLLM that our plugin knows, as it states them itself."""
    text = (FILES / "image" / "spark_vllm" / "__init__.py").read_text("utf-8")
    [found] = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_ENGINES"
    )
    versions: tuple[str, ...] = ast.literal_eval(found)
    return versions


def _unit(file: ManagedFile) -> ManagedFile:
    """Say where a file of ``files/units`` belongs on a host."""
    if file.path == "spark-sysusers.conf":
        return ManagedFile(SYSUSERS, file.content)
    return ManagedFile(f"{UNITS_DIR}/{file.path}", file.content)


def read_tree(source: Path, target: str = "") -> tuple[ManagedFile, ...]:
    """List the files below ``source`` as they shall stand below ``target``, without bytecode."""
    return tuple(
        ManagedFile(str(PurePosixPath(target) / path.relative_to(source)), path.read_bytes())
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    )


def site_archive(requirements: str, python_version: str, machine: str) -> SiteArchive:
    """Resolve the pinned wheels for one kind of host; cached on the controller.

    Raises:
        SparkError: pip cannot get the pinned wheels for that platform.
    """
    wanted = (CHECKOUT / requirements).read_bytes()
    key = hashlib.sha256(f"{python_version} {machine}\n".encode() + wanted).hexdigest()
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
    # glibc of DGX OS 7 is 2.39; wheels built against an older one run there.
    for glibc in ("2_17", "2_27", "2_28"):
        command += ["--platform", f"manylinux_{glibc}_{machine}"]
    command += ["--platform", f"manylinux2014_{machine}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SparkError.one(
            requirements,
            f"no pinned wheels for Python {python_version} on {machine}: "
            f"{done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'pip failed'}",
            "let this machine reach its package index once; hosts need none",
        )


def _merge(wheels: Path, path: Path) -> None:
    """Put the content of all wheels into one zip, written beside and renamed."""
    new = path.with_suffix(f".{os.getpid()}.new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as out:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as source:
                for info in source.infolist():
                    out.writestr(info, source.read(info))
    new.replace(path)


# For what must work on a host that has none of our tools, older ones, or half of them: they
# travel on standard input and are imported from memory.
_LOADER = """
import base64, importlib.abc, importlib.util, io, sys, tarfile
class Sent(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, text):
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text)), mode="r:xz") as tar:
            self.files = {name: tar.extractfile(name).read().decode() for name in tar.getnames()}
    def path(self, name):
        base = name.replace(".", "/")
        return next((p for p in (base + "/__init__.py", base + ".py") if p in self.files), None)
    def find_spec(self, name, path=None, target=None):
        found = self.path(name)
        package = bool(found) and found.endswith("/__init__.py")
        spec = importlib.util.spec_from_loader(name, self, is_package=package) if found else None
        return spec
    def is_package(self, name):
        return self.path(name).endswith("/__init__.py")
    def get_source(self, name):
        return self.files[self.path(name)]
sys.meta_path.insert(0, Sent(sys.stdin.read()))
from spark_host.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


_ROOMS = ("spark_contract/", "spark_host/")


def memory_command(*words: str) -> str:
    """Return the command that runs a verb of the tools that come on its standard input."""
    return shlex.join(["python3", "-I", "-B", "-c", _LOADER, *words])


def packed_tools() -> str:
    """Return the tools as text for standard input."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for file in read_payload().tools.files:
            if file.path.startswith(_ROOMS):
                info = tarfile.TarInfo(file.path)
                info.size = len(file.content)
                tar.addfile(info, io.BytesIO(file.content))
    return base64.encodebytes(buffer.getvalue()).decode()


# GPU memory of a GB10 is charged to no cgroup, so nothing can cap an engine from outside; what
# can be done is to keep some memory for the login, and to choose whom an out-of-memory killer
# takes.


# Guarantees count only as far as every cgroup above grants them (systemd.resource-control(5)).
# logind moves a shell out of ssh.service into user.slice, so protecting sshd alone is not enough.
_GUARANTEES = {
    "user.slice": ("Slice", "2G"),
    "system.slice": ("Slice", "512M"),
    "ssh.service": ("Service", "256M"),
}


EARLYOOM_PATH = "/etc/default/earlyoom"


# Acts below 2 % of memory. earlyoom waits until memory *and* swap are below their limits, and a
# Spark's swap is never the thing to wait for: `-s 100,100`, for its SIGTERM and its SIGKILL.
# Resident size says nothing about an engine, whose weights are GPU memory, so it has to be named.
EARLYOOM_ARGUMENTS = (
    "-r 3600 -m 2 -s 100,100 --prefer ^(VLLM|vllm) --avoid ^(sshd|systemd|dockerd|containerd|nginx)"
)


COMPACTION_PATH = "/etc/sysctl.d/99-spark-compaction.conf"


KERNEL_COMPACTION = 20  # default of vm.compaction_proactiveness


def compaction_file(proactiveness: int) -> ManagedFile:
    """Build the kernel's setting for compaction in the background."""
    text = f"# Managed by dgx-spark-deploy.\nvm.compaction_proactiveness = {proactiveness}\n"
    return ManagedFile(COMPACTION_PATH, text.encode())


def guarantee_files() -> tuple[ManagedFile, ...]:
    """Build the drop-ins that guarantee memory to the login."""
    return tuple(
        ManagedFile(
            f"{drop_in_dir(unit)}/50-spark.conf",
            f"# Managed by dgx-spark-deploy.\n[{section}]\nMemoryMin={size}\n".encode(),
        )
        for unit, (section, size) in _GUARANTEES.items()
    )


def earlyoom_file() -> ManagedFile:
    """Build the arguments of Debian's and Ubuntu's earlyoom unit."""
    text = f'# Managed by dgx-spark-deploy.\nEARLYOOM_ARGS="{EARLYOOM_ARGUMENTS}"\n'
    return ManagedFile(EARLYOOM_PATH, text.encode())
