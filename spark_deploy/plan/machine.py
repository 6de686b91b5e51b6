"""What a host must be, and what it gets whatever it serves: frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_contract.paths import GPU_RECEIPT

from spark_deploy.config.settings.host import BaseSettings, ExpectSettings, PathSettings
from spark_deploy.config.settings.sources import RepositorySettings

SUDOERS_PATH = "/etc/sudoers.d/90-spark-deploy"


@dataclass(frozen=True, slots=True)
class PayloadIdentity:
    """What this checkout sends to hosts, by content alone; ``payload/content.py`` has both."""

    tools_digest: str  # files/host and files/checkpoint
    image_context_digest: str  # files/image
    python_requirements: str  # path in the checkout of the hash-pinned wheels list
    quantiser_digest: str = ""  # of the list of AutoRound's wheels


@dataclass(frozen=True, slots=True)
class Way:
    """One way from a host to another member of its cluster."""

    interface: str
    device: str | None
    mtu: int
    speed_mbit_per_s: int | None
    host: str  # the other one
    address: str  # its
    other_mtu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsPlan(ExpectSettings):
    """What preflight demands of the host before anything is changed."""

    takeover: tuple[str, ...]  # containers we may stop
    allow_memory_holders: tuple[str, ...]  # process names that may keep memory
    allow_containers: tuple[str, ...] = ()  # that serve models or hold the GPU and may stay
    ports: tuple[int, ...]  # must be free or ours
    gateways: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # whose each is to be
    disk_needed_bytes: tuple[tuple[str, int], ...]  # (path, bytes still to be written at peak)
    disk_reserve_bytes: int
    memory_needed_bytes: int
    memory_total_min_bytes: int
    docker_dir: str = "/var/lib/docker"
    # Images of the plan; once all of them are there, nothing more is written below docker_dir.
    images: tuple[str, ...] = ()
    # Bytes below docker_dir that each engine image takes; one that is there takes no more.
    image_bytes: tuple[tuple[str, int], ...] = ()
    # (path, tree): once the tree is there, nothing more is written to the path.
    disk_done_once_there: tuple[tuple[str, str], ...] = ()
    reboot: str = "report"  # "report" | "allow": what becomes of a pending reboot
    tailscale: bool = False  # the gateway needs this host's address in its tailnet
    # What may lie on the host already: (folder to fill, its files as (sha256, bytes)).
    downloads: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    look_in: tuple[str, ...] = ()  # where the fetcher will look for them
    cluster: tuple[str, ...] = ()  # members, this host among them
    ways: tuple[Way, ...] = ()  # to the other members


@dataclass(frozen=True, slots=True)
class BootstrapPlan:
    """What a new host gets, so that it never asks for a password again."""

    public_key: str  # one line of authorized_keys; "": this machine, which has no login
    account: str | None = None  # made for deploys; None: the login user is let in
    allowed_from: tuple[str, ...] = ()  # empty: where the login comes from
    sudoers_path: str = SUDOERS_PATH


NJS = "libnginx-mod-http-js"
"""nginx's JavaScript: what chooses among several services by the name of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePlan(BaseSettings):
    """Packages and host care that need no GPU, and the folders to own."""

    paths: PathSettings


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """CUDA toolkit: kept when present at ``version``, else installed. Never the driver."""

    version: str  # "13.0"
    package: str
    repositories: tuple[RepositorySettings, ...]
    package_lock_wait_s: int


@dataclass(frozen=True, slots=True)
class DockerPlan:
    """Container engine with the NVIDIA runtime."""

    packages: tuple[str, ...]
    toolkit_packages: tuple[str, ...]
    repositories: tuple[RepositorySettings, ...]
    daemon: dict[str, Any]  # merged into daemon.json
    check_image: str  # pinned reference; a container of it must print a line starting "GPU"
    package_lock_wait_s: int
    receipt_path: str = GPU_RECEIPT
    users: tuple[str, ...] = ()  # in the group docker
    allow_containers: tuple[str, ...] = ()  # that may come up with docker


@dataclass(frozen=True, slots=True)
class ToolsPlan:
    """Our own host tools (files/host, files/checkpoint), installed by content digest."""

    digest: str
    python_requirements: str  # path in the checkout of the hash-pinned wheels list


# One cage of a Spark's ConnectX-7 shows two interfaces, each with an RDMA device of its own;
# which of the four names carries the cable differs from host to host.
@dataclass(frozen=True, slots=True)
class Port:
    """One interface, and the RDMA device behind it."""

    interface: str
    up: bool  # a cable is in it, and the other end is on
    mtu: int
    speed_mbit_per_s: int | None
    addresses: tuple[str, ...]  # IPv4, with the length of the network: 192.168.100.10/24
    device: str | None
    gid_index: int | None  # of RoCE version 2 with the first address


@dataclass(frozen=True, slots=True)
class Ports:
    """What a host has to reach others by."""

    ports: tuple[Port, ...]
