"""The machine's package manager: release, mirror, and missing programs."""

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError
from lab.shell import run

# Program -> packages that contain it, on Debian and Ubuntu.
PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "ssh-keygen": "openssh-client",
    "ssh": "openssh-client",
    "curl": "curl ca-certificates",  # for the commands that `connect` prints
    "ip": "iproute2",
    "apt-ftparchive": "apt-utils",
    "gpg": "gnupg",
    "docker-registry": "docker-registry",
    "tinyproxy": "tinyproxy-bin",
    "mkfs.ext4": "e2fsprogs",
    "nsenter": "util-linux",
    "gcc": "gcc libc6-dev",
}


@dataclass(frozen=True, slots=True)
class Distribution:
    os_id: str
    version: str
    codename: str
    mirror: str
    components: str
    deb_arch: str
    machine: str


def this_distribution() -> Distribution:
    release = platform.freedesktop_os_release()
    codename = release.get("VERSION_CODENAME", "")
    wanted = "$(REPO_URI) $(CODENAME) $(COMPONENT)"
    lines = run(["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"])
    targets = [line.split() for line in lines.splitlines()]
    indexes = [target for target in targets if len(target) == 3 and target[1] == codename]
    main = next((target for target in indexes if target[2] == "main"), None)
    if main is None:
        raise LabError("apt", f"no package index of {codename} main", "run `apt-get update`")
    components = sorted({target[2] for target in indexes} & {"main", "universe"})
    return Distribution(
        os_id=release["ID"],
        version=release["VERSION_ID"],
        codename=codename,
        mirror=main[0].rstrip("/"),
        components=",".join(components),
        deb_arch=run(["dpkg", "--print-architecture"]).strip(),
        machine=platform.machine(),
    )


def missing_packages() -> list[str]:
    sbin = "/usr/local/sbin:/usr/sbin:/sbin:" + os.environ.get("PATH", "")
    wanted = (p for name, p in PROGRAMS.items() if shutil.which(name, path=sbin) is None)
    return sorted({package for packages in wanted for package in packages.split()})


def install_programs() -> list[str]:
    if os.geteuid() != 0:
        raise LabError("lab", "needs root (namespaces, mounts, cgroups)", "run it with sudo")
    missing = missing_packages()
    if missing:
        run(["apt-get", "update", "-q"])
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing])
    if "docker-registry" in missing and Path("/run/systemd/system").is_dir():
        # The package starts a registry on the port of the lab's registry.
        run(["systemctl", "disable", "--now", "docker-registry.service"])
    return missing
