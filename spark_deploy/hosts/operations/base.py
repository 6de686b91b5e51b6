"""Packages, directories and host care that need no GPU."""

from __future__ import annotations

import shlex
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

from spark_deploy.hosts.facts.fact_cache import read
from spark_deploy.hosts.facts.packages import Base, BaseState
from spark_deploy.hosts.operations import apt
from spark_deploy.hosts.operations.commands import log
from spark_deploy.hosts.operations.files import put
from spark_deploy.hosts.operations.host_errors import Commands, host_errors
from spark_deploy.hosts.payload import content
from spark_deploy.plan.machine import NJS, BasePlan
from spark_deploy.plan.managed_files import ManagedFile, differing

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


def directories(plan: BasePlan) -> dict[str, str]:
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


def wanted_packages(plan: BasePlan) -> tuple[str, ...]:
    """List the packages of the plan and of what it switches on."""
    return (*plan.packages, *(["earlyoom"] if plan.earlyoom else []))


def question(plan: BasePlan) -> dict[str, Any]:
    """Build the arguments of the one fact of this role."""
    return {
        "packages": (*wanted_packages(plan), *NGINX, *NJS_MODULES),
        "directories": tuple(directories(plan)),
        "files": (
            HOLD_PATH,
            content.EARLYOOM_PATH,
            content.COMPACTION_PATH,
            *(file.path for file in content.guarantee_files()),
        ),
        "units": SLEEP_TARGETS,
    }


def state_of(plan: BasePlan) -> Base:
    """Read what the host has of everything in ``plan``; one command for all operations."""
    return read(BaseState, **question(plan))


@operation()
@host_errors
def packages(plan: BasePlan) -> Commands:
    """Have every package of ``plan`` installed; what is there is never upgraded."""
    present = state_of(plan).packages
    missing = [package for package in wanted_packages(plan) if package not in present]
    for alike in (NGINX, NJS_MODULES):
        if not present.keys().isdisjoint(alike):  # its owner's choice, used as it is
            missing = [package for package in missing if package not in alike]
    if not missing:
        host.noop(f"{len(wanted_packages(plan))} packages are installed")
        return
    # Our gateway is an instance of its own; the package's default site has no business on :80.
    nginx = any(package.startswith("nginx") for package in missing)
    yield apt.install(
        missing, plan.package_lock_wait_s, quiet_services=["nginx.service"] if nginx else []
    )


@operation()
@host_errors
def owned_directories(plan: BasePlan) -> Commands:
    """Have the directories that hold models, state and tools."""
    present = state_of(plan).directories
    wrong = {
        path: mode
        for path, mode in directories(plan).items()
        if present.get(path) != (mode, "root:root")
    }
    if not wrong:
        host.noop(f"{len(present)} directories are as planned")
        return
    for path, mode in wrong.items():
        yield f"install -d -o root -g root -m {mode} {shlex.quote(path)}"


@operation()
@host_errors
def driver_hold(plan: BasePlan) -> Commands:
    """Keep driver packages out of unattended upgrades, or let them in again."""
    files = state_of(plan).files
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
    yield put(wrong)


@operation()
@host_errors
def no_sleep(plan: BasePlan) -> Commands:
    """Keep the host from suspending: a server that sleeps cannot be woken over the network."""
    units = state_of(plan).units
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
def login_memory(plan: BasePlan) -> Commands:
    """Guarantee memory to SSH and login sessions, or give the guarantee up again."""
    state, files = state_of(plan), content.guarantee_files()
    if plan.protect_login:
        wrong = differing(files, state.files)
        if wrong:
            yield put(wrong)
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
def compaction(plan: BasePlan) -> Commands:
    """Set how much the kernel compacts memory in the background, or restore its default."""
    state, wanted = state_of(plan), plan.compaction_proactiveness
    path = content.COMPACTION_PATH
    if wanted is None:
        if path not in state.files:
            host.noop("compaction is left as it is")
            return
        yield StringCommand("rm", "-f", path)
        # Then what other files set: the kernel keeps no record of the value before ours.
        yield f"sysctl -q vm.compaction_proactiveness={content.KERNEL_COMPACTION}"
        yield "/usr/lib/systemd/systemd-sysctl --prefix=/vm/compaction_proactiveness"
        return
    wrong = differing([content.compaction_file(wanted)], state.files)
    if wrong:
        yield put(wrong)
    if wrong or state.compaction_proactiveness != str(wanted):
        yield f"sysctl -q -p {path}"
    else:
        host.noop(f"compaction is at {wanted}")


@operation()
@host_errors
def boot_target(plan: BasePlan) -> Commands:
    """Boot without the desktop where that is wanted; a desktop in use is not ended."""
    target = state_of(plan).boot_target
    if not plan.headless or target == "multi-user.target":
        host.noop(f"boots into {target}")
        return
    log("takes effect at the next boot")
    yield "systemctl set-default multi-user.target"


@operation()
@host_errors
def early_killer(plan: BasePlan) -> Commands:
    """Have earlyoom run with our preferences where it is wanted, decided from its arguments."""
    state, file = state_of(plan), content.earlyoom_file()
    if not plan.earlyoom:
        host.noop("earlyoom is not asked for")
        return
    wrong = differing([file], state.files)
    if wrong:
        yield put(wrong)
    if wrong or state.earlyoom != content.EARLYOOM_ARGUMENTS:
        yield "systemctl enable -q earlyoom && systemctl restart earlyoom"
    else:
        host.noop("earlyoom runs with our preferences")
