"""pyinfra's side: inventory files, first contact, connections, plans of hosts."""

from spark_deploy.inventory.groups import group_from, hosts_of
from spark_deploy.inventory.plans import check_inventory

__all__ = ["check_inventory", "group_from", "hosts_of"]
