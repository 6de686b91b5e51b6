"""The end of the demo: a change that answers garbage is refused, while a client keeps asking."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lab.errors import LabError

QUESTION, ANSWER = "What is the capital of France?", "Paris"
_PAUSE_S = 0.5
# Another model, whose engine answers garbage: the stub engine does so when it is told to.
CHOICE = (
    "--data",
    "model=lab-stub",
    "--data",
    "engine.environment=" + json.dumps({"STUB_FAULT": "garbage"}),
)


@dataclass
class Seen:
    """What a client was told, in the order in which it asked."""

    kinds: list[str] = field(default_factory=list)  # "right" | "come back later" | other words

    @property
    def counted(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in Counter(self.kinds).items())

    @property
    def worst(self) -> list[str]:
        return [kind for kind in self.kinds if kind not in ("right", "come back later")]


def show(login: list[str], deploy: Callable[..., subprocess.CompletedProcess[bytes]]) -> None:
    """Deploy what answers garbage on one host, and see it refused.

    Args:
        login: words of an ssh command that leads to the host.
        deploy: runs ``deploy.py`` with more words, for that host alone.

    Raises:
        LabError: it was not refused, another release serves now, or a client saw more of it than
            a polite 503.
    """
    before = _serving(login)
    with asking(login) as seen:
        done = deploy(*CHOICE)
    after = _serving(login)
    print(f"\nexit code {done.returncode}; serves {after}, as before")
    print(f"a client that asked all the time was told: {seen.counted}", flush=True)
    if done.returncode == 0:
        raise LabError("deploy.py", "an engine that answers garbage was let in", "report this")
    if after != before or seen.worst or seen.kinds[-1:] != ["right"]:
        what = f"{before} before, {after} after; the client saw {seen.counted}"
        raise LabError("the way back", what, "read the lines above")


def _serving(login: list[str]) -> str:
    units = "systemctl list-units --plain --no-legend --state=active 'spark-serve@*'"
    said = subprocess.run(
        [*login, units], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return " ".join(line.split()[0] for line in said.stdout.splitlines() if line.strip())


@contextmanager
def asking(login: list[str]) -> Iterator[Seen]:
    """Ask again and again during a block, from the host that ``login`` leads to."""
    seen, over = Seen(), threading.Event()

    def client() -> None:
        while not over.is_set():
            seen.kinds.append(_ask(login))
            time.sleep(_PAUSE_S)

    thread = threading.Thread(target=client)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen.kinds.append(_ask(login))


def _ask(login: list[str]) -> str:
    """Ask once through the gateway; the key goes over standard input, never into argv."""
    body = {
        "model": "lab-model", "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 200, "temperature": 0,
    }  # fmt: skip
    command = (
        "sudo sed 's/.*/header = \"Authorization: Bearer &\"/' /etc/spark/api-key | "
        "curl -sS -m 120 -K - -w '\\n%{http_code}' -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))} http://127.0.0.1:8000/v1/chat/completions"
    )
    done = subprocess.run(
        [*login, command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    text, _, code = done.stdout.rpartition("\n")
    if code == "200" and ANSWER in text:
        return "right"
    if code == "503":
        return "come back later"
    return f"{code or 'no answer'} {done.stderr.strip() or text[:80]!r}"
