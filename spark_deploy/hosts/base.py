"""Install packages, create directories and protect the host; nothing here needs a GPU."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyinfra import host
from pyinfra.api import StringCommand
from spark_contract import paths
from spark_contract.units import drop_in_dir

from spark_deploy.hosts.commands import log
from spark_deploy.hosts.facts import HostFact, build_script, parse_sections, read_fact
from spark_deploy.hosts.files import place_files, remove_files, sync_files
from spark_deploy.hosts.operations import Commands, host_operation
from spark_deploy.hosts.packages import (
    INTERRUPTED_SCRIPT,
    install_command,
    packages_script,
    parse_packages,
)
from spark_deploy.plan.types import NJS, BasePlan, ManagedFile

# A single call to systemctl prints one block per unit.
_SHOW_UNITS = r"""
properties=$(systemctl show -p Id,UnitFileState,NeedDaemonReload,MainPID {units} 2>/dev/null)
property() {{
  printf '%s\n\n' "$properties" | awk -F= -v key="$1" -v units=" $* " '
    {{ value[$1] = $2 }}
    !NF && index(units, " " value["Id"] " ") {{ print value["Id"], value[key] }}
    !NF {{ split("", value) }}'
}}
"""
_TUNED_UNITS = "user.slice system.slice ssh.service earlyoom.service"
_TUNING_SCRIPT = r"""
echo '== stale-units'; property NeedDaemonReload user.slice system.slice ssh.service
echo '== boot-target'; systemctl get-default
echo '== compaction'; cat /proc/sys/vm/compaction_proactiveness
echo '== earlyoom'
pid=$(property MainPID earlyoom.service | cut -d' ' -f2)
[ "${pid:-0}" != 0 ] && tr '\0' ' ' <"/proc/$pid/cmdline" | sed 's/^[^ ]* //; s/ *$//'; echo
"""


@dataclass(frozen=True, slots=True)
class Base:
    packages: dict[str, str]  # requested packages that are installed
    interrupted: tuple[str, ...]  # half-installed packages that a deploy may repair
    directories: dict[str, tuple[str, str]]  # path: mode ("755") and owner ("root:root")
    units: dict[str, str]  # unit: result of is-enabled ("masked", "static", ...)
    stale_units: tuple[str, ...]  # units whose files changed since systemd read them
    boot_target: str  # "graphical.target" | "multi-user.target"
    earlyoom: str  # arguments of the running earlyoom; "" if it does not run
    compaction_proactiveness: str  # of the running kernel


class BaseState(HostFact[Base]):
    def command(
        self, packages: Sequence[str], directories: Sequence[str], units: Sequence[str]
    ) -> str:
        quoted_paths = " ".join(map(shlex.quote, directories))
        names = " ".join(map(shlex.quote, units))
        return build_script(
            packages_script(packages),
            INTERRUPTED_SCRIPT,
            f"echo '== directories'; stat -L -c '%F|%a|%U:%G|%n' -- {quoted_paths} 2>/dev/null",
            _SHOW_UNITS.format(units=f"{names} {_TUNED_UNITS}"),
            f"echo '== units'; property UnitFileState {names}",
            _TUNING_SCRIPT,
        )

    def process(self, output: list[str]) -> Base:
        sections = parse_sections(output)
        entries = (line.split("|", 3) for line in sections["directories"])
        stale = (line.split()[0] for line in sections["stale-units"] if line.endswith(" yes"))
        # A unit without a file has no state.
        units = ([*line.split(), ""] for line in sections["units"] if line.split())
        return Base(
            packages=parse_packages(sections["packages"]),
            interrupted=tuple(sections["interrupted"]),
            directories={
                path: (mode, owner) for kind, mode, owner, path in entries if kind == "directory"
            },
            stale_units=tuple(stale),
            boot_target=sections.first("boot-target"),
            earlyoom=sections.first("earlyoom"),
            compaction_proactiveness=sections.first("compaction"),
            units={name: state for name, state, *_ in units},
        )


SLEEP_TARGETS = tuple(
    f"{kind}.target"
    for kind in ("sleep", "suspend", "hibernate", "hybrid-sleep", "suspend-then-hibernate")
)
HOLD_PATH = "/etc/apt/apt.conf.d/52spark-hold-driver"
# Regular expressions, matched at the start of a package name.
HOLD_FILE = ManagedFile(
    HOLD_PATH,
    b"""// Managed by dgx-spark-deploy.
