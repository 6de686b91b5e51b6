"""Prune and uninstall: the resources we created on this host, and their removal."""
