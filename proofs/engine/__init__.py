"""Engine runs."""
