"""Settings of a host: what it must be, what it gets, where data lies, how it is reached."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, GIB, UNIQUE, Gib, Text, Violation, form
from spark_deploy.config.settings.patterns import Address, Folder, Login, Package, SshSource, text
from spark_deploy.config.settings.sources import RepositoryNames

BASE_PACKAGES = ("ca-certificates", "curl", "jq", "nginx-light", "pciutils", "python3")
TOOLKIT_PACKAGES = ("nvidia-container-toolkit",)
DOCKER_DIR = "/var/lib/docker"  # for the disk plan; a running docker reports its own
_PciId = Annotated[
    str, text("^[0-9a-f]{4}:[0-9a-f]{4}$", "VENDOR:DEVICE as `lspci -n` prints it", "10de:2e12")
]
_Driver = Annotated[str, text(r"^[0-9]+(\.[0-9]+)*$", "numbers and dots, in quotes", "580.95.05")]
_User = Annotated[str, text("^[a-z_][a-z0-9_-]*$", "the name of one account", "spark")]


# Where the system keeps what is not ours, and where others than root may write.
_BELOW_REFUSED = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr"),
    *("/home", "/root", "/tmp", "/var/cache", "/var/log", "/var/run", "/var/spool", "/var/tmp"),
    *("/var/lib/apt", "/var/lib/dpkg", "/var/lib/docker", "/var/lib/spark", "/var/lib/systemd"),
)
_REFUSED = ("/media", "/mnt", "/opt", "/srv", "/var", "/var/lib", "/lost+found")


def _belongs_to_system(folder: str) -> bool:
    """Return whether a folder is the system's, or one in which others than root may write."""
    inside = any(folder == parent or folder.startswith(f"{parent}/") for parent in _BELOW_REFUSED)
    return inside or folder in _REFUSED


@dataclass(frozen=True, slots=True, config=CLOSED)
class ExpectSettings:
    """Required properties of a host; preflight refuses other hosts before any change."""

    arch: str = Field(default="aarch64", description="As `uname -m` prints it.")
    pci_ids: tuple[_PciId, ...] = Field(
        default=("10de:2e12",), min_length=1, json_schema_extra=UNIQUE
    )
    """At least one of these vendor:device pairs must be present (10de:2e12 is GB10)."""
    gpu_name: str = Field(default="NVIDIA GB10", description="As nvidia-smi prints it.")
    os_id: str = Field(default="ubuntu", description="ID of /etc/os-release.")
    os_version: str = Field(default="24.04", description="VERSION_ID of /etc/os-release; quote it.")
    driver_min: _Driver = "580"
    """Smallest driver version accepted; quote it."""
    dgx_release: Literal["require", "warn", "ignore"] = "warn"
    """Reaction to a missing /etc/dgx-release."""
    updates: Literal["require", "warn", "ignore"] = "warn"
    """Reaction to an unfinished vendor update (torn score of nvidia-spark-ota-check above 0)."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class BaseSettings:
    """Packages and host settings without GPU.

    When switched off, only the driver hold, protect_login and compaction_proactiveness are
    reverted.
    """

    package_lock_wait_s: int = Field(default=1800, ge=0, le=86400)
    """Seconds to wait for another package installation, such as timers after a boot."""
    hold_driver_in_unattended_upgrades: bool = True
    """Exclude driver, CUDA and kernel packages from unattended upgrades; a partial driver upgrade
    disables the GPU."""
    disable_sleep: bool = True
    """Mask suspend and hibernate."""
    protect_login: bool = True
    """Guarantee memory to SSH and login sessions (cgroup v2), so that you can log in when memory
    runs out."""
    headless: bool = False
    """Boot into multi-user.target from the next boot; the desktop uses several GiB."""
    earlyoom: bool = False
    """Install earlyoom; it stops the engine first when memory runs out."""
    compaction_proactiveness: int | None = Field(default=None, ge=0, le=100)
    """vm.compaction_proactiveness of the kernel (default 20); null: unchanged. 0 is reported about
    10 % faster, but may leave the GPU driver without contiguous memory after days."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class CudaSettings:
    """CUDA toolkit; kept when present, never the driver."""

    version: str = Field(
        default="13.0",
        json_schema_extra=form(r"^[0-9]+\.[0-9]+$", "two numbers and a dot, in quotes", "13.0"),
    )
    """Required toolkit version, in quotes; installed if missing."""
    repositories: RepositoryNames = Field(default=(), json_schema_extra=UNIQUE)
    """Entries of `repositories` to add before installing the toolkit."""

    @property
    def package(self) -> str:
        return f"cuda-toolkit-{self.version.replace('.', '-')}"


