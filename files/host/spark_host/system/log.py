"""What is printed: for the journal, and for who asked."""

import json
from collections.abc import Callable

from spark_contract import documents

Report = Callable[[str], None]  # takes one line about what is going on


def answer(document: object) -> None:
    """Print a document as one line of JSON, for who asked."""
    print(json.dumps(documents.plain(document)), flush=True)


def log(text: str) -> None:
    """Print one line for the journal at once."""
    print(text, flush=True)
