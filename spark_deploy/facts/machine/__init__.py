"""What a host says of itself: hardware, system, packages, docker."""
