"""A small hybrid model that must look things up, and what engines do to its answers."""
