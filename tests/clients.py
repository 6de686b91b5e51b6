"""Clients that send requests continuously from units on the guest, and the answers they got."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
class Answer:
    at: float
    kind: str  # "right" | "refused" | "other"
    text: str


def _read(line: str) -> Answer:
    at, _, text = line.partition(" ")
    if "200 OK" in text and '"content":"42"' in text:
        return Answer(float(at), "right", text)
    # Without a server a client gets a time to retry, never a partial answer.
    if "503 Service" in text and "Retry-After: 10" in text:
        return Answer(float(at), "refused", text)
    return Answer(float(at), "other", text)


@contextmanager
def clients(guest: Guest, model: str, count: int = 2, **fields: Any) -> Iterator[list[Answer]]:
    """Run clients during a block; the list is filled at the end. Every right answer is 42."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is 6*7?"}], **fields}
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
    answers: list[Answer] = []
    try:
        for unit in units:
            guest.wait(f'grep -q \'"content":"42"\' {_DIRECTORY}/{unit}.log')
        yield answers
        guest.wait(f'tail -n 1 {_DIRECTORY}/{units[0]}.log | grep -q \'"content":"42"\'')
    finally:
        guest.run(f"rm -f {_DIRECTORY}/on")
        for unit in units:
            guest.wait(f"! systemctl is-active -q {unit}")
        answers += map(_read, guest.run(f"cat {_DIRECTORY}/*.log").splitlines())
        answers.sort(key=lambda answer: answer.at)


def outages_s(answers: list[Answer]) -> list[float]:
    gaps, since = [], None
    for answer in answers:
        if answer.kind == "right" and since is not None:
            gaps.append(answer.at - since)
            since = None
        elif answer.kind != "right" and since is None:
            since = answer.at
    return gaps


def overhead_s(times_s: dict[str, float]) -> float:
    """Return the outage of a rollout without the engine's own part: drain, start and check.

    Clients are served before ``drain`` and after ``open``. :func:`assert_short_waits` limits our
    share of ``start`` and ``check``.
    """
    engine_s = sum(times_s[part] for part in ("drain", "start", "check"))
    served_s = sum(times_s.get(part, 0.0) for part in ("prove", "enable", "bench"))
    return times_s["total"] - engine_s - served_s


# The stub's longest load in these tests; the rest of a start is Docker, systemd and our tools.
STUB_LOAD_S = 0.5
# On two idle cores an outage took 2.0 s: start 1.3 s with 0.2 s of load, check 0.1 s, stop 0.5 s.
LONGEST_QUIET_OUTAGE_S = 5.0
# With a load of 15 a start took 9.4 s, a check 1.6 s, whole rollouts 14.2 and 15.7 s.
LONGEST_START_S = 25.0
LONGEST_CHECK_S = 20.0
LONGEST_OUTAGE_S = 40.0


def is_quiet() -> bool:
    return os.getloadavg()[0] <= (os.cpu_count() or 1)


def assert_short_waits(times_s: dict[str, float], outage_s: float) -> None:
    assert times_s["start"] - STUB_LOAD_S < LONGEST_START_S, times_s
    assert times_s["check"] < LONGEST_CHECK_S, times_s
    # A setting limits the time of the drain.
    without_load_s = outage_s - times_s["drain"] - STUB_LOAD_S
    assert without_load_s < LONGEST_OUTAGE_S, (outage_s, times_s)
    if is_quiet():
        assert without_load_s - times_s["check"] < LONGEST_QUIET_OUTAGE_S, (outage_s, times_s)
