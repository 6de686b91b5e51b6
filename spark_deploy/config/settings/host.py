"""Settings of a host: what it must be, what it gets, where data lies, how it is reached."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from spark_deploy.config.documents.declare import GIB, Gib, Text, about, form, setting
from spark_deploy.config.settings.rules import (
    ADDRESS,
    FOLDER,
    FROM,
    LOGIN,
    PACKAGE,
    Broken,
    Packages,
    is_the_system_s,
)
from spark_deploy.config.settings.sources import RepositoryNames

_PCI_ID = form("^[0-9a-f]{4}:[0-9a-f]{4}$", "VENDOR:DEVICE as `lspci -n` prints it", "10de:2e12")
_DRIVER = form(r"^[0-9]+(\.[0-9]+)*$", "numbers and dots, in quotes", "580.95.05")
_USER = form("^[a-z_][a-z0-9_-]*$", "the name of one account", "spark")


@dataclass(frozen=True, slots=True)
class ExpectSettings:
    """What a host must be; preflight refuses anything else before it changes something."""

    arch: str = setting("aarch64", "As `uname -m` prints it.")
    pci_ids: tuple[Annotated[str, about(**_PCI_ID)], ...] = setting(
        ("10de:2e12",),
        "Any one of these vendor:device pairs must be present (10de:2e12 is GB10); read without "
        "the driver.",
        uniqueItems=True,
        minItems=1,
    )
    gpu_name: str = setting("NVIDIA GB10", "As nvidia-smi prints it.")
    os_id: str = setting("ubuntu", "ID of /etc/os-release.")
    os_version: str = setting("24.04", "VERSION_ID of /etc/os-release; quote it.")
    driver_min: str = setting("580", "Smallest driver version accepted; quote it.", **_DRIVER)
    dgx_release: Literal["require", "warn", "ignore"] = setting(
        "warn", "What a missing /etc/dgx-release means."
    )
    updates: Literal["require", "warn", "ignore"] = setting(
        "warn",
        "What a vendor's update means that was not finished (the torn score of "
        "nvidia-spark-ota-check is above 0): a server in use often shows one and serves.",
    )


@dataclass(frozen=True, slots=True)
class BaseSettings:
    """Packages and host care that need no GPU.

    Switched off again, only the driver's hold, protect_login and compaction_proactiveness are taken
    back; the rest stays.
    """

    packages: Packages = setting(
        ("ca-certificates", "curl", "jq", "nginx-light", "pciutils", "python3"),
        "Packages of the distribution that our tools need.",
        uniqueItems=True,
    )
    package_lock_wait_s: int = setting(
        1800,
        "Seconds to wait while somebody else installs packages on a host, as timers do after a "
        "boot; the holder is named meanwhile.",
        minimum=0,
        maximum=86400,
    )
    hold_driver_in_unattended_upgrades: bool = setting(
        True,
        "Keep unattended upgrades from touching driver, CUDA and kernel packages: half an upgrade "
        "of the driver takes the GPU away.",
    )
    disable_sleep: bool = setting(
        True,
        "Mask suspend and hibernate: a server that suspends cannot be woken over the net.",
    )
    protect_login: bool = setting(
        True,
        "Guarantee memory to SSH and login sessions (cgroup v2), so that a host that runs out can "
        "still be reached.",
    )
    headless: bool = setting(
        False,
        "Boot into multi-user.target; the desktop holds several GiB. Takes effect at the next "
        "boot.",
    )
    earlyoom: bool = setting(
        False,
        "Install earlyoom and let it prefer the engine when memory runs out, before the kernel "
        "starts to thrash.",
    )
    compaction_proactiveness: int | None = setting(
        None,
        "The kernel's vm.compaction_proactiveness (20 unless set): how much it compacts memory in "
        "the background. Null leaves it as it is. 0 is reported about 10 % faster, and may leave "
        "the GPU driver without contiguous memory after days.",
        minimum=0,
        maximum=100,
    )


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """CUDA toolkit; kept when present, never the driver."""

    version: str = setting(
        "13.0",
        "Toolkit version that must be there; quote it.",
        **form(r"^[0-9]+\.[0-9]+$", "two numbers and a dot, in quotes", "13.0"),
    )
    package: str = setting("cuda-toolkit-13-0", "Package that installs it.", **PACKAGE)
    repositories: RepositoryNames = setting(
        (),
        "Names from `repositories` to add before the toolkit is installed; unused when it is "
        "present.",
        uniqueItems=True,
    )


@dataclass(frozen=True, slots=True)
class DockerSettings:
    """Container engine and NVIDIA runtime; kept when present."""

    packages: Packages = setting(
        ("docker.io",), "Installed when no engine is there.", uniqueItems=True
    )
    toolkit_packages: Packages = setting(
        ("nvidia-container-toolkit",),
        "Installed when the NVIDIA runtime is not there.",
        uniqueItems=True,
    )
    repositories: RepositoryNames = setting(
        (),
        "Names from `repositories` to add before the engine or the runtime is installed; unused "
        "when it is present.",
        uniqueItems=True,
    )
    daemon: dict[str, Any] = setting(
        dict,
        "Keys merged into /etc/docker/daemon.json; everything else in that file stays.",
        examples=[{"log-opts": {"max-size": "50m"}}],
    )
    users: tuple[Annotated[str, about(**_USER)], ...] = setting(
        (),
        "Users that may use docker without sudo, from their next login on; as good as root, and "
        "nothing here needs it. Others are left as they are.",
        uniqueItems=True,
    )


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Room to keep."""

    reserve_bytes: Gib = setting(
        20 * GIB, "Stays free on every filesystem written to.", key="reserve_gib", minimum=0
    )


