import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.content import cached, content_key
from lab.distribution import Distribution
from lab.paths import USER, LabPaths
from lab.shell import run

DRIVER_VERSION = "580.159.03+labstub"

_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {version}  Release Build  "
    "(virtual lab)\nGCC version:  none (virtual lab)\n"
)


@dataclass(frozen=True, slots=True)
class _PciFunction:
    address: str
    vendor: str
    device: str
    class_code: str
    revision: str = "00"


# As on a Spark: GPU, the four functions of the network adapter, 10 GbE, Wi-Fi.
_FUNCTIONS = (
    _PciFunction("000f:01:00.0", "10de", "2e12", "030000", "a1"),
    _PciFunction("0000:01:00.0", "15b3", "1021", "020000"),
    _PciFunction("0000:01:00.1", "15b3", "1021", "020000"),
    _PciFunction("0002:01:00.0", "15b3", "1021", "020000"),
    _PciFunction("0002:01:00.1", "15b3", "1021", "020000"),
    _PciFunction("0007:01:00.0", "10ec", "8127", "020000", "05"),
    _PciFunction("0009:01:00.0", "14c3", "7925", "028000"),
)


def _config_space(function: _PciFunction) -> bytes:  # PCI 3.0, section 6.1
    header = bytearray(64)
    header[0:2] = int(function.vendor, 16).to_bytes(2, "little")
    header[2:4] = int(function.device, 16).to_bytes(2, "little")
    header[8] = int(function.revision, 16)
    header[9:12] = int(function.class_code, 16).to_bytes(3, "little")
    header[0x2C:0x2E] = header[0:2]
    return bytes(header)


def _write_pci(directory: Path) -> None:
    for function in _FUNCTIONS:
        home = directory / function.address
        home.mkdir(parents=True, exist_ok=True)
        texts = {
            "vendor": f"0x{function.vendor}",
            "device": f"0x{function.device}",
            "class": f"0x{function.class_code}",
            "revision": f"0x{function.revision}",
            "subsystem_vendor": f"0x{function.vendor}",
            "subsystem_device": "0x0000",
            "irq": "0",
            "resource": "\n".join(["0x0000000000000000 " * 2 + "0x0000000000000000"] * 7),
        }
        for name, text in texts.items():
            (home / name).write_text(text + "\n")
        (home / "config").write_bytes(_config_space(function))


def _write_hardware(root: Path) -> None:
    _write_pci(root / "usr/lib/labstub/pci-devices")
    driver = root / "usr/lib/labstub/proc-driver/nvidia"
    driver.mkdir(parents=True, exist_ok=True)
    (driver / "version").write_text(_DRIVER.format(version=DRIVER_VERSION))


PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "openssh-server", "iproute2", "python3",
    "sudo", "ca-certificates", "curl", "gnupg", "iptables", "kmod", "procps", "netbase", "less",
    "pciutils", "iputils-ping", "e2fsprogs", "tzdata",
)  # fmt: skip

MASKED = (
    "getty@tty1.service", "console-getty.service", "apt-daily.timer", "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer", "fstrim.timer", "e2scrub_reap.service", "e2scrub_all.timer",
    "systemd-networkd-wait-online.service",
)  # fmt: skip

_HOST_KEYS_UNIT = """\
[Unit]
Description=Generate SSH host keys
Before=ssh.service
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -A

[Install]
WantedBy=ssh.service
"""

_HARDWARE_UNIT = """\
[Unit]
Description=Show the hardware of a Spark (virtual lab)
DefaultDependencies=no
Before=sysinit.target
ConditionPathExists=/usr/lib/labstub/proc-driver

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/mount --bind /usr/lib/labstub/proc-driver /proc/driver
ExecStart=/bin/mount --bind /usr/lib/labstub/pci-devices /sys/bus/pci/devices

[Install]
WantedBy=sysinit.target
"""


def bootstrap(paths: LabPaths, distribution: Distribution) -> Path:
    debs = debs_of(paths, distribution)
    debs.mkdir(parents=True, exist_ok=True)
    key = content_key(debs.name, distribution.mirror, distribution.deb_arch, PACKAGES)

    def make(target: Path) -> None:
        source = f"deb {distribution.mirror} {distribution.codename} " + (
            distribution.components.replace(",", " ")
        )
        unpack_release(target, distribution.codename, PACKAGES, source, keep=debs)

    return cached(paths.cache / f"bootstrap-{key}", make)


def debs_of(paths: LabPaths, distribution: Distribution) -> Path:
    return paths.cache / f"debootstrap-debs-{distribution.codename}"


def unpack_release(
    target: Path, suite: str, packages: Sequence[str], source: str | None, keep: Path | None = None
) -> None:
    """Unpack a small Debian or Ubuntu.

    ``source`` is a line of sources.list, None for Debian's default; ``keep`` gets the downloads.
    """
    # No fsync: an incomplete tree is rebuilt anyway.
    options = ["--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--quiet"]
    options += ["--skip=essential/unlink,cleanup/apt/cache", f"--include={','.join(packages)}"]
    options += ['--aptopt=APT::Sandbox::User "root"']
    run(["mmdebstrap", *options, suite, target, *([source] if source else [])])
    for place in ("etc/apt/apt.conf.d", "etc/dpkg/dpkg.cfg.d"):
        (target / place / "99mmdebstrap").unlink()
    for archive in (target / "var/cache/apt/archives").glob("*.deb"):
        if keep:
            shutil.move(archive, keep / archive.name)
        else:
            archive.unlink()
    for index in (target / "var/cache/apt").glob("*.bin"):
        index.unlink()


def base_place(paths: LabPaths, tree: Path, stub_debs: Sequence[Path]) -> Path:
    key = content_key(
        tree.name, [deb.name for deb in stub_debs], trees=[Path(__file__), *stub_debs]
    )
    return paths.cache / f"base-{key}"


def base(paths: LabPaths, tree: Path, stub_debs: Sequence[Path]) -> Path:
    def make(target: Path) -> None:
        run(["cp", "-a", "--reflink=auto", tree, target])
        _forget_identity(target)
        _write_hardware(target)
        _install_stubs(target, stub_debs)
        _configure(target)

    return cached(base_place(paths, tree, stub_debs), make)


def _forget_identity(root: Path) -> None:
    (root / "etc/machine-id").write_text("")
    (root / "var/lib/dbus/machine-id").unlink(missing_ok=True)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()


def _install_stubs(root: Path, stub_debs: Sequence[Path]) -> None:
    inbox = root / "root/stubs"
    inbox.mkdir()
    for deb in stub_debs:
        shutil.copy(deb, inbox / deb.name)
    run(["chroot", root, "dpkg", "-i", *[f"/root/stubs/{deb.name}" for deb in stub_debs]])
    shutil.rmtree(inbox)


def _configure(root: Path) -> None:
    units = root / "etc/systemd/system"
    for unit in MASKED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    (units / "lab-host-keys.service").write_text(_HOST_KEYS_UNIT)
    (units / "lab-hardware.service").write_text(_HARDWARE_UNIT)
    run(["chroot", root, "systemctl", "enable", "lab-host-keys", "lab-hardware", "ssh"])
    run(["chroot", root, "useradd", "-m", "-s", "/bin/bash", "-u", "1000", "-G", "sudo", USER])
    # Debian's sources are outside the lab, where guests have no route.
    (root / "etc/apt/sources.list").write_text("")
    for source in (root / "etc/apt/sources.list.d").glob("*"):
        source.unlink()
