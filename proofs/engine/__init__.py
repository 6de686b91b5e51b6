"""Engine runs as data, and the processes that carry them out."""
