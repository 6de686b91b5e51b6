"""Build a checkpoint: check sources, make new tensors, write the result."""
