"""What the journal shows of a unit's work."""

from collections.abc import Callable

Report = Callable[[str], None]  # takes one line about what is going on


def log(text: str) -> None:
    """Print one line for the journal at once."""
    print(text, flush=True)
