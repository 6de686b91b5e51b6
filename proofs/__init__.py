"""Harness and judges of the proofs on a CUDA machine; used by tests and benchmarks."""
