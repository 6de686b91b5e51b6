"""Opt-in INT8 LM head: quantization during the load, kernels, kernel choice."""
