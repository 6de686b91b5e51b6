"""What the engine is told, and what its options, images and lines mean: nowhere else in plans."""
