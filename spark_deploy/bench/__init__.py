"""Benchmarks of servers through their gateways, and reports that compare results."""
