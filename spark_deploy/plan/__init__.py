"""The plan of a host: pure, frozen, digestible."""
