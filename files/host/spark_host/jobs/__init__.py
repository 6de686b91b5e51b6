"""Slow work run by systemd; finished only when its proof is there."""
