"""Ways to a server: what clients are told, and tunnels."""
