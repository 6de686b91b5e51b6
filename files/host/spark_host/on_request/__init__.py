"""Models on request: requests to a stopped service start it, and wait."""
