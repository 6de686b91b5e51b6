"""Who a host is: architecture, operating system, PCI devices, the boot it runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass

from spark_contract.host.machine import (
    BOOT_ID,
    DRIVER_LIBRARIES,
    REBOOT_MARKER,
    REBOOT_PACKAGES,
    BootSigns,
    library_versions,
)

from spark_deploy.facts.machine.gpu import GpuState
from spark_deploy.facts.reading import HostFact
from spark_deploy.facts.sections import Sections, first, key_values

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
