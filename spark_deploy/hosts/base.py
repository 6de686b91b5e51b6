"""Packages, directories and host care that need no GPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.paths import (
    CONFIG_DIR,
    JOBS_DIR,
    PROOFS_DIR,
    RECEIPTS_DIR,
    RELEASES_DIR,
    STATE_DIR,
    SWITCH_DIR,
    TOOLS_DIR,
)

from spark_deploy.hosts.commands import log
from spark_deploy.hosts.facts import (
    FileStates,
    HostFact,
    build_script,
    first_line,
    parse_sections,
    read_fact,
)
from spark_deploy.hosts.files import put_files
from spark_deploy.hosts.host_errors import Commands, host_errors
from spark_deploy.hosts.packages import install, packages_script, parse_packages
from spark_deploy.hosts.payload import (
    COMPACTION_PATH,
    EARLYOOM_ARGUMENTS,
    EARLYOOM_PATH,
    KERNEL_COMPACTION,
    compaction_file,
    earlyoom_file,
    guarantee_files,
)
from spark_deploy.plan.machine import NJS, BasePlan
from spark_deploy.plan.managed_files import FileState, ManagedFile, differing

# One call of systemctl for all units, whose answer is a block for each.
_SHOW_UNITS = r"""
shown=$(systemctl show -p Id,UnitFileState,NeedDaemonReload,MainPID {units} 2>/dev/null)
told() {{
  printf '%s\n\n' "$shown" | awk -F= -v key="$1" -v units=" $* " '
    {{ of[$1] = $2 }}
    !NF {{ if (index(units, " " of["Id"] " ")) print of["Id"], of[key]; split("", of) }}'
}}
"""


_CARE_UNITS = "user.slice system.slice ssh.service earlyoom.service"


_CARE_SCRIPT = r"""
echo '== stale-units'; told NeedDaemonReload user.slice system.slice ssh.service
echo '== boot-target'; systemctl get-default
echo '== compaction'; cat /proc/sys/vm/compaction_proactiveness
echo '== earlyoom'
pid=$(told MainPID earlyoom.service | cut -d' ' -f2)
[ "${pid:-0}" != 0 ] && tr '\0' ' ' <"/proc/$pid/cmdline" | sed 's/^[^ ]* //; s/ *$//'; echo
"""


@dataclass(frozen=True, slots=True)
class Base:
    """State of the base role."""

    packages: dict[str, str]  # installed ones of those asked for
    directories: dict[str, tuple[str, str]]  # path: (mode "755", owner "root:root")
    files: dict[str, FileState]
    units: dict[str, str]  # unit: what is-enabled says ("masked", "static", ...)
    stale_units: tuple[str, ...]  # those whose files systemd has not read since they changed
    boot_target: str  # "graphical.target" | "multi-user.target"
    earlyoom: str  # arguments of the running earlyoom; "" when it does not run
    compaction_proactiveness: str  # of the running kernel


class BaseState(HostFact[Base]):
    """Everything the base role compares with its plan, in one command."""

    def command(
        self,
        packages: Sequence[str],
        directories: Sequence[str],
        files: Sequence[str],
        units: Sequence[str],
    ) -> str:
        places = " ".join(shlex.quote(path) for path in directories)
        names = " ".join(shlex.quote(unit) for unit in units)
        return build_script(
            packages_script(packages),
            f"echo '== directories'; stat -L -c '%F|%a|%U:%G|%n' -- {places} 2>/dev/null",
            f"echo '== files'; {FileStates().command(files)}",
            _SHOW_UNITS.format(units=f"{names} {_CARE_UNITS}"),
            f"echo '== units'; told UnitFileState {names}",
            _CARE_SCRIPT,
        )

    def process(self, output: list[str]) -> Base:
        found = parse_sections(output)
        return Base(
            packages=parse_packages(found.get("packages", ())),
            directories=parse_directories(found.get("directories", ())),
            files=FileStates().process(found.get("files", ())),
            stale_units=tuple(
                line.split()[0] for line in found.get("stale-units", ()) if line.endswith(" yes")
            ),
            boot_target=first_line(found, "boot-target"),
            earlyoom=first_line(found, "earlyoom"),
            compaction_proactiveness=first_line(found, "compaction"),
            units=dict([*line.split(), ""][:2] for line in found.get("units", ()) if line.split()),
        )


def parse_directories(lines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Read ``stat`` lines of directories; anything that is not one is left out."""
    found = {}
    for line in lines:
        kind, mode, owner, path = line.split("|", 3)
        if kind == "directory":
            found[path] = (mode, owner)
    return found


