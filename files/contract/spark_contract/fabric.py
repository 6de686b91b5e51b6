"""The ports between hosts: addresses to try and to keep, and how much a way carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spark_contract.documents import OPTIONAL

NETPLAN_FILE = "/etc/netplan/40-spark-fabric.yaml"
# A file of the same name here counts instead, and no boot finds it: a try ends with the power.
NETPLAN_TRIAL = "/run/netplan/40-spark-fabric.yaml"
KEPT_NETPLAN = "/var/lib/spark/fabric/removed.yaml"
RETURN_UNIT = "spark-fabric-return"
APPLY_UNIT = "spark-fabric-apply"
TRY_AGAIN = "wait until it ends by itself (fabric.confirm_s), and run it again"


@dataclass(frozen=True, slots=True)
class FabricPort:
    """One interface, and what it is to have."""

    interface: str
    address: str  # with the length of its network: 192.168.100.11/24
    mtu: int


@dataclass(frozen=True, slots=True)
class FabricPlan:
    """What ``spark-host fabric try`` reads: netplan's file, the ports in it, how long a try is."""

    SCHEMA_VERSION: ClassVar[int] = 1

    netplan: str  # the whole file
    ports: tuple[FabricPort, ...]
    confirm_s: int


@dataclass(frozen=True, slots=True)
class FabricRecord:
    """What was set up, what each interface's MTU was before, and how the host was reached."""

    SCHEMA_VERSION: ClassVar[int] = 1

    ports: tuple[FabricPort, ...]
    mtu_before: dict[str, int]
    # Of the other interfaces, by name, and the default routes, as `ip route` takes them.
    addresses_before: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata=OPTIONAL)
    routes_before: tuple[str, ...] = field(default=(), metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class SpeedOrder:
    """What both ends of one way are told on standard input: where, by which word, how much."""

    SCHEMA_VERSION: ClassVar[int] = 1

    interface: str  # of the sender, which uses no other
    address: str  # of the listener, which listens at no other
    port: int
    token: str
    most_bytes: int
    most_s: float


@dataclass(frozen=True, slots=True)
class SpeedFound:
    """What a sender was told to have arrived, and how long that took."""

    SCHEMA_VERSION: ClassVar[int] = 1

    arrived_bytes: int
    took_s: float
