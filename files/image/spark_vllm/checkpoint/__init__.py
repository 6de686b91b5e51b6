"""Hybrid checkpoints: names, formats, what is wrong with one, and its tensors as plain BF16."""