// Driver, kernel and CUDA must match. A partial upgrade disables the GPU, so upgrade them by hand.
Unattended-Upgrade::Package-Blacklist {
    "nvidia-";
    "libnvidia-";
    "xserver-xorg-video-nvidia";
    "cuda-";
    "linux-nvidia";
    "linux-image-.*nvidia";
    "linux-modules-.*nvidia";
    "linux-headers-.*nvidia";
    "linux-tools-.*nvidia";
};
""",
)

# No cgroup contains the GPU memory of a GB10, so systemd cannot limit an engine; but it can reserve
# memory for logins, and an out-of-memory killer can prefer an engine. A guarantee is effective only
# if all parent cgroups grant it too (systemd.resource-control(5)), and logind moves shells from
# ssh.service to user.slice.
_GUARANTEES = {
    "user.slice": ("Slice", "2G"),
    "system.slice": ("Slice", "512M"),
    "ssh.service": ("Service", "256M"),
}
_MANAGED = "# Managed by dgx-spark-deploy.\n"
EARLYOOM_PATH = "/etc/default/earlyoom"
# earlyoom acts if less than 2 % of memory is available. `-s 100,100` (SIGTERM, SIGKILL) ignores
# swap, which would delay the kill. `--prefer` names the engine, because resident size excludes GPU
# memory.
EARLYOOM_ARGUMENTS = (
    "-r 3600 -m 2 -s 100,100 --prefer ^(VLLM|vllm) --avoid ^(sshd|systemd|dockerd|containerd|nginx)"
)
EARLYOOM_FILE = ManagedFile(
    EARLYOOM_PATH, f'{_MANAGED}EARLYOOM_ARGS="{EARLYOOM_ARGUMENTS}"\n'.encode()
)
COMPACTION_PATH = "/etc/sysctl.d/99-spark-compaction.conf"
_KERNEL_COMPACTION = 20  # default of vm.compaction_proactiveness
GUARANTEE_FILES = tuple(
    ManagedFile(
        f"{drop_in_dir(unit)}/50-spark.conf", f"{_MANAGED}[{section}]\nMemoryMin={size}\n".encode()
    )
    for unit, (section, size) in _GUARANTEES.items()
)
MANAGED_PATHS = (
    HOLD_PATH, EARLYOOM_PATH, COMPACTION_PATH, *(file.path for file in GUARANTEE_FILES)
)  # fmt: skip


def compaction_file(proactiveness: int) -> ManagedFile:
    content = f"{_MANAGED}vm.compaction_proactiveness = {proactiveness}\n"
    return ManagedFile(COMPACTION_PATH, content.encode())


def managed_directories(plan: BasePlan) -> dict[str, str]:
    """Return the managed directories and their modes; only the engines' cache is private."""
    public = (
        plan.paths.models_dir, plan.paths.sources_dir, paths.CONFIG_DIR, paths.RELEASES_DIR,
        paths.STATE_DIR, paths.JOBS_DIR, paths.PROOFS_DIR, paths.RECEIPTS_DIR,
        paths.SWITCH_DIR, paths.TOOLS_DIR,
    )  # fmt: skip
    return {plan.paths.cache_dir: "700", **dict.fromkeys(public, "755")}


NGINX = ("nginx", "nginx-core", "nginx-full", "nginx-extras", "nginx-light")
# Must be from the same archive as nginx.
NJS_MODULES = (NJS, "nginx-module-njs")


def planned_packages(plan: BasePlan) -> tuple[str, ...]:
    return (*plan.packages, *(["earlyoom"] if plan.settings.earlyoom else []))


def fact_arguments(plan: BasePlan) -> dict[str, Any]:
    return {
        "packages": (*planned_packages(plan), *NGINX, *NJS_MODULES),
        "directories": tuple(managed_directories(plan)),
        "units": SLEEP_TARGETS,
    }


def read_state(plan: BasePlan) -> Base:
    return read_fact(BaseState, **fact_arguments(plan))


