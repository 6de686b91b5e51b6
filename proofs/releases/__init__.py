"""Releases of plans, served on a CUDA machine as hosts would serve them, and asked over HTTP."""
