"""Who a host is: architecture, operating system, PCI devices, pending reboot."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass

from spark_deploy.facts.reading import HostFact
from spark_deploy.facts.sections import Sections, first, key_values

BOOT_ID = "/proc/sys/kernel/random/boot_id"

SCRIPT = r"""
echo '== uname'; uname -m; uname -r
echo '== os-release'; cat /etc/os-release
echo '== dgx-release'; [ -r /etc/dgx-release ] && grep -v SERIAL /etc/dgx-release
echo '== pci'
for device in /sys/bus/pci/devices/*; do
  [ -r "$device/vendor" ] || continue
  read -r v <"$device/vendor"; read -r d <"$device/device"
  echo "${v#0x}:${d#0x}"
done
echo '== kernels'
for image in /boot/vmlinuz-*; do [ -e "$image" ] && echo "${image##*/vmlinuz-}"; done
echo '== host-key'
ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub 2>/dev/null | cut -d' ' -f2
echo '== clock'; date +%s
echo '== reboot'; [ -e /run/reboot-required ] && { echo required; cat /run/reboot-required.pkgs; }
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
    newest_kernel: str  # newest installed; "" when /boot shows none
    reboot_required: bool
    reboot_packages: tuple[str, ...]
    clock_ahead_s: float = 0.0  # of the controller's; below zero: behind it

    @property
    def reboot_pending(self) -> str:
        """Why a reboot is pending, or an empty string."""
        if self.reboot_required:
            packages = ", ".join(self.reboot_packages) or "no package named"
            return f"/run/reboot-required is set ({packages})"
        if self.newest_kernel and self.newest_kernel != self.kernel:
            return f"kernel {self.newest_kernel} is installed, {self.kernel} is running"
        return ""


def parse(sections: Sections) -> HostIdentity:
    """Read the sections of ``SCRIPT``."""
    arch, kernel = [*sections.get("uname", ()), "", ""][:2]
    os_release = key_values(sections.get("os-release", ()))
    reboot = list(sections.get("reboot", ()))
    return HostIdentity(
        arch=arch,
        kernel=kernel,
        os_id=os_release.get("ID", ""),
        os_version=os_release.get("VERSION_ID", ""),
        os_name=os_release.get("PRETTY_NAME", ""),
        dgx_release=key_values(sections.get("dgx-release", ())),
        pci=tuple(sections.get("pci", ())),
        host_key=first(sections, "host-key"),
        newest_kernel=newest(list(sections.get("kernels", ())), like=kernel),
        reboot_required=bool(reboot),
        reboot_packages=tuple(sorted({line for line in reboot[1:] if line})),
        clock_ahead_s=float(clock) - time.time() if (clock := first(sections, "clock")) else 0.0,
    )


def newest(versions: list[str], like: str = "") -> str:
    """Return the newest version with the ending of ``like`` (``-nvidia``), else an empty string.

    A ``-generic`` kernel beside a running ``-nvidia`` one is not a pending update.
    """
    ending = like.rpartition("-")[2] if "-" in like else ""
    same = [v for v in versions if not ending or v.endswith(f"-{ending}")]
    return max(same, key=version_key, default="")


def version_key(version: str) -> tuple[int, ...]:
    """Order versions by their numbers: 6.17.0-1021-nvidia after 6.17.0-1004-nvidia."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


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
