"""The plan of a host: pure and frozen."""
