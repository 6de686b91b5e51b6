"""Hybrid checkpoints: names, formats, integrity checks, and tensors as plain BF16."""
