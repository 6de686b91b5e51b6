"""Addresses of the ports between hosts: what a host is to try, and what it keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

NETPLAN_FILE = "/etc/netplan/40-spark-fabric.yaml"
# A file of the same name here counts instead, and no boot finds it: a try ends with the power.
NETPLAN_TRIAL = "/run/netplan/40-spark-fabric.yaml"
KEPT_NETPLAN = "/var/lib/spark/fabric/removed.yaml"
RETURN_UNIT = "spark-fabric-return"
APPLY_UNIT = "spark-fabric-apply"


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
    """What was set up, and what each interface's MTU was before."""

    SCHEMA_VERSION: ClassVar[int] = 1

    ports: tuple[FabricPort, ...]
    mtu_before: dict[str, int]