@host_operation
def install_packages(plan: BasePlan, packages: Sequence[str] = ()) -> Commands:
    state, planned = read_state(plan), packages or planned_packages(plan)
    missing = [package for package in planned if package not in state.packages]
    for variants in (NGINX, NJS_MODULES):
        if any(variant in state.packages for variant in variants):
            missing = [package for package in missing if package not in variants]
    if not packages:
        missing += [package for package in state.interrupted if package not in missing]
    if not missing:
        host.noop(f"{len(planned)} packages are installed")
        return
    # nginx's default site must not open port 80.
    installs_nginx = any(package.startswith("nginx") for package in missing)
    quiet_services = ["nginx.service"] if installs_nginx else []
    yield install_command(missing, plan.settings.package_lock_wait_s, quiet_services)


@host_operation
def create_directories(plan: BasePlan) -> Commands:
    present = read_state(plan).directories
    to_repair = {
        path: mode
        for path, mode in managed_directories(plan).items()
        if present.get(path) != (mode, "root:root")
    }
    if not to_repair:
        host.noop(f"{len(present)} directories have the planned mode and owner")
    for path, mode in to_repair.items():
        yield f"install -d -o root -g root -m {mode} {shlex.quote(path)}"


@host_operation
def hold_driver(plan: BasePlan) -> Commands:
    is_held = "hold-driver" not in plan.settings.skip
    if not (yield from sync_files((HOLD_FILE,), enabled=is_held)):
        behavior = "skip driver packages" if is_held else "are not managed"
        host.noop(f"unattended upgrades {behavior}")


@host_operation
def disable_sleep(plan: BasePlan) -> Commands:
    """Mask the sleep targets, because a sleeping server cannot be woken over the network."""
    units = read_state(plan).units
    unmasked = [target for target in SLEEP_TARGETS if units.get(target) != "masked"]
    is_managed = "disable-sleep" not in plan.settings.skip
    if is_managed and unmasked:
        yield StringCommand("systemctl", "mask", *unmasked)
    else:
        host.noop("sleep is disabled" if is_managed else "sleep is not managed")


@host_operation
def protect_login(plan: BasePlan) -> Commands:
    is_protected = "protect-login" not in plan.settings.skip
    changed = yield from sync_files(GUARANTEE_FILES, enabled=is_protected)
    # Units are stale if a run was interrupted before the reload.
    if changed or read_state(plan).stale_units:
        yield "systemctl daemon-reload"
    else:
        host.noop(
            "login sessions have guaranteed memory" if is_protected else "memory is not managed"
        )


@host_operation
def set_compaction(plan: BasePlan) -> Commands:
    proactiveness = plan.settings.compaction_proactiveness
    if proactiveness is None:
        if not (yield from remove_files((COMPACTION_PATH,))):
            host.noop("compaction is not managed")
            return
        # Set the kernel's default, then apply the owner's files.
        yield f"sysctl -q vm.compaction_proactiveness={_KERNEL_COMPACTION}"
        yield "/usr/lib/systemd/systemd-sysctl --prefix=/vm/compaction_proactiveness"
        return
    changed = yield from place_files((compaction_file(proactiveness),))
    if changed or read_state(plan).compaction_proactiveness != str(proactiveness):
        yield f"sysctl -q -p {COMPACTION_PATH}"
    else:
        host.noop(f"compaction is set to {proactiveness}")


@host_operation
def set_boot_target(plan: BasePlan) -> Commands:
    """Boot without a desktop if ``headless`` is set; a running desktop is not stopped."""
    target = read_state(plan).boot_target
    if not plan.settings.headless or target == "multi-user.target":
        host.noop(f"boots into {target}")
        return
    log("takes effect at the next boot")
    yield "systemctl set-default multi-user.target"


@host_operation
def run_earlyoom(plan: BasePlan) -> Commands:
    if not plan.settings.earlyoom:
        host.noop("earlyoom is not enabled")
        return
    changed = yield from place_files((EARLYOOM_FILE,))
    if changed or read_state(plan).earlyoom != EARLYOOM_ARGUMENTS:
        yield "systemctl enable -q earlyoom && systemctl restart earlyoom"
    else:
        host.noop("earlyoom is running with our arguments")