SLEEP_TARGETS = (
    "sleep.target",
    "suspend.target",
    "hibernate.target",
    "hybrid-sleep.target",
    "suspend-then-hibernate.target",
)


HOLD_PATH = "/etc/apt/apt.conf.d/52spark-hold-driver"


# unattended-upgrades takes regular expressions, matched at the start of a package's name.
HOLD_FILE = ManagedFile(
    HOLD_PATH,
    b"""// Managed by dgx-spark-deploy.
// Driver, kernel and CUDA are one set on this machine. Upgraded in halves they leave it without
// a GPU until the next reboot or longer, so only a person upgrades them.
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


def owned_directories(plan: BasePlan) -> dict[str, str]:
    """Return the directories we own and their modes; everybody may look into all but one.

    What an engine leaves in its cache, programs that run as its account say, reaches no user.
    """
    paths = plan.paths
    ours = (CONFIG_DIR, RELEASES_DIR, STATE_DIR, JOBS_DIR, PROOFS_DIR, RECEIPTS_DIR, SWITCH_DIR)
    return {
        paths.models_dir: "755",
        paths.sources_dir: "755",
        paths.cache_dir: "700",
        **dict.fromkeys((*ours, TOOLS_DIR), "755"),
    }


# Any of these brings the program that our gateway runs with a configuration of its own.
NGINX = ("nginx", "nginx-core", "nginx-full", "nginx-extras", "nginx-light")


# And any of these its JavaScript: a module fits only the nginx of its own archive.
NJS_MODULES = (NJS, "nginx-module-njs")


def planned_packages(plan: BasePlan) -> tuple[str, ...]:
    """List the packages of the plan and of what it switches on."""
    return (*plan.packages, *(["earlyoom"] if plan.earlyoom else []))


def fact_arguments(plan: BasePlan) -> dict[str, Any]:
    """Build the arguments of the one fact of this role."""
    return {
        "packages": (*planned_packages(plan), *NGINX, *NJS_MODULES),
        "directories": tuple(owned_directories(plan)),
        "files": (
            HOLD_PATH,
            EARLYOOM_PATH,
            COMPACTION_PATH,
            *(file.path for file in guarantee_files()),
        ),
        "units": SLEEP_TARGETS,
    }


def read_state(plan: BasePlan) -> Base:
    """Read what the host has of everything in ``plan``; one command for all operations."""
    return read_fact(BaseState, **fact_arguments(plan))


@operation()
@host_errors
def install_packages(plan: BasePlan) -> Commands:
    """Have every package of ``plan`` installed; what is there is never upgraded."""
    present = read_state(plan).packages
    missing = [package for package in planned_packages(plan) if package not in present]
    for alike in (NGINX, NJS_MODULES):
        if not present.keys().isdisjoint(alike):  # its owner's choice, used as it is
            missing = [package for package in missing if package not in alike]
    if not missing:
        host.noop(f"{len(planned_packages(plan))} packages are installed")
        return
    # Our gateway is an instance of its own; the package's default site has no business on :80.
    nginx = any(package.startswith("nginx") for package in missing)
    yield install(
        missing, plan.package_lock_wait_s, quiet_services=["nginx.service"] if nginx else []
    )


@operation()
@host_errors
def create_directories(plan: BasePlan) -> Commands:
    """Have the directories that hold models, state and tools."""
    present = read_state(plan).directories
    wrong = {
        path: mode
        for path, mode in owned_directories(plan).items()
        if present.get(path) != (mode, "root:root")
    }
    if not wrong:
        host.noop(f"{len(present)} directories are as planned")
        return
    for path, mode in wrong.items():
        yield f"install -d -o root -g root -m {mode} {shlex.quote(path)}"


@operation()
@host_errors
def hold_driver(plan: BasePlan) -> Commands:
    """Keep driver packages out of unattended upgrades, or let them in again."""
    files = read_state(plan).files
    if not plan.hold_driver_in_unattended_upgrades:
        if HOLD_PATH in files:
            yield StringCommand("rm", "-f", HOLD_PATH)
        else:
            host.noop("unattended upgrades are left alone")
        return
    wrong = differing([HOLD_FILE], files)
    if not wrong:
        host.noop("driver packages are held back from unattended upgrades")
        return
    yield put_files(wrong)


@operation()
@host_errors
def disable_sleep(plan: BasePlan) -> Commands:
    """Keep the host from suspending: a server that sleeps cannot be woken over the network."""
    units = read_state(plan).units
    awake = [target for target in SLEEP_TARGETS if units.get(target) != "masked"]
    if not plan.disable_sleep:
        host.noop("sleep is left as it is")
        return
    if not awake:
        host.noop("sleep is disabled")
        return
    yield StringCommand("systemctl", "mask", *awake)


@operation()
@host_errors
def protect_login(plan: BasePlan) -> Commands:
    """Guarantee memory to SSH and login sessions, or give the guarantee up again."""
    state, files = read_state(plan), guarantee_files()
    if plan.protect_login:
        wrong = differing(files, state.files)
        if wrong:
            yield put_files(wrong)
    else:
        wrong = tuple(file for file in files if file.path in state.files)
        if wrong:
            yield StringCommand("rm", "-f", *(file.path for file in wrong))
    # systemd tells by itself which files it has not read: so a run that died here is made good.
    if wrong or state.stale_units:
        yield "systemctl daemon-reload"
    else:
        host.noop("guaranteed" if plan.protect_login else "nothing is guaranteed")


@operation()
@host_errors
def set_compaction(plan: BasePlan) -> Commands:
    """Set how much the kernel compacts memory in the background, or restore its default."""
    state, wanted = read_state(plan), plan.compaction_proactiveness
    path = COMPACTION_PATH
    if wanted is None:
        if path not in state.files:
            host.noop("compaction is left as it is")
            return
        yield StringCommand("rm", "-f", path)
        # Then what other files set: the kernel keeps no record of the value before ours.
        yield f"sysctl -q vm.compaction_proactiveness={KERNEL_COMPACTION}"
        yield "/usr/lib/systemd/systemd-sysctl --prefix=/vm/compaction_proactiveness"
        return
    wrong = differing([compaction_file(wanted)], state.files)
    if wrong:
        yield put_files(wrong)
    if wrong or state.compaction_proactiveness != str(wanted):
        yield f"sysctl -q -p {path}"
    else:
        host.noop(f"compaction is at {wanted}")


@operation()
@host_errors
def set_boot_target(plan: BasePlan) -> Commands:
    """Boot without the desktop where that is wanted; a desktop in use is not ended."""
    target = read_state(plan).boot_target
    if not plan.headless or target == "multi-user.target":
        host.noop(f"boots into {target}")
        return
    log("takes effect at the next boot")
    yield "systemctl set-default multi-user.target"


@operation()
@host_errors
def run_earlyoom(plan: BasePlan) -> Commands:
    """Have earlyoom run with our preferences where it is wanted, decided from its arguments."""
    state, file = read_state(plan), earlyoom_file()
    if not plan.earlyoom:
        host.noop("earlyoom is not asked for")
        return
    wrong = differing([file], state.files)
    if wrong:
        yield put_files(wrong)
    if wrong or state.earlyoom != EARLYOOM_ARGUMENTS:
        yield "systemctl enable -q earlyoom && systemctl restart earlyoom"
    else:
        host.noop("earlyoom runs with our preferences")
