"""The LM head made INT8 while the model loads, and the ways to compute it."""
