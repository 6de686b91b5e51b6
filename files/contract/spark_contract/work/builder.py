"""The builder of checkpoints: the words that a controller and the host's tool say to it."""

from __future__ import annotations

BUILDER = "spark_checkpoint"  # the package, run as `python3 -m`

BUILD = "build"
DESCRIBE = "describe"
DISCARD = "discard"
FETCH = "fetch"
HOLD = "hold"
INSPECT = "inspect"
LAYERS = "layers"
REQUANTIZE = "requantize"
VERIFY = "verify"

AGAINST = "--against"
ALL_DOCUMENTS = "--all-documents"
ENDPOINT = "--endpoint"
JSON = "--json"
LEAVE_OUT = "--leave-out"
OR_COPY = "--or-copy"
TOKEN_FILE = "--token-file"
TREE = "--tree"


def argv(command: str, *words: str) -> tuple[str, ...]:
    """Return how a host runs one of these commands."""
    return ("python3", "-m", BUILDER, command, *words)
