"""Names to identities: the lock file, and the hub and registries that are asked."""
