"""Shared by controller and hosts: documents, paths, names. Standard library only."""
