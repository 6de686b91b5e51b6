"""The packages that guests may install: Debian's, and the stand-ins built from ``lab/stubs``."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from lab.content import cached, content_key
from lab.distribution import Distribution
from lab.paths import LabPaths
from lab.shell import run

STUBS_DIR = Path(__file__).with_name("stubs")

# On a Spark these are preinstalled; a deploy installs the vendor's.
PREINSTALLED_STUBS = ("nvidia-utils-580", "dgx-release", "labstub-runc")
VENDOR_STUBS = ("cuda-toolkit-13-0", "nvidia-container-toolkit")

OFFERED = (
    "docker.io", "nginx-light", "libnginx-mod-http-js", "python3-venv", "python3-numpy",
    "python3-apt", "jq", "rsync",
    "git", "acl", "lsof", "psmisc", "file", "openssl", "ethtool", "numactl", "zstd", "unzip",
    "xz-utils", "ufw", "earlyoom", "unattended-upgrades", "chrony", "logrotate", "tmux",
    "busybox-static", "pciutils", "gpg", "apt-transport-https", "netplan.io",
)  # fmt: skip

# The container engine; in Debian 13 the client and BuildKit's builder are separate packages.
DOCKER = ("docker.io", "docker-cli", "docker-buildx")


def docker_packages() -> tuple[str, ...]:
    known = run(["apt-cache", "pkgnames", "docker"]).split()
    return tuple(name for name in DOCKER if name in known)


def stub_control(package: str) -> dict[str, str]:
    lines = (STUBS_DIR / package / "DEBIAN/control").read_text().splitlines()
    pairs = (line.partition(": ") for line in lines if not line.startswith(" "))
    return {key: value for key, _, value in pairs}


def build_stub(paths: LabPaths, package: str) -> Path:
    fields = stub_control(package)
    key = content_key(package, trees=[STUBS_DIR / package])
    name = f"{package}_{fields['Version']}_{fields['Architecture']}.deb"

    def make(target: Path) -> None:
        run(["dpkg-deb", "--root-owner-group", "-b", STUBS_DIR / package, target])

    return cached(paths.cache / "stubs" / key / name, make)


@dataclass(frozen=True, slots=True)
class More:
    words: tuple[str, ...] = ()  # for apt: ``name`` or ``name/suite``
    suites: tuple[str, ...] = ()


def download(
    paths: LabPaths, distribution: Distribution, tree: Path, *, more: More | None = None
) -> Path:
    extra = more or More()
    from_machine = not extra.suites
    docker = docker_packages() if from_machine else DOCKER
    chosen = {word.partition("/")[0] for word in extra.words if "/" in word}
    names = (name for name in (*OFFERED, *docker, *extra.words) if name not in chosen)
    offered = tuple(dict.fromkeys(names))
    key = content_key(distribution.codename, distribution.mirror, tree.name, offered)

    def make(target: Path) -> None:
        (target / "partial").mkdir(parents=True)
        options = [
            "-o", f"Dir::State::status={tree}/var/lib/dpkg/status",
            "-o", "APT::Sandbox::User=root",
        ]  # fmt: skip
        if extra.suites:
            options += _other_suites(paths, distribution, extra.suites)
            run(["apt-get", "-q", *options, "update"])
        where = ["-o", f"Dir::Cache::archives={target}"]
        common = ["-q", "-y", "--no-install-recommends", "--download-only"]
        run(["apt-get", *common, *options, *where, "install", *offered])
        shutil.rmtree(target / "partial")
        (target / "lock").unlink(missing_ok=True)

    return cached(paths.cache / f"debs-{key}", make)


def _other_suites(
    paths: LabPaths, distribution: Distribution, suites: tuple[str, ...]
) -> list[str]:
    home = paths.cache / f"apt-{'-'.join(suites)}"
    for part in ("state/lists/partial", "cache/archives/partial", "parts"):
        (home / part).mkdir(parents=True, exist_ok=True)
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    lines = (f"deb {signed} {distribution.mirror} {suite} main\n" for suite in suites)
    (home / "sources.list").write_text("".join(lines))
    pairs = {
        "Dir::State": home / "state",
        "Dir::Cache": home / "cache",
        "Dir::Etc::SourceList": home / "sources.list",
        "Dir::Etc::SourceParts": home / "parts",
        "Dir::Etc::Preferences": home / "none",
        "Dir::Etc::PreferencesParts": home / "parts",
        "APT::Default-Release": suites[0],
    }
    return [word for name, value in pairs.items() for word in ("-o", f"{name}={value}")]
