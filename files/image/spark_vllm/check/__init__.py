"""Self-check of the plugin against the engine it runs in."""
