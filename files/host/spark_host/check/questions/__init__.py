"""What a check asks an engine, and what it demands of the answers."""
