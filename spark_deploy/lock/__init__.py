"""Resolve names to commits and digests: lock file, hub and registries."""
