"""Bytes of a plan: memory, weights, disk. Pure; for the plan and for what to say otherwise."""
