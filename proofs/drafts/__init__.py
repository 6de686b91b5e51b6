"""Draft models trained for the lab's model: DFlash and EAGLE-3, as the engine computes them."""