@dataclass(frozen=True, slots=True)
class PathSettings:
    """Where large data lives on a host, for instance on another disk.

    Absolute, without a slash at the end. Configuration, state and tools have fixed places:
    /etc/spark, /var/lib/spark, /usr/local/lib/spark.
    """

    models_dir: str = setting("/srv/spark/models", "Built checkpoints.", **FOLDER)
    sources_dir: str = setting(
        "/srv/spark/sources",
        "Verified source trees. On the same filesystem as models_dir, base shards are linked "
        "instead of copied.",
        **FOLDER,
    )
    cache_dir: str = setting(
        "/srv/spark/cache", "Compile caches of engines, one for each release.", **FOLDER
    )
    docker_dir: str = setting(
        "/var/lib/docker",
        "Where the container engine keeps images, for the disk plan; a docker that runs is asked.",
        **FOLDER,
    )

    def broken(self) -> Iterator[Broken]:
        """Yield folders that are not ours to fill, and such that lie inside each other."""
        for key in ("models_dir", "sources_dir", "cache_dir"):
            if is_the_system_s(getattr(self, key)):
                what = f"{getattr(self, key)} is the system's, or others than root may write there"
                yield Broken((key,), what, "name a folder of root's own, such as /srv/spark/models")
        paths = ((getattr(self, field.name), field.name) for field in dataclasses.fields(self))
        for (path, key), (other, other_key) in itertools.pairwise(sorted(paths)):
            if other == path or other.startswith(path + "/"):
                what = f"{other} lies inside paths.{key} ({path})"
                yield Broken((other_key,), what, "give every kind of data a folder of its own")


@dataclass(frozen=True, slots=True)
class SshSettings:
    """How to reach a host; null leaves it to ~/.ssh/config."""

    hostname: str | None = setting(
        None, "Address, when the inventory name does not resolve.", **ADDRESS
    )
    user: str | None = setting(
        None,
        "Login user. spark-deploy is the account that deploys/bootstrap.py makes; any other is one "
        "that the host has, and bootstrap lets it be root without a password.",
        **LOGIN,
    )
    first_user: str | None = setting(
        None,
        "Account that bootstrap logs in with to make spark-deploy; null leaves it to "
        "~/.ssh/config.",
        **LOGIN,
    )
    allowed_from: tuple[Annotated[str, about(**FROM)], ...] = setting(
        (),
        "Addresses that spark-deploy's key is taken from, as sshd reads them; empty: the address "
        "that this machine shows the host at bootstrap.",
        uniqueItems=True,
        examples=[["192.168.1.0/24"]],
    )
    port: int | None = setting(None, "SSH port.", minimum=1, maximum=65535)
    key_file: Text | None = setting(None, "Private key on the controller.")
    config_file: Text | None = setting(None, "Another file than ~/.ssh/config.")
    known_hosts_file: Text | None = setting(None, "Another file than ~/.ssh/known_hosts.")
