"""What there is on a host, and what it is called."""
