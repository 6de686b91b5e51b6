"""Inventory files, first contact with hosts, connections, and a plan for each host."""

from spark_deploy.inventory.groups import group_from, hosts_of
from spark_deploy.inventory.plans import check_inventory

__all__ = ["check_inventory", "group_from", "hosts_of"]
