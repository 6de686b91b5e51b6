"""Ask osv.dev whether a pinned Python package has a known hole: ``make advisories``.

Where nobody answers, it says so and fails nothing: a check without a network stays a check of
everything else. What was looked at and does not concern us is listed in
``requirements/accepted-advisories.txt``: its name and why.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tools.requirements import Pin, pins

CHECKOUT = Path(__file__).resolve().parent.parent
FILES = ("requirements/run.txt", "requirements/dev.txt", "files/checkpoint/requirements.txt")
ACCEPTED = CHECKOUT / "requirements/accepted-advisories.txt"
_URL = "https://api.osv.dev/v1/querybatch"
_TIMEOUT_S = 20
_MOST_BYTES = 16 << 20


class Unanswered(Exception):  # noqa: N818 - named after what happened
    """Nobody answered, or not in the form that was asked for."""


def accepted(text: str) -> dict[str, str]:
    """Read names of advisories and why each does not concern us.

    Raises:
        ValueError: one stands there without a reason.
    """
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, why = line.partition(" ")
            if not why.strip():
                raise ValueError(f"{ACCEPTED.name}: {name}: say why it does not concern us")
            found[name] = why.strip()
    return found


def ask(wanted: Iterable[Pin], url: str) -> Iterator[tuple[Pin, str]]:
    """Yield each package with the name of an advisory about it.

    Raises:
        Unanswered: nobody said anything of them.
    """
    asked = list(wanted)
    queries = [
        {"package": {"name": pin.name, "ecosystem": "PyPI"}, "version": pin.version}
        for pin in asked
    ]
    request = urllib.request.Request(
        url,
        data=json.dumps({"queries": queries}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            results = json.loads(answer.read(_MOST_BYTES))["results"]
        named = [[str(hole["id"]) for hole in one.get("vulns") or ()] for one in results]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unanswered(f"{type(error).__name__}: {str(error)[:200]!r}") from error
    if len(named) != len(asked):
        raise Unanswered(f"{len(named)} answers to {len(asked)} questions")
    for pin, names in zip(asked, named, strict=True):
        for name in names:
            yield pin, name


def verdict(found: Iterable[tuple[Pin, str]], known: Mapping[str, str]) -> list[str]:
    """Return a line for each advisory that nobody accepted."""
    return [
        f"{pin.name} {pin.version}: {name} (https://osv.dev/{name})\n"
        f"  fix: make lock-requirements, or add it to {ACCEPTED.name} with a reason"
        for pin, name in found
        if name not in known
    ]


def main() -> int:
    """Ask about every pin; 1 when one has a hole, 0 also when nobody could be asked."""
    wanted = {(pin.name, pin.version): pin for file in FILES for pin in pins(CHECKOUT / file)}
    try:
        found = list(ask(wanted.values(), os.environ.get("SPARK_ADVISORIES_URL", _URL)))
    except Unanswered as error:
        sys.stdout.write(
            f"advisories: could not be asked ({error}); {len(wanted)} packages were NOT looked at\n"
        )
        return 0
    lines = verdict(found, accepted(ACCEPTED.read_text("utf-8")))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if not lines:
        sys.stdout.write(f"advisories: none about {len(wanted)} packages\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
