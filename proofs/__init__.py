"""Proofs on CUDA machines and CPUs, benchmarks, and their results."""
