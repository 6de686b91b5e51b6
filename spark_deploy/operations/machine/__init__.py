"""What is ensured on the machine itself: access, packages, CUDA, Docker, reboots."""
