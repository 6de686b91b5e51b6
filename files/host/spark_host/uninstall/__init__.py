"""Leaving a host: what it was before us, what is ours on it, and how that goes again."""
