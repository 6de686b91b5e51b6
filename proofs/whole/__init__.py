"""Checkpoints of random weights at full size, through builder, plugin and engine on one GPU."""
