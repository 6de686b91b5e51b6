"""Quantises a 16-bit tree with AutoRound, which runs in the engine's container."""
