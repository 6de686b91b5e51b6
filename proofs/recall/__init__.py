"""A small hybrid model that recalls facts, to test caches, drafts and kernels of engines."""
