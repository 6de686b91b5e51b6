"""What hosts say: one command each, parsed by pure functions."""
