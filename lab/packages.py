"""The packages guests may install: Debian's own, and the stand-ins built from ``lab/stubs``."""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.content import cached, content_key
from lab.distribution import Distribution
from lab.paths import LabPaths
from lab.shell import run

STUBS_DIR = Path(__file__).with_name("stubs")

# On a Spark these are part of the system as delivered; the others are what a deploy installs.
PREINSTALLED_STUBS = ("nvidia-utils-580", "dgx-release", "labstub-runc")
VENDOR_STUBS = ("cuda-toolkit-13-0", "nvidia-container-toolkit")

# What the distribution's archive offers in the lab, with everything these depend on.
OFFERED = (
    "docker.io", "nginx-light", "python3-venv", "python3-numpy", "python3-apt", "jq", "rsync",
    "git", "acl", "lsof", "psmisc", "file", "openssl", "ethtool", "numactl", "zstd", "unzip",
    "xz-utils", "ufw", "earlyoom", "unattended-upgrades", "chrony", "logrotate", "tmux",
    "busybox-static", "pciutils", "gpg", "apt-transport-https",
)  # fmt: skip

# The container engine. Debian 13 made the client a package of its own, and BuildKit's builder too.
DOCKER = ("docker.io", "docker-cli", "docker-buildx")


def docker_packages() -> tuple[str, ...]:
    """Return the packages that make a whole container engine on this machine's release."""
    known = run(["apt-cache", "pkgnames", "docker"]).split()
    return tuple(name for name in DOCKER if name in known)


def stub_control(package: str) -> dict[str, str]:
    """Return the control fields of a stand-in."""
    lines = (STUBS_DIR / package / "DEBIAN/control").read_text().splitlines()
    pairs = (line.partition(": ") for line in lines if not line.startswith(" "))
    return {key: value for key, _, value in pairs}


def build_stub(paths: LabPaths, package: str) -> Path:
    """Return the stand-in's .deb, built when its files changed."""
    fields = stub_control(package)
    key = content_key(package, trees=[STUBS_DIR / package])
    name = f"{package}_{fields['Version']}_{fields['Architecture']}.deb"

    def make(target: Path) -> None:
        run(["dpkg-deb", "--root-owner-group", "-b", STUBS_DIR / package, target])

    return cached(paths.cache / "stubs" / key / name, make)


def download(paths: LabPaths, distribution: Distribution, tree: Path) -> Path:
    """Return a directory with what ``tree`` lacks of OFFERED, from the machine's own mirror."""
    offered = tuple(dict.fromkeys([*OFFERED, *docker_packages()]))
    key = content_key(distribution.codename, distribution.mirror, tree.name, offered)

    def make(target: Path) -> None:
        (target / "partial").mkdir(parents=True)
        run(
            [
                "apt-get", "-q", "-y", "--no-install-recommends", "--download-only",
                "-o", f"Dir::State::status={tree}/var/lib/dpkg/status",
                "-o", f"Dir::Cache::archives={target}",
                "-o", "APT::Sandbox::User=root",
                "install", *offered,
            ]
        )  # fmt: skip
        shutil.rmtree(target / "partial")
        (target / "lock").unlink(missing_ok=True)

    return cached(paths.cache / f"debs-{key}", make)
