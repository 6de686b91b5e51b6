"""Clients that ask through the gateway all the time, and what each of them saw.

They run on the guest as units of their own, so that no connection of ours is part of the picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.labkit import Guest

_DIRECTORY = "/run/lab-clients"
_ASK = f"""#!/bin/sh
cd {_DIRECTORY}
while [ -e on ]; do
  echo "$(date +%s.%N) $(curl -K key -s -i -m 30 -H 'Content-Type: application/json' \\
    -d @body http://127.0.0.1:8000/v1/chat/completions | tr -d '\\r\\n') rc=$?" >> "$1"
  sleep 0.1
done
"""


@dataclass(frozen=True)
class Seen:
    """One answer: when it was asked for, and whether it was right, a refusal, or neither."""

    at: float
    kind: str  # "right" | "refused" | "other"
    text: str


def _read(line: str) -> Seen:
    at, _, text = line.partition(" ")
    if "200 OK" in text and '"content":"42"' in text:
        return Seen(float(at), "right", text)
    # What a client is owed while there is no server: when to come back, and no half answer.
    if "503 Service" in text and "Retry-After: 10" in text:
        return Seen(float(at), "refused", text)
    return Seen(float(at), "other", text)


@contextmanager
def clients(guest: Guest, model: str, count: int = 2) -> Iterator[list[Seen]]:
    """Have clients ask during a block; the list is filled when it ends."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is 6*7?"}]}
    guest.run(
        f"rm -rf {_DIRECTORY}; mkdir -m 700 {_DIRECTORY}; touch {_DIRECTORY}/on; "
        f"cat > {_DIRECTORY}/body <<'END'\n{json.dumps(body)}\nEND\n"
        f"cat > {_DIRECTORY}/ask <<'END'\n{_ASK}END\nchmod 700 {_DIRECTORY}/ask; "
        "sed 's/.*/header = \"Authorization: Bearer &\"/' /etc/spark/api-key "
        f"> {_DIRECTORY}/key"
    )
    units = [f"lab-client-{number}" for number in range(count)]
    for unit in units:
        guest.run(f"systemd-run -q --collect --unit {unit} {_DIRECTORY}/ask {unit}.log")
    seen: list[Seen] = []
    try:
        for unit in units:
            guest.wait(f'grep -q \'"content":"42"\' {_DIRECTORY}/{unit}.log')
        yield seen
        guest.wait(f'tail -n 1 {_DIRECTORY}/{units[0]}.log | grep -q \'"content":"42"\'')
    finally:
        guest.run(f"rm -f {_DIRECTORY}/on")
        for unit in units:
            guest.wait(f"! systemctl is-active -q {unit}")
        seen += map(_read, guest.run(f"cat {_DIRECTORY}/*.log").splitlines())
        seen.sort(key=lambda one: one.at)


def outages_s(seen: list[Seen]) -> list[float]:
    """Return how long each gap without a right answer was, by the clients' clock."""
    gaps, since = [], None
    for one in seen:
        if one.kind == "right" and since is not None:
            gaps.append(one.at - since)
            since = None
        elif one.kind != "right" and since is None:
            since = one.at
    return gaps


def own_overhead_s(times_s: dict[str, float]) -> float:
    """Return what a change took from clients beyond what the engine itself needs.

    Answers in flight, the engine's start and the answers of the check are the engine's own; before
    ``drain`` and after ``open`` clients are served.
    """
    engine_s = sum(times_s[part] for part in ("drain", "start", "check"))
    served_s = sum(times_s.get(part, 0.0) for part in ("prove", "enable", "bench"))
    return times_s["total"] - engine_s - served_s
