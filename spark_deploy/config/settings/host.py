"""Settings of a host: requirements, packages, folders and SSH access."""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, GIB, UNIQUE, Gib, Text, Violation
from spark_deploy.config.settings.patterns import (
    Address,
    Folder,
    Login,
    Package,
    SshSource,
    text_field,
)

BASE_PACKAGES = ("ca-certificates", "curl", "jq", "nginx-light", "pciutils", "python3")
TOOLKIT_PACKAGES = ("nvidia-container-toolkit",)
DOCKER_DIR = "/var/lib/docker"  # for the disk plan; a running docker reports the real folder
CUDA_TOOLKIT = "13.0"
CUDA_PACKAGE = "cuda-toolkit-13-0"
GB10 = "NVIDIA GB10"
_Os = Annotated[
    str, text_field(r"^[a-z]+ [0-9a-z.]+$", "ID and VERSION_ID, in quotes", "ubuntu 24.04")
]
_User = Annotated[str, text_field("^[a-z_][a-z0-9_-]*$", "an account name", "spark")]


# System folders, and folders that users other than root can write to.
_SYSTEM_PARENTS = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr"),
    *("/home", "/root", "/tmp", "/var/cache", "/var/log", "/var/run", "/var/spool", "/var/tmp"),
    *("/var/lib/apt", "/var/lib/dpkg", "/var/lib/docker", "/var/lib/spark", "/var/lib/systemd"),
)
_SYSTEM_FOLDERS = ("/media", "/mnt", "/opt", "/srv", "/var", "/var/lib", "/lost+found")


def _is_system_folder(folder: str) -> bool:
    inside = any(folder == parent or folder.startswith(f"{parent}/") for parent in _SYSTEM_PARENTS)
    return inside or folder in _SYSTEM_FOLDERS


@dataclass(frozen=True, slots=True, config=CLOSED)
class ExpectSettings:
    """Required properties of a host; preflight rejects other hosts before any change."""

    arch: str = Field(default="aarch64", description="Architecture that `uname -m` prints.")
    gpu_name: str = GB10
    """Name that nvidia-smi prints. For a GB10, the PCI ID must also be present."""
    os: _Os = Field(default="ubuntu 24.04", description="ID and VERSION_ID of /etc/os-release.")
    dgx_os: Literal["require", "warn", "ignore"] = "warn"
    """Reaction to a missing /etc/dgx-release, or to an unfinished vendor update (torn score of
    nvidia-spark-ota-check above 0)."""
    unit_overrides: tuple[Folder, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Paths of your drop-ins for our systemd units. Deploys reject other drop-ins and masks,
    because these can start an engine without the check."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class BaseSettings:
    """Packages and host settings that need no GPU."""

    package_lock_wait_s: int = Field(default=1800, ge=0, le=86400)
    """Seconds to wait for another package installation, such as timers after a boot."""
    skip: tuple[Literal["hold-driver", "disable-sleep", "protect-login"], ...] = Field(
        default=(), examples=[["disable-sleep"]], json_schema_extra=UNIQUE
    )
    """Protections to skip. hold-driver: no unattended upgrades of driver, CUDA and kernel (a
    partial driver upgrade disables the GPU); disable-sleep: mask suspend and hibernate;
    protect-login: guarantee memory to SSH and login sessions. Adding an entry later reverts it,
    except disable-sleep."""
    headless: bool = False
    """Boot into multi-user.target from the next boot; the desktop uses several GiB."""
    earlyoom: bool = False
    """Install earlyoom; it stops the engine first when memory runs out."""
    compaction_proactiveness: int | None = Field(default=None, ge=0, le=100)
    """vm.compaction_proactiveness of the kernel (default 20); null: unchanged. 0 is reported about
    10 % faster, but may leave the GPU driver without contiguous memory after days."""

    @property
    def hold_driver(self) -> bool:
        return "hold-driver" not in self.skip

    @property
    def disable_sleep(self) -> bool:
        return "disable-sleep" not in self.skip

    @property
    def protect_login(self) -> bool:
        return "protect-login" not in self.skip


@dataclass(frozen=True, slots=True, config=CLOSED)
class DockerSettings:
    """Container engine and NVIDIA runtime (nvidia-container-toolkit), if missing."""

    packages: tuple[Package, ...] = Field(default=("docker.io",), json_schema_extra=UNIQUE)
    """Packages of the container engine."""
    daemon: dict[str, Any] = Field(
        default_factory=dict, examples=[{"log-opts": {"max-size": "50m"}}]
    )
    """Keys merged into /etc/docker/daemon.json."""
    users: tuple[_User, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Users that may use docker without sudo from their next login; equivalent to root."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class DiskSettings:
    """Disk space to keep free."""

    reserve_gib: Gib = Field(default=20, ge=0)
    """Space in GiB to keep free on every file system."""

    @property
    def reserve_bytes(self) -> int:
        return round(self.reserve_gib * GIB)


@dataclass(frozen=True, slots=True, config=CLOSED)
class PathSettings:
    """Folders for large data on a host.

    Absolute, without a slash at the end. Configuration, state, tools and compile caches have fixed
    places: /etc/spark, /var/lib/spark, /usr/local/lib/spark, /srv/spark/cache.
    """

    models_dir: Folder = Field(default="/srv/spark/models", description="Built checkpoints.")
    sources_dir: Folder = "/srv/spark/sources"
    """Verified downloads. On the filesystem of models_dir, base shards are linked instead of
    copied."""

    @property
    def cache_dir(self) -> str:
        return "/srv/spark/cache"

    def violations(self) -> Iterator[Violation]:
        for kind in ("models_dir", "sources_dir"):
            if _is_system_folder(path := getattr(self, kind)):
                message = f"{path} is a system folder, or users other than root can write to it"
                fix = "use a folder that only root can write to, such as /srv/spark/models"
                yield Violation((kind,), message, fix)
        kinds = ("models_dir", "sources_dir", "cache_dir")
        paths = sorted((getattr(self, kind), kind) for kind in kinds)
        for (path, kind), (other, other_kind) in itertools.pairwise(paths):
            if other == path or other.startswith(f"{path}/"):
                message = f"{other} is inside the folder of {kind} ({path})"
                fix = "choose folders that do not contain each other"
                yield Violation((kind if other_kind == "cache_dir" else other_kind,), message, fix)


@dataclass(frozen=True, slots=True, config=CLOSED)
class SshSettings:
    """How to reach a host; null leaves it to ~/.ssh/config."""

    hostname: Address | None = None
    """Address, if the inventory name does not resolve."""
    user: Login | None = None
    """Login user. spark-deploy is the account that deploys/bootstrap.py creates; bootstrap gives
    any other user sudo without a password."""
    first_user: Login | None = None
    """Login user of `deploys/bootstrap.py` while it creates spark-deploy; null: from
    ~/.ssh/config."""
    allowed_from: tuple[SshSource, ...] = Field(
        default=(), examples=[["192.168.1.0/24"]], json_schema_extra=UNIQUE
    )
    """Addresses from which spark-deploy's key is accepted (`from=` of sshd); empty: this machine's
    address during bootstrap."""
    port: int | None = Field(default=None, ge=1, le=65535, description="SSH port.")
    key_file: Text | None = Field(default=None, description="Private key on the controller.")
    known_hosts_file: Text | None = None
    """File to use instead of ~/.ssh/known_hosts."""
