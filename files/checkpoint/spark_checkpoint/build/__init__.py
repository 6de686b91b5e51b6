"""Build a checkpoint: check sources, make new tensors, write one of two layouts."""
