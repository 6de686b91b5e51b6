"""Slow work on a host: its tools, its jobs, and what hosts lend each other."""
