import json
import os
import pwd
import resource
import socket
import stat
import sys
from pathlib import Path
from typing import Any

from proofs.container import DEVICES, Container

READ_ONLY = ("/", "/usr", "/etc", "/var/tmp", "/model", "/dev", "/run", "/sys")
WRITABLE = ("/cache", "/run/spark", "/tmp", "/dev/shm")
EXECUTABLE = ("/cache", "/tmp")
OUTSIDE = ("192.0.2.1", 80)  # TEST-NET-1, RFC 5737


def read_rights() -> dict[str, Any]:
    fields = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {
        "user": [os.getuid(), os.geteuid(), os.getgid()],
        "groups": os.getgroups(),
        "account": _find_account(),
        "capabilities": {
            name: fields[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")
        },
        "no_new_privileges": fields["NoNewPrivs"],
        "writable_mounts": sorted(words[4] for words in mounts if "ro" not in words[5].split(",")),
        "writes": {path: _try_write(Path(path)) for path in (*READ_ONLY, *WRITABLE)},
        "executes": {path: _try_execute(Path(path)) for path in EXECUTABLE},
        "tmpfs_bytes": {path: _size_bytes(path) for path in ("/tmp", "/dev/shm")},
        "max_processes": resource.getrlimit(resource.RLIMIT_NPROC),
        "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "connect_outside": _try_connect(),
        "listens_on_loopback": _try_listen(),
        "devices": sorted(
            path.name for path in Path("/dev").iterdir() if stat.S_ISCHR(path.lstat().st_mode)
        ),
        "environment": sorted(os.environ),
    }


def _find_account() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def _try_write(folder: Path) -> str:
    path = folder / f".probe-{os.getpid()}"
    try:
        path.touch()
    except OSError as error:
        return error.strerror
    path.unlink()
    return "written"


def _try_execute(folder: Path) -> bool:
    path = folder / f".probe-{os.getpid()}"
    try:
        path.write_text("#!/bin/sh\n")
        path.chmod(0o700)
        return os.spawnv(os.P_WAIT, str(path), [str(path)]) == 0
    finally:
        path.unlink(missing_ok=True)


def _size_bytes(path: str) -> int:
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def _try_connect() -> str:
    with socket.socket() as client:
        client.settimeout(2)
        try:
            client.connect(OUTSIDE)
        except OSError as error:
            return error.strerror or str(error)
    return "connected"


def _try_listen() -> bool:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2),
    ):
        return True


def judge_rights(rights: dict[str, Any], engine: Container) -> dict[str, bool]:
    writable = {target for _, target, read_only in engine.mounts if not read_only}
    writes, mounts = rights["writes"], {"/proc", *writable, *engine.tmpfs}
    refused = {writes[path] for path in READ_ONLY}
    return {
        "the process runs as an unnamed user and group, without further groups": (
            rights["user"] == [engine.user, engine.user, engine.group]
            and (rights["account"], rights["groups"]) == (None, [])
        ),
        "the process has no capabilities and cannot gain any": (
            set(rights["capabilities"].values()) == {"0" * 16}
            and rights["no_new_privileges"] == "1"
        ),
        "only cache, socket directory and tmpfs are writable": (
            set(rights["writable_mounts"]) == mounts
            and refused <= {"Read-only file system", "Permission denied"}
            and writes["/var/tmp"] == writes["/model"] == "Read-only file system"
            and {writes[path] for path in WRITABLE} == {"written"}
        ),
        "files written to the cache and /tmp can be executed": all(rights["executes"].values()),
        "/tmp and /dev/shm have size limits": (
            rights["tmpfs_bytes"] == {"/tmp": 4 << 30, "/dev/shm": 2 << 30}
        ),
        "loopback is the only network": (
            rights["interfaces"] == ["lo"]
            and rights["listens_on_loopback"]
            and rights["connect_outside"] == "Network is unreachable"
        ),
        "only processes of the container are visible, and their number is limited": (
            rights["processes"][0] == 1
            and len(rights["processes"]) <= 2
            and rights["max_processes"] == [engine.max_processes] * 2
        ),
        "only the GPU's device files and standard devices exist": all(
            name in DEVICES or name.startswith("nvidia") for name in rights["devices"]
        ),
    }


def run_kernels() -> dict[str, Any]:
    import torch
    from spark_vllm.head.choice import read_table, tile_for
    from spark_vllm.head.compute import dequantize_rows, quantize_rows
    from spark_vllm.head.kernel import logits

    torch.manual_seed(0)
    weight = torch.randn(2000, 1024, device="cuda").bfloat16()
    x = torch.randn(9, 1024, device="cuda").bfloat16()
    values, scales = quantize_rows(weight)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    tile = tile_for(len(x), read_table()[capability])
    compiled = torch.compile(lambda x: torch.softmax(x @ weight.t(), -1).float().sum(-1))
    dequantised = dequantize_rows(values, scales, x.shape[1]).double()
    return {
        "gpu": torch.cuda.get_device_name(),
        "cublas_error": _error(x @ weight.t(), x.double() @ weight.double().t()),
        "triton_error": _error(logits(x, values, scales, tile, 4), x.double() @ dequantised.t()),
        "inductor_error": _error(compiled(x), torch.ones(len(x), device="cuda").double()),
        "cached_libraries": {path: _count_libraries(path) for path in ("/cache", "/tmp")},
    }


def _error(value: Any, reference: Any) -> float:
    return float((value.double() - reference).norm() / reference.norm())


def _count_libraries(folder: str) -> int:
    return sum(path.suffix in (".so", ".cubin") for path in Path(folder).rglob("*"))


def main() -> None:
    report = read_rights()
    if "--kernels" in sys.argv:
        report["kernels"] = run_kernels()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