@dataclass(frozen=True, slots=True, config=CLOSED)
class DockerSettings:
    """Container engine and NVIDIA runtime (nvidia-container-toolkit), if missing."""

    packages: tuple[Package, ...] = Field(default=("docker.io",), json_schema_extra=UNIQUE)
    """Packages of the container engine."""
    repositories: RepositoryNames = Field(default=(), json_schema_extra=UNIQUE)
    """Entries of `repositories` to add before installing engine or runtime."""
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
    """Kept free on every filesystem."""

    @property
    def reserve_bytes(self) -> int:
        return round(self.reserve_gib * GIB)


@dataclass(frozen=True, slots=True, config=CLOSED)
class PathSettings:
    """Folders for large data on a host.

    Absolute, without a slash at the end. Configuration, state and tools have fixed places:
    /etc/spark, /var/lib/spark, /usr/local/lib/spark.
    """

    models_dir: Folder = Field(default="/srv/spark/models", description="Built checkpoints.")
    sources_dir: Folder = "/srv/spark/sources"
    """Verified downloads. On the filesystem of models_dir, base shards are linked instead of
    copied."""
    cache_dir: Folder = "/srv/spark/cache"
    """Compile caches of engines, per release."""

    def broken(self) -> Iterator[Violation]:
        for key in ("models_dir", "sources_dir", "cache_dir"):
            if _belongs_to_system(getattr(self, key)):
                message = (
                    f"{getattr(self, key)} is the system's, or others than root may write there"
                )
                yield Violation(
                    (key,), message, "name a folder of root's own, such as /srv/spark/models"
                )
        paths = ((getattr(self, field.name), field.name) for field in dataclasses.fields(self))
        for (path, key), (other, other_key) in itertools.pairwise(sorted(paths)):
            if other == path or other.startswith(path + "/"):
                message = f"{other} lies inside paths.{key} ({path})"
                yield Violation(
                    (other_key,), message, "give every kind of data a folder of its own"
                )


@dataclass(frozen=True, slots=True, config=CLOSED)
class SshSettings:
    """How to reach a host; null leaves it to ~/.ssh/config."""

    hostname: Address | None = None
    """Address, when the inventory name does not resolve."""
    user: Login | None = None
    """Login user. spark-deploy is the account that deploys/bootstrap.py creates; bootstrap gives
    any other user sudo without a password."""
    first_user: Login | None = None
    """Login user of bootstrap while it creates spark-deploy; null: from ~/.ssh/config."""
    allowed_from: tuple[SshSource, ...] = Field(
        default=(), examples=[["192.168.1.0/24"]], json_schema_extra=UNIQUE
    )
    """Addresses from which spark-deploy's key is accepted (`from=` of sshd); empty: this machine's
    address during bootstrap."""
    port: int | None = Field(default=None, ge=1, le=65535, description="SSH port.")
    key_file: Text | None = Field(default=None, description="Private key on the controller.")
    config_file: Text | None = Field(default=None, description="Another file than ~/.ssh/config.")
    known_hosts_file: Text | None = None
    """Another file than ~/.ssh/known_hosts."""
