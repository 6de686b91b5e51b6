"""Run a command under the restrictions of the engine's container, on a machine without docker.

Restrictions are read from the release's ``docker run`` arguments; an unknown argument is an error.
Needs root and util-linux (``unshare``, ``setpriv``). Not reproduced: docker's seccomp filter, the
masked ``/proc`` files and the image's root directory (this machine's is used).
"""

import argparse
import ctypes
import fcntl
import grp
import json
import os
import pwd
import resource
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn
from unittest import mock

from spark_contract import files
from spark_contract.documents import to_json
from spark_contract.paths import Paths
from spark_contract.records import GpuProof
from spark_contract.release import Mount, Release
from spark_host.engine import container as engine_container

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONPATH = [str(REPOSITORY / folder) for folder in ("", "files/contract", "files/host")]
PRIVATE = ("dev", "proc", "sys", "tmp", "run")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"),
    *("SPARK_FLASH_ATTENTION", "SPARK_FIRST_CONFIGURATION", "VLLM_DISABLED_KERNELS"),
)
"""Copied from this machine's environment instead of the image's."""
NAMESPACES = ("mount", "net", "ipc", "pid", "uts")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


@dataclass(frozen=True)
class Container:
    user: int
    group: int
    mounts: tuple[tuple[str, str, bool], ...]
    tmpfs: dict[str, str]
    max_processes: int
    environment: dict[str, str]
    argv: tuple[str, ...]


def from_release(release: Release, checkpoint: Path, root: Path) -> tuple[Container, Path]:
    """Return the container in which a host starts ``release``, and the engine's socket.

    ``checkpoint`` replaces the plan's; ``root`` is an empty directory with a short path.
    """
    paths = Paths(root)
    user = _find_unnamed_user()
    sources = {"/model": checkpoint, "/cache": root / "cache"}
    mounts = tuple(
        Mount(str(sources[mount.target]), mount.target, mount.read_only)
        for mount in release.engine.mounts
    )
    release = replace(release, engine=replace(release.engine, mounts=mounts))
    for folder in (Path(str(release.cache)), paths.engine_run(release.service)):
        folder.mkdir(parents=True)
        os.chown(folder, user, user)
    files.write_text(paths.gpu_receipt, to_json(GpuProof({}, ("--gpus=all",), "")))
    engine_container.write_environment(release, paths)
    owner = mock.Mock(pw_uid=user, pw_gid=user)
    with mock.patch.object(pwd, "getpwnam", return_value=owner):
        argv = engine_container.docker_argv(release, paths)
    return parse_docker_run(argv), paths.engine_socket(release.service)


def _find_unnamed_user() -> int:
    used = {entry.pw_uid for entry in pwd.getpwall()} | {entry.gr_gid for entry in grp.getgrall()}
    return next(number for number in range(61_000, 65_000) if number not in used)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"docker run: {message}; fix: reproduce it in proofs/container.py")


