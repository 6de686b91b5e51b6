"""Rollouts: change a service to another release, with automatic rollback."""
