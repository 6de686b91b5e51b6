"""Settings of hosts: requirements, packages, folders, SSH access, clusters and their network."""

import ipaddress
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.documents import CLOSED, GIB, UNIQUE, Gib, Text, Violation, text_schema
from spark_deploy.config.settings.patterns import (
    Address,
    Folder,
    Interface,
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


@dataclass(frozen=True, slots=True, config=CLOSED)
class ExpectSettings:
    """Required properties of a host; preflight rejects other hosts before any change."""

    arch: str = Field(default="aarch64", description="Required output of `uname -m`.")
    gpu_name: str = GB10
    """Required GPU name in the output of nvidia-smi. For a GB10, the PCI ID must also be
    present."""
    os: _Os = Field(
        default="ubuntu 24.04", description="Required ID and VERSION_ID in /etc/os-release."
    )
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
    """Seconds to wait for another package installation, such as apt's timers after a boot."""
    skip: tuple[Literal["hold-driver", "disable-sleep", "protect-login"], ...] = Field(
        default=(), examples=[["disable-sleep"]], json_schema_extra=UNIQUE
    )
    """Protections to skip. hold-driver: no unattended upgrades of driver, CUDA and kernel (a
    partial driver upgrade disables the GPU); disable-sleep: mask suspend and hibernate;
    protect-login: guarantee memory to SSH and login sessions. Adding an entry later reverts it,
    except disable-sleep."""
    headless: bool = False
    """From the next boot, start without the desktop (in multi-user.target). The desktop uses
    several GiB of memory."""
    earlyoom: bool = False
    """Install earlyoom; it stops the engine first when memory runs out."""
    compaction_proactiveness: int | None = Field(default=None, ge=0, le=100)
    """vm.compaction_proactiveness of the kernel (default 20); null: unchanged. Users report about
    10 % more speed with 0, but after days the GPU driver may find no contiguous memory."""


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
    """Users that may use docker without sudo from their next login. This is equivalent to root
    access."""


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

    models_dir: Folder = Field(
        default="/srv/spark/models", description="Folder of built checkpoints."
    )
    sources_dir: Folder = "/srv/spark/sources"
    """Folder of verified downloads. If it is on the same file system as models_dir, base shards
    are linked instead of copied."""

    @property
    def cache_dir(self) -> str:
        return "/srv/spark/cache"

    def violations(self) -> Iterator[Violation]:
        for key in ("models_dir", "sources_dir"):
            path: str = getattr(self, key)
            is_inside = f"{path}/".startswith(tuple(f"{parent}/" for parent in _SYSTEM_PARENTS))
            if is_inside or path in _SYSTEM_FOLDERS:
                message = f"{path} is a system folder, or users other than root can write to it"
                fix = "use a folder that only root can write to, such as /srv/spark/models"
                yield Violation((key,), message, fix)
        keys = ("models_dir", "sources_dir", "cache_dir")
        folders = sorted((getattr(self, key), key) for key in keys)
        for (outer, outer_key), (inner, inner_key) in itertools.pairwise(folders):
            if inner == outer or inner.startswith(f"{outer}/"):
                message = f"{inner} is inside the folder of {outer_key} ({outer})"
                fix = "choose folders that do not contain each other"
                # cache_dir cannot be changed.
                wrong_key = outer_key if inner_key == "cache_dir" else inner_key
                yield Violation((wrong_key,), message, fix)


@dataclass(frozen=True, slots=True, config=CLOSED)
class SshSettings:
    """How to reach a host; null leaves it to ~/.ssh/config."""

    hostname: Address | None = None
    """Address of the host, if the inventory name does not resolve."""
    user: Login | None = None
    """Login user. spark-deploy is the account that deploys/bootstrap.py creates; if you
    name another user, bootstrap gives that user passwordless sudo."""
    first_user: Login | None = None
    """Login user of `deploys/bootstrap.py`, which creates spark-deploy; null: from
    ~/.ssh/config."""
    allowed_from: tuple[SshSource, ...] = Field(
        default=(), examples=[["192.168.1.0/24"]], json_schema_extra=UNIQUE
    )
    """Addresses from which spark-deploy's key is accepted (`from=` of sshd); empty: this machine's
    address during bootstrap."""
    port: int | None = Field(default=None, ge=1, le=65535, description="SSH port.")
    key_file: Text | None = Field(default=None, description="Private key file on the controller.")
    known_hosts_file: Text | None = None
    """File to use instead of ~/.ssh/known_hosts."""


_FIRST_ADDRESS = 11  # number of the first host's address in a network


@dataclass(frozen=True, slots=True, config=CLOSED)
class ClusterSettings:
    """Hosts that serve a model together (tensor parallel); empty: none."""

    hosts: tuple[Text, ...] = Field(
        default=(), examples=[["spark-1", "spark-2"]], json_schema_extra=UNIQUE
    )
    """Inventory names of hosts that serve one model together, with one rank per host. Clients
    connect to the first host. All hosts need the same settings, so use group_vars."""
    subnet: str | None = Field(
        default=None,
        examples=["192.168.100.0/24"],
        json_schema_extra=text_schema(
            r"^[0-9.]+/[0-9]+$", "a network with a prefix length", "192.168.100.0/24"
        ),
    )
    """Network in which the members have fixed addresses. null: the network in which every member
    has an RDMA port."""

    def violations(self) -> Iterator[Violation]:
        if len(self.hosts) == 1:
            message = f"{self.hosts[0]} is the only host"
            yield Violation(("hosts",), message, "list at least two hosts, or none")
        try:
            ipaddress.IPv4Network(self.subnet or "0.0.0.0/0")
        except ValueError as error:
            yield Violation(("subnet",), str(error), "write a network such as 192.168.100.0/24")


@dataclass(frozen=True, slots=True, config=CLOSED)
class ReplicasSettings:
    """Hosts that serve the same model independently behind a shared address; empty: none."""

    hosts: tuple[Text, ...] = Field(
        default=(), examples=[["spark-1", "spark-2"]], json_schema_extra=UNIQUE
    )
    """Inventory names of hosts with the same model. Each host forwards a new conversation to the
    host with the fewest running requests among those that passed their checks. Later requests of
    the conversation go to the same host. All hosts need the same settings and serve.api_key, so
    use group_vars."""
    port: int = Field(default=8008, ge=1, le=65535, description="Shared port of the replicas.")
    # Filled by the inventory: fleet.address of each host, or its address for clients.
    addresses: SkipJsonSchema[dict[str, str]] = Field(default_factory=dict, exclude=True)

    def violations(self) -> Iterator[Violation]:
        if len(self.hosts) == 1:
            message = f"{self.hosts[0]} is the only host"
            yield Violation(("hosts",), message, "list at least two hosts, or none")


@dataclass(frozen=True, slots=True, config=CLOSED)
class FabricSettings:
    """Network setup of `spark-deploy fabric`. A deploy never changes the network."""

    hosts: tuple[Text, ...] = Field(
        default=(),
        examples=[["spark-1", "spark-2"]],
        json_schema_extra=UNIQUE,
    )
    """Cabled hosts in the order of their addresses, which start at .11. Empty: cluster.hosts."""
    networks: tuple[Text, ...] = Field(
        default=("192.168.100.0/24", "192.168.101.0/24"), min_length=1, json_schema_extra=UNIQUE
    )
    """A private network for each cabled interface, in the order of the interface names. Two
    interfaces in one network would break routing."""
    interfaces: tuple[Interface, ...] = Field(
        default=(), examples=[["enp1s0f0np0", "enP2p1s0f0np0"]], json_schema_extra=UNIQUE
    )
    """Interfaces in the order of the networks. Empty: all cabled RDMA interfaces. If they differ
    between hosts, use host_vars."""
    mtu: int = Field(default=9000, ge=1280, le=9216)
    """MTU at both ends."""
    measure: bool = False
    """Only measure: send up to 1 GB (2.5 seconds) from each host to the next over each cabled
    port."""
    restore: bool = False
    """Restore the previous network configuration."""

    def address(self, index: int, network: str) -> str:
        parsed = ipaddress.IPv4Network(network)
        return f"{parsed[_FIRST_ADDRESS + index]}/{parsed.prefixlen}"

    def violations(self) -> Iterator[Violation]:
        for index, text in enumerate(self.networks):
            key = ("networks", index)
            try:
                network = ipaddress.IPv4Network(text)
            except ValueError as error:
                yield Violation(key, str(error), "write a network such as 192.168.100.0/24")
                continue
            if not network.is_private:
                fix = "use a network in 192.168.0.0/16 or 10.0.0.0/8"
                yield Violation(key, "is not a private network", fix)
            if network.num_addresses < _FIRST_ADDRESS + len(self.hosts) + 2:
                yield Violation(key, "has too few addresses", "use a /24 network")
        if self.measure and self.restore:
            message, fix = "restored networks cannot be measured", "set only measure or restore"
            yield Violation(("measure",), message, fix)
        if self.interfaces and len(self.interfaces) != len(self.networks):
            message = (
                f"{len(self.interfaces)} interfaces are listed for {len(self.networks)} networks"
            )
            fix = "list one interface for each network in fabric.networks"
            yield Violation(("interfaces",), message, fix)
