"""Makes a checkpoint: gates, new tensors, one of two layouts, and the proof of the result."""
