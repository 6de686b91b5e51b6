"""The five prompts that the community's table of this stack was made with, by kind and length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question and how long its answer may be."""

    name: str
    tokens: int
    text: str


SEEDS = (
    Prompt(
        "Q&A", 256, "Explain why the sky is blue and sunsets are red, for a curious adult."
    ),
    Prompt(
        "code", 512, "Write a Python class for a least-recently-used cache, with type hints, "
        "docstrings and three unit tests."
    ),
    Prompt(
        "JSON", 1024, "Return a JSON array of 20 fictional employees, each with id, name, email, "
        "department, salary, a list of skills and an address object. JSON only."
    ),
    Prompt("math", 64, "What is 7823 * 4519? Answer with the number only."),
    Prompt(
        "long code", 2048, "Write a complete command-line to-do application in Python: argparse, "
        "storage in SQLite, add, list, finish, delete and search, error handling, and tests. "
        "Show every file in full."
    ),
)  # fmt: skip
RUNS = 2  # the first one warms up
