"""Opt-in INT8 LM head: quantisation during the load, kernels, kernel choice."""
