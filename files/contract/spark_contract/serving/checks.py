"""Names of checks and events: the host tells them, reports look for them."""

from __future__ import annotations

# Checks, as a proof names them; the others are named where they are declared, and nowhere else.
ACCEPTANCE = "acceptance"
CONTEXT_LENGTH = "context length"
COUNTERS = "counters"
HEALTH = "health"
LOG_LINES = "log lines"
MEMORY = "memory"
NEEDLE = "needle"
PREFIX_REUSE = "prefix reuse"  # times a growing conversation
READY = "ready"

# Events, as the watch tells them.
COOLED = "cooled"
FRAGMENTED = "fragmented"
HOT = "hot"
KILLED = "kill"
POWER = "power"
STALLED = "stalled"
STARVING = "starving"
