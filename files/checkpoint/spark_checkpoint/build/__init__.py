"""Build checkpoints: check sources, create new tensors, write the result."""
