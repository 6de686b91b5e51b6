"""Files that keep a host reachable when an engine takes all of its memory.

GPU memory of a GB10 is charged to no cgroup, so nothing can cap an engine from outside; what can
be done is to keep some memory for the login, and to choose whom an out-of-memory killer takes.
"""

from __future__ import annotations

from spark_contract.host.units import drop_in_dir

from spark_deploy.managed import ManagedFile

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
