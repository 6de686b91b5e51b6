"""Network links between hosts: trial and final addresses, and speed measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spark_contract.documents import OPTIONAL

NETPLAN_FILE = "/etc/netplan/40-spark-fabric.yaml"
# Overrides the file of the same name until the next boot.
NETPLAN_TRIAL = "/run/netplan/40-spark-fabric.yaml"
REMOVED_NETPLAN = "/var/lib/spark/fabric/removed.yaml"
RESTORE_UNIT = "spark-fabric-return"
APPLY_UNIT = "spark-fabric-apply"
RETRY_FIX = "wait 90 seconds, then run it again"


@dataclass(frozen=True, slots=True)
class FabricPort:
    interface: str
    address: str
    mtu: int


@dataclass(frozen=True, slots=True)
class FabricPlan:
    SCHEMA_VERSION: ClassVar[int] = 1

    netplan: str
    ports: tuple[FabricPort, ...]
    confirm_s: int


@dataclass(frozen=True, slots=True)
class FabricRecord:
    SCHEMA_VERSION: ClassVar[int] = 1

    ports: tuple[FabricPort, ...]
    mtu_before: dict[str, int]
    # Other interfaces by name; default routes as arguments of `ip route`.
    addresses_before: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata=OPTIONAL)
    routes_before: tuple[str, ...] = field(default=(), metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    SCHEMA_VERSION: ClassVar[int] = 1

    interface: str
    address: str
    port: int
    token: str
    max_bytes: int
    max_s: float


@dataclass(frozen=True, slots=True)
class SpeedResult:
    SCHEMA_VERSION: ClassVar[int] = 1

    arrived_bytes: int
    took_s: float
