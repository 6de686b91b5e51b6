"""A Spark's hardware in /sys and /proc, as a tree that a guest binds over them."""

from dataclasses import dataclass
from pathlib import Path

DRIVER_VERSION = "580.159.03+labstub"

_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {version}  Release Build  "
    "(virtual lab)\nGCC version:  none (virtual lab)\n"
)


@dataclass(frozen=True, slots=True)
class PciFunction:
    address: str
    vendor: str
    device: str
    class_code: str
    revision: str = "00"


# As on a Spark: GPU, the four functions of the network adapter, 10 GbE, Wi-Fi.
FUNCTIONS = (
    PciFunction("000f:01:00.0", "10de", "2e12", "030000", "a1"),
    PciFunction("0000:01:00.0", "15b3", "1021", "020000"),
    PciFunction("0000:01:00.1", "15b3", "1021", "020000"),
    PciFunction("0002:01:00.0", "15b3", "1021", "020000"),
    PciFunction("0002:01:00.1", "15b3", "1021", "020000"),
    PciFunction("0007:01:00.0", "10ec", "8127", "020000", "05"),
    PciFunction("0009:01:00.0", "14c3", "7925", "028000"),
)


def config_space(function: PciFunction) -> bytes:  # PCI 3.0, section 6.1
    header = bytearray(64)
    header[0:2] = int(function.vendor, 16).to_bytes(2, "little")
    header[2:4] = int(function.device, 16).to_bytes(2, "little")
    header[8] = int(function.revision, 16)
    header[9:12] = int(function.class_code, 16).to_bytes(3, "little")
    header[0x2C:0x2E] = header[0:2]
    return bytes(header)


def write_pci(directory: Path) -> None:
    for function in FUNCTIONS:
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
        (home / "config").write_bytes(config_space(function))


def write_tree(root: Path) -> None:
    write_pci(root / "usr/lib/labstub/pci-devices")
    driver = root / "usr/lib/labstub/proc-driver/nvidia"
    driver.mkdir(parents=True, exist_ok=True)
    (driver / "version").write_text(_DRIVER.format(version=DRIVER_VERSION))
