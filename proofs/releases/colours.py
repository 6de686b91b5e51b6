"""Colours that the seeing model knows, and what it is asked about them."""

COLOURS = {
    "red": (220, 20, 20),
    "green": (20, 180, 20),
    "blue": (20, 20, 220),
    "yellow": (230, 220, 20),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}
ONE = "What colour is this picture? Answer with one word."
"""As the check asks."""
SEVERAL = "What colours are these pictures, in order?"
"""What is asked of several pictures in one request."""
