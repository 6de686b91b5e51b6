"""The watch over a running engine; it acts within the start limits and calls nobody above it."""
