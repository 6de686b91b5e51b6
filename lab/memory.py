"""Simulates free memory blocks and kernel tunables: guests share the machine's page cache.

Units with ProtectKernelTunables get a new /proc without the bind mounts: systemd passes them
SPARK_PROC.
"""

import shlex
import shutil
from pathlib import Path

BUDDYINFO = Path(__file__).with_name("buddyinfo")
PROC = "var/lib/labstub/proc"
_FILES = {
    "buddyinfo": "",
    "sys/vm/drop_caches": "",
    "sys/vm/compact_memory": "",
    "sys/vm/compaction_proactiveness": "20\n",
}
_UNIT = """\
[Unit]
Description=Show free memory blocks of a Spark (virtual lab)
DefaultDependencies=no
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
"""


def write_proc(root: Path) -> None:
    for name, text in _FILES.items():
        place = root / PROC / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    shutil.copy(BUDDYINFO / "healthy.txt", root / PROC / "buddyinfo")


def write_memory(root: Path) -> None:
    write_proc(root)
    units = root / "etc/systemd/system"
    binds = [f"ExecStart=/bin/mount --bind /{PROC}/{name} /proc/{name}\n" for name in _FILES]
    (units / "lab-memory.service").write_text(_UNIT + "".join(binds))
    wants = units / "sysinit.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "lab-memory.service").symlink_to("../lab-memory.service")
    manager = root / "etc/systemd/system.conf.d/50-lab-memory.conf"
    manager.parent.mkdir(exist_ok=True)
    manager.write_text(f"[Manager]\nDefaultEnvironment=SPARK_PROC=/{PROC}\n")


def limit_command(total_gib: float) -> str:
    """Return a shell command that shows this memory to host tools of a guest."""
    fields = ("MemTotal", "MemFree", "MemAvailable")
    meminfo = [*(f"{name}: {round(total_gib * 2**20)} kB" for name in fields), "Cached: 0 kB"]
    folder, path = "/etc/systemd/system.conf.d", "/etc/lab-meminfo"
    return (
        f"printf '%s\\n' {shlex.join(meminfo)} > {path}; mkdir -p {folder}; "
        f"printf '%s\\n' '[Manager]' DefaultEnvironment=SPARK_MEMINFO={path} "
        f"> {folder}/60-lab-meminfo.conf; systemctl daemon-reexec"
    )