def parse_docker_run(argv: list[str]) -> Container:
    parser = _Parser(allow_abbrev=False, add_help=False)
    for name in ("--restart", "--name", "--label", "--log-driver", "--env-file"):
        parser.add_argument(name)
    parser.add_argument("--rm", action="store_true")
    parser.add_argument("--pull", choices=["never"])
    parser.add_argument("--gpus", choices=["all"])
    parser.add_argument("--runtime", choices=["nvidia", "runc"])
    parser.add_argument("--device", choices=["nvidia.com/gpu=all"])
    parser.add_argument("--network", choices=["none"], required=True)
    parser.add_argument("--ipc", choices=["private"], required=True)
    parser.add_argument("--cap-drop", choices=["ALL"], required=True)
    parser.add_argument("--security-opt", choices=["no-new-privileges"], required=True)
    parser.add_argument("--read-only", action="store_true", required=True)
    parser.add_argument("--shm-size", required=True)
    parser.add_argument("--pids-limit", type=int, required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument("--mount", action="append", type=_parse_mount, default=[])
    parser.add_argument("--tmpfs", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv[argv.index("run") + 1 :])
    user, group = map(int, options.user.split(":"))
    tmpfs = dict(text.split(":", 1) for text in options.tmpfs)
    tmpfs["/dev/shm"] = f"rw,nosuid,nodev,noexec,mode=1777,size={options.shm_size}"
    lines = Path(options.env_file).read_text().splitlines()
    return Container(
        user=user,
        group=group,
        mounts=tuple(options.mount),
        tmpfs=tmpfs,
        max_processes=options.pids_limit,
        environment=dict(line.split("=", 1) for line in lines),
        argv=tuple(options.argv),
    )


def _parse_mount(text: str) -> tuple[str, str, bool]:
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    if fields.keys() - {"readonly"} != {"type", "source", "target"} or fields["type"] != "bind":
        raise argparse.ArgumentTypeError(f"{text!r} is not reproduced")
    return fields["source"], fields["target"], "readonly" in fields


def start(
    container: Container, command: list[str], work: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start ``command`` (absolute path first) inside; ``work`` is empty and gets the new root."""
    root = work / "root"
    root.mkdir()
    machine = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    machine["PYTHONPATH"] = ":".join([*PYTHONPATH, *filter(None, [machine.get("PYTHONPATH")])])
    environment = {**container.environment, **machine}
    inside = replace(container, argv=tuple(command), environment=environment)
    unshare = ["unshare", *(f"--{name}" for name in NAMESPACES), "--fork", "--kill-child"]
    program = [sys.executable, "-m", "proofs.container"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*unshare, *program, str(root), json.dumps(asdict(inside))],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": machine["PYTHONPATH"]},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def enter(root: Path, container: Container) -> NoReturn:
    _bring_up_loopback()
    _mount("tmpfs", root, "-t", "tmpfs", "-o", "mode=755")
    _bind_machine(root, {Path(target).parts[1] for _, target, _ in container.mounts})
    _make_devices(root / "dev")
    for target, options in container.tmpfs.items():
        _below(root, target).mkdir(parents=True, exist_ok=True)
        _mount("tmpfs", _below(root, target), "-t", "tmpfs", "-o", options)
    for source, target, _ in container.mounts:
        _below(root, target).mkdir(parents=True, exist_ok=True)
        _mount(source, _below(root, target), "--bind")
    (root / "proc").mkdir()
    _mount("proc", root / "proc", "-t", "proc", "-o", "nosuid,nodev,noexec")
    writable = {target for _, target, read_only in container.mounts if not read_only}
    _make_read_only(root, writable | set(container.tmpfs) | {"/proc"})
    _move_into(root)
    socket.sethostname("engine")
    resource.setrlimit(resource.RLIMIT_NPROC, (container.max_processes,) * 2)
    rights = ["--reuid", str(container.user), "--regid", str(container.group), "--clear-groups"]
    rights += ["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs"]
    setpriv = shutil.which("setpriv") or "setpriv"
    os.execve(setpriv, [setpriv, *rights, *container.argv], container.environment)


def _bring_up_loopback() -> None:
    # docker does so in a container without a network.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        name = b"lo".ljust(16, b"\0")
        answer = fcntl.ioctl(control, _SIOCGIFFLAGS, name + bytes(24))
        (flags,) = struct.unpack_from("h", answer, 16)
        request = name + struct.pack("h", flags | _IFF_UP) + bytes(22)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)


def _bind_machine(root: Path, hidden: set[str]) -> None:
    for entry in os.scandir("/"):
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), root / entry.name)
        elif entry.is_dir() and entry.name not in {*PRIVATE, *hidden}:
            (root / entry.name).mkdir()
            _mount(entry.path, root / entry.name, "--rbind")
    for name in ("dev", "sys", "run"):
        (root / name).mkdir(exist_ok=True)
    _mount("/sys", root / "sys", "--rbind")


def _make_devices(folder: Path) -> None:
    _mount("tmpfs", folder, "-t", "tmpfs", "-o", "nosuid,mode=755,size=64k")
    nvidia = [path.name for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
    for name in (*DEVICES, *nvidia):
        (folder / name).touch()
        _mount(f"/dev/{name}", folder / name, "--bind")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", folder / name)


def _make_read_only(root: Path, writable: set[str]) -> None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        path = line.split()[4].encode().decode("unicode_escape")
        inside = Path(path)
        if not inside.is_relative_to(root):
            continue
        if f"/{inside.relative_to(root)}" not in writable:
            _mount(path, None, "-o", "remount,bind,ro")


def _move_into(root: Path) -> None:
    os.chdir(root)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.pivot_root(b".", b".") != 0:
        raise OSError(ctypes.get_errno(), f"cannot pivot into {root}")
    subprocess.run(["umount", "--lazy", "."], check=True)
    os.chdir("/")


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _mount(source: str, target: Path | None, *options: str) -> None:
    operands = [source] if target is None else [source, str(target)]
    subprocess.run(["mount", *options, *operands], check=True)


def main() -> NoReturn:
    content = json.loads(sys.argv[2])
    enter(Path(sys.argv[1]), Container(**content))


if __name__ == "__main__":
    main()
