"""What maintainers run; no deploy needs it."""
