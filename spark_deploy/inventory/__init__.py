"""pyinfra's side: inventory files, first contact, connections, one plan a host."""

from spark_deploy.inventory.groups import group_from

__all__ = ["group_from"]
