"""How the login user gets in and becomes root."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass

from spark_contract.machine import (
    BOOT_ID,
    DRIVER_LIBRARIES,
    REBOOT_MARKER,
    REBOOT_PACKAGES,
    BootSigns,
    library_versions,
)

from spark_deploy.hosts.facts import reading
from spark_deploy.hosts.facts.gpu import GpuState
from spark_deploy.hosts.facts.reading import HostFact, Sections, first, key_values

SCRIPT = rf"""
echo '== uname'; uname -m; uname -r
echo '== kernel-parameters'; cat /proc/cmdline
echo '== os-release'; cat /etc/os-release
echo '== dgx-release'; [ -r /etc/dgx-release ] && grep -v SERIAL /etc/dgx-release
echo '== pci'
for device in /sys/bus/pci/devices/*; do
  [ -r "$device/vendor" ] || continue
  read -r v <"$device/vendor"; read -r d <"$device/device"
  echo "${{v#0x}}:${{d#0x}}"
done
echo '== kernels'
for image in /boot/vmlinuz-*; do [ -e "$image" ] && echo "${{image##*/vmlinuz-}}"; done
echo '== host-key'
ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub 2>/dev/null | cut -d' ' -f2
echo '== clock'; date +%s
echo '== reboot'; [ -e {REBOOT_MARKER} ] && {{ echo required; cat {REBOOT_PACKAGES}; }}
echo '== driver-libraries'; ls {DRIVER_LIBRARIES} 2>/dev/null
"""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """What the host says about itself, without asking any driver."""

    arch: str
    kernel: str
    os_id: str
    os_version: str
    os_name: str
    dgx_release: dict[str, str]  # empty: no /etc/dgx-release
    pci: tuple[str, ...]  # vendor:device of each function, as lspci -n prints it
    host_key: str  # fingerprint of the key that SSH shows; "" where there is none
    boot: BootSigns
    kernel_parameters: tuple[str, ...] = ()  # what this boot was started with
    clock_ahead_s: float = 0.0  # of the controller's; below zero: behind it


def parse(sections: Sections, gpu: GpuState) -> HostIdentity:
    """Read the sections of ``SCRIPT``, with what the driver said."""
    arch, kernel = [*sections.get("uname", ()), "", ""][:2]
    os_release = key_values(sections.get("os-release", ()))
    reboot = list(sections.get("reboot", ()))
    libraries = library_versions(sections.get("driver-libraries", ()))
    return HostIdentity(
        arch=arch,
        kernel=kernel,
        os_id=os_release.get("ID", ""),
        os_version=os_release.get("VERSION_ID", ""),
        os_name=os_release.get("PRETTY_NAME", ""),
        dgx_release=key_values(sections.get("dgx-release", ())),
        pci=tuple(sections.get("pci", ())),
        host_key=first(sections, "host-key"),
        boot=BootSigns(
            kernel=kernel,
            kernels=tuple(sections.get("kernels", ())),
            marked=bool(reboot),
            packages=tuple(line for line in reboot[1:] if line),
            module=gpu.module_version,
            libraries=libraries or tuple(one.driver_version for one in gpu.gpus),
            mismatch=gpu.smi == "mismatch",
        ),
        kernel_parameters=tuple(first(sections, "kernel-parameters").split()),
        clock_ahead_s=float(clock) - time.time() if (clock := first(sections, "clock")) else 0.0,
    )


class RebootedFor(HostFact[str]):
    """The reason of the last reboot of ours that is still pending; empty when there is none.

    It is written down before the reboot, under the id of the boot that was to end: while that one
    goes on, the reboot never came about, and nothing was tried.
    """

    default = str

    def command(self, path: str) -> str:
        marker = shlex.quote(path)
        return (
            f'[ -f {marker} ] && [ "$(head -n 1 {marker})" != "$(cat {BOOT_ID})" ] '
            f"&& tail -n +2 {marker} || true"
        )

    def process(self, output: Iterable[str]) -> str:
        return "\n".join(output).strip()


ACCOUNT = "spark-deploy"  # made by bootstrap, for deploys alone
ACCOUNT_HOME = "/var/lib/spark-deploy"
ACCOUNT_KEYS = f"{ACCOUNT_HOME}/.ssh/authorized_keys"


@dataclass(frozen=True, slots=True)
class Access:
    """Key and sudo of the login user."""

    user: str
    is_root: bool
    key_installed: bool
    sudo_free: bool  # sudo asks for no password
    sudo_there: bool
    sudoers: str | None  # our file; None: absent, or not readable without a password
    came_from: str = ""  # address of this login, as the host sees it
    account_key: str = ""  # line of authorized_keys with our key, of the account for deploys
    account_there: bool = False


class LoginAccess(HostFact[Access]):
    """Look at key and sudo of the login user, as that user, and at the account for deploys."""

    def command(self, public_key: str, sudoers_path: str) -> str:
        # Type and body of the key; the comment behind them is anybody's.
        body = shlex.quote(" ".join(public_key.split()[:2]))
        keys = (
            f"echo '== key'; grep -cF -- {body} ~/.ssh/authorized_keys 2>/dev/null",
            f"echo '== account'; grep -F -- {body} {ACCOUNT_KEYS} 2>/dev/null | head -n 1",
        )
        return reading.script(
            "echo '== user'; id -un; id -u",
            *(keys if public_key else ()),  # grep finds an empty text in every line
            "echo '== sudo'; command -v sudo >/dev/null && echo there",
            # -k: at this machine a password typed minutes ago would count for a while.
            "sudo -k -n true 2>/dev/null && echo free",
            f"echo '== sudoers'; sudo -n cat {shlex.quote(sudoers_path)} 2>/dev/null",
            "echo '== from'; echo \"${SSH_CONNECTION%% *}\"",
            f"echo '== account-there'; getent passwd {ACCOUNT}",
        )

    def process(self, output: list[str]) -> Access:
        found = reading.whole(output)
        user, uid = [*found.get("user", ()), "", ""][:2]
        sudo = found.get("sudo", ())
        sudoers = found.get("sudoers", ())
        return Access(
            user=user,
            is_root=uid == "0",
            key_installed=reading.first(found, "key") not in ("", "0"),
            sudo_free=uid == "0" or "free" in sudo,
            sudo_there="there" in sudo,
            sudoers="\n".join(sudoers) + "\n" if sudoers else None,
            came_from=reading.first(found, "from").partition("%")[0],
            account_key=reading.first(found, "account"),
            account_there=bool(found.get("account-there")),
        )
